"""Tests that the cost of a tick does not grow with a pipeline's history."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from sqlalchemy import event

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sensors.tick import tick
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.store import StateStore
from tests.state.make import capture, deliver, expire, held

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
    - {type: redis, config: {id: broken, uri: "redis://localhost", stream: t}}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPipeline:
    """The pipeline of the store."""
    (tmp_path / "orders.yaml").write_text(FILE)
    return load_pipeline(tmp_path / "orders.yaml")


def no_source() -> Source:
    """Raise an error, as if the source were unreachable."""
    raise SourceUnavailable("not there")


def test_a_tick_s_statements(
    sqlite_store: StateStore, loaded: LoadedPipeline, request: pytest.FixtureRequest
) -> None:
    """With 60 ranges a tick executes as many statements as with 3, and none per range, even if a sink fails."""
    lease = held(sqlite_store, "redis", "broken")
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    engine = sqlite_store.database._engine
    event.listen(engine, "before_cursor_execute", note)
    request.addfinalizer(lambda: event.remove(engine, "before_cursor_execute", note))

    with dg.DagsterInstance.ephemeral() as instance:

        def asked() -> list[str]:
            tick(instance, sqlite_store, loaded, no_source, Journal("memory://growth"))
            statements.clear()
            tick(instance, sqlite_store, loaded, no_source, Journal("memory://growth"))
            return sorted(statements)

        for number in range(1, 4):
            capture(sqlite_store, lease, number)
        with sqlite_store.fenced(lease) as writer:
            writer.checkpoints.failed("broken", "refused", 1e12)
        deliver(sqlite_store, lease, "redis", 3)
        expire(sqlite_store)
        few = asked()
        lease = held(sqlite_store, "redis", "broken", run_id="run-2")
        for number in range(4, 61):
            capture(sqlite_store, lease, number)
        deliver(sqlite_store, lease, "redis", 60)
        expire(sqlite_store)
        assert asked() == few

    many = [one for one in few if "FROM range" in one or "FROM segment" in one]
    assert many
    bounds = ("LIMIT", "min(", "BETWEEN")
    assert all(any(bound in one for bound in bounds) for one in many)
    assert not [one for one in few if "FROM published" in one]
