"""Tests of what a tick reads with PostgreSQL as storage: few rows through an index, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.storage.event_log import SqlEventLogStorage
from sqlalchemy import event

from deltaforge_dagster.assets.checks import evaluate
from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG, asset_key
from deltaforge_dagster.assets.publish import publish
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sensors.history import forget_events
from deltaforge_dagster.sensors.snapshot import due_snapshot_run
from deltaforge_dagster.sensors.tick import tick
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.database.tables import checkpoints, pipelines
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.sensors.test_growth import FILE
from tests.state.make import NAME, capture, deliver, expire, held

pytestmark = pytest.mark.postgres

DAGSTER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"

PIPELINES, RANGES, RUNS = 10, 400, 40
"""The number of ranges of each pipeline, and of runs."""

ENOUGH = 2 * RUNS
"""How many rows one statement may read: all evaluations of one check, which retention limits."""

ALL = f"generate_series(0, {PIPELINES}) n, generate_series(3, {RANGES}) r"
RUNS_OF_ALL = f"generate_series(0, {PIPELINES}) n, generate_series(1, {RUNS}) r"
RENAMED = "CASE n WHEN 0 THEN {0} ELSE replace({0}, 'orders', 'p' || n) END"


@dataclass
class Asked:
    """The statements of the last tick, and the rows that each one read."""

    statements: list[str] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)
    explains: bool = False

    def note(
        self, connection: sa.Connection, _cursor: object, statement: str, parameters: Any, *_: Any
    ) -> None:
        """Record a statement, and explain it."""
        if self.explains:
            return
        self.statements.append(statement)
        asks = statement.lstrip().upper().startswith(("SELECT", "WITH"))
        if not asks or "pg_catalog" in statement:  # reads the list of tables
            return
        self.explains = True
        try:
            found = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
        finally:
            self.explains = False
        rows = rows_read(found[0]["Plan"])
        self.read[statement] = max(self.read.get(statement, 0), rows)


def rows_read(node: Mapping[str, Any]) -> int:
    """Return how many rows the scans of a plan have read."""
    own = 0
    if node["Node Type"].endswith("Scan") and "Relation Name" in node:
        removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
        own = node["Actual Rows"] + sum(node.get(name, 0) for name in removed)
        own *= node["Actual Loops"]
    return own + sum(rows_read(child) for child in node.get("Plans", ()))


def multiply(
    connection: sa.Connection, table: str, where: str, many: str, **values: str | None
) -> None:
    """Copy a table's rows, one for each of `many`, with other values; None stands for the column's default."""
    columns = {
        one["name"]: f'x."{one["name"]}"' for one in sa.inspect(connection).get_columns(table)
    }
    chosen = {name: values.get(name, kept) for name, kept in columns.items()}
    given = {name: value for name, value in chosen.items() if value is not None}
    connection.exec_driver_sql(
        f"INSERT INTO {table} ({', '.join(given)}) SELECT {', '.join(given.values())}"
        f" FROM {table} x, {many} WHERE {where}"
    )


def grow_store(store: StateStore) -> None:
    """Add many ranges, and other pipelines that have as many."""
    name = f"CASE n WHEN 0 THEN '{NAME}' ELSE 'p' || n END"
    others = f"generate_series(1, {PIPELINES}) n"
    ends = {"first_segment": "r", "last_segment": "r"}
    with store.database.write() as connection:
        connection.execute(
            sa.update(pipelines).values(next_segment=RANGES + 1, next_range=RANGES + 1)
        )
        delivered = sa.update(checkpoints).where(checkpoints.c.sink == "redis")
        connection.execute(delivered.values(segment=RANGES))
        multiply(connection, "pipeline", "true", others, name=name)
        multiply(connection, "checkpoint", "true", others, pipeline=name)
        multiply(connection, "lease", "true", others, pipeline=name)
        one = "x.range = 2"
        multiply(connection, "range", one, ALL, pipeline=name, range="r", **ends)
        multiply(connection, "segment", one, ALL, pipeline=name, range="r", segment="r")
        multiply(connection, "published", one, ALL, pipeline=name, range="r")


def grow_dagster(instance: dg.DagsterInstance, run_id: str) -> None:
    """Add as many ranges, and runs with their evaluations, of as many pipelines to Dagster."""
    number = "lpad(r::text, 10, '0')"
    renamed = {"id": None, "asset_key": RENAMED.format("x.asset_key")}
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    with storage.index_connection() as connection:
        run = "md5(n || '.' || r)"
        multiply(
            connection, "event_logs", "x.partition = '0000000002'", ALL, partition=number, **renamed
        )
        multiply(
            connection, "dynamic_partitions", "x.partition = '0000000002'", ALL,
            id=None, partition=number, partitions_def_name="x.partitions_def_name || n",
        )  # fmt: skip
        newest = "SELECT max(id) FROM asset_check_executions GROUP BY asset_key, check_name"
        multiply(
            connection, "asset_check_executions", f"x.id IN ({newest})", RUNS_OF_ALL, **renamed
        )
        multiply(
            connection, "runs", f"x.run_id = '{run_id}'", RUNS_OF_ALL,
            id=None, run_id=run, status="'SUCCESS'",
        )  # fmt: skip
        multiply(
            connection, "run_tags", f"x.run_id = '{run_id}'", RUNS_OF_ALL,
            id=None, run_id=run, value=RENAMED.format("x.value"),
        )  # fmt: skip


def analyzed(connection: sa.Connection) -> None:
    """Run ANALYZE, as autovacuum does after a while."""
    connection.commit()
    connection.exec_driver_sql("ANALYZE")


@pytest.fixture
def asked() -> Iterator[Asked]:
    """Record the statements on every database."""
    noted = Asked()
    event.listen(sa.Engine, "before_cursor_execute", noted.note)
    yield noted
    event.remove(sa.Engine, "before_cursor_execute", noted.note)


@pytest.fixture
def central(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance configured as in `docker/`."""
    url = postgres_server.create_database().replace("postgres", "postgresql+psycopg2", 1)
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", url)
    (tmp_path / "dagster.yaml").write_text(DAGSTER_YAML.read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        yield instance


@pytest.fixture
def store(postgres_server: PostgresServer) -> Iterator[StateStore]:
    """A state store in PostgreSQL."""
    opened = StateStore.open(postgres_server.create_database())
    yield opened
    opened.close()


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job
def work() -> None:
    """A job for runs to create."""
    nothing()


def no_source() -> Source:
    """Raise an error, as if the source were unreachable."""
    raise SourceUnavailable("not there")


def loaded_from(folder: Path) -> LoadedPipeline:
    """Return the pipeline of the store."""
    (folder / "orders.yaml").write_text(FILE)
    return load_pipeline(folder / "orders.yaml")


def test_a_tick_reads_little(
    store: StateStore, central: dg.DagsterInstance, tmp_path: Path, asked: Asked
) -> None:
    """A tick executes as many statements as with two ranges and one pipeline, each through an index.

    One sink has everything, the other nothing.
    """
    loaded = loaded_from(tmp_path)
    journal = Journal("memory://growth")
    lease = held(store, "redis", "broken")
    for number in (1, 2):
        capture(store, lease, number)
    with store.fenced(lease) as writer:
        writer.checkpoints.failed("broken", "refused", 1e12)
    deliver(store, lease, "redis", 2)
    expire(store)
    run = central.create_run_for_job(
        work, status=dg.DagsterRunStatus.SUCCESS, tags={PIPELINE_TAG: NAME, RUN_TAG: "live"}
    )
    publish(central, store, NAME, central.report_runless_asset_event, journal)
    for evaluation in evaluate(central, store, loaded, None, []):
        central.report_runless_asset_event(evaluation)

    def statements(of: Callable[[], object]) -> list[str]:
        of()
        asked.statements.clear()
        asked.read.clear()
        of()
        return sorted(asked.statements)

    ticks: list[Callable[[], object]] = [
        lambda: tick(central, store, loaded, no_source, journal),
        lambda: due_snapshot_run(central, store, loaded),
    ]
    few = [statements(one) for one in ticks]
    grow_store(store)
    grow_dagster(central, run.run_id)
    storage = central.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    with storage.index_connection() as connection:
        analyzed(connection)
    with store.database.read() as connection:
        analyzed(connection)

    for ticking, before in zip(ticks, few, strict=True):
        assert statements(ticking) == before
        assert asked.read
        assert {one: rows for one, rows in asked.read.items() if rows > ENOUGH} == {}

    asked.read.clear()
    keys = [asset_key(NAME, asset) for asset in ("changes", "redis")]
    assert forget_events(central, keys, f"{RANGES - 100:010d}", 0.0) > 0
    # Of checks there are few rows, which PostgreSQL may read as a whole whatever index they have.
    of_log = [rows for statement, rows in asked.read.items() if "FROM event_logs" in statement]
    assert of_log
    assert max(of_log) < RANGES, "the log is not read to find the newest event"
