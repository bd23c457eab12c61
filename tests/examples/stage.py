"""Examples on a stage: their own files on real servers, with names that no other test has."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import redis
import turso

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.control.work import ensure_start, register
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import RunOptions
from deltaforge_dagster.resources.platform import Opened
from tests.e2e.conftest import Shop
from tests.fix_kafka import Record, read_topic
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Watcher, warm_tools

EXAMPLES = Path(__file__).parents[2] / "examples"

_NAMED = re.compile(r"\b((?:default_)?topic|subject|stream|slot): (\"?)")
_MYSQL_DATABASE = re.compile(r"\b(?:shop|app)\.(?=[a-z*])")
_RUNS = 5
"""How often a run is begun: a script may meet its limits on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What all examples share: one state store and journal."""

    opened: Opened


class TursoShop(Shop):
    """A file of Turso, whose connections capture."""

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with closing(turso.connect(self.dsn, isolation_level=None)) as connection:
            capture = "PRAGMA unstable_capture_data_changes_conn('full')"
            for statement in (capture, "BEGIN", *statements, "COMMIT"):
                connection.execute(statement).fetchall()


_DATABASES: Mapping[str, type[Shop]] = {"mysql": MysqlShop, "turso": TursoShop}


class Example:
    """One example: a pipeline whose start is fixed; what is changed from now on is captured.

    Args:
        stage: Where it runs.
        path: Its file; the environment names the servers.
        dsn: Its database.
        own: What the names of its topics, streams, subjects and slots begin with.
    """

    def __init__(self, stage: Stage, path: Path, dsn: str, own: str) -> None:
        self.own = own
        self.loaded: LoadedPipeline = load_pipeline(path)
        database = _DATABASES.get(self.loaded.spec.spec.source.type, Shop)
        self._database: Shop = database(dsn, redis_uri="")
        self.store = stage.opened.store
        self._context = warm_tools(stage.opened, self.loaded)

    def start(self) -> None:
        """Fix where the pipeline begins: now."""
        source = self._context.build_source()
        try:
            ensure_start(self.store, self.loaded, register(self.store, self.loaded), source)
        finally:
            source.close()

    def change(self, *statements: str) -> None:
        """Run statements in one transaction."""
        self._database.execute(*statements)

    def deliver(self) -> RunOutcome:
        """Deliver everything that was changed to every sink."""
        for _ in range(_RUNS):
            run = LiveRun(
                self.loaded,
                self._context,
                RunOptions(
                    str(uuid.uuid4()),
                    Watcher(self.store, self.loaded.name),
                    until_caught_up=True,
                ),
            )
            outcome = run.execute()
            if not outcome.behind and outcome.capture_error is None:
                return outcome
        raise AssertionError(outcome)


def text_of(name: str, own: str, dsn: str) -> str:
    """Return an example's text, with names of its own on servers that other tests use, too."""
    text = _NAMED.sub(rf"\1: \2{own}_", (EXAMPLES / f"{name}.yaml").read_text())
    if urlsplit(dsn).scheme == "mysql":
        text = _MYSQL_DATABASE.sub(f"{urlsplit(dsn).path[1:]}.", text)
    return text


def records(example: Example, brokers: str, topic: str) -> list[Record]:
    """Return what consumers of committed messages get of a topic."""
    return read_topic(brokers, f"{example.own}_{topic}")


def entries(example: Example, client: redis.Redis, stream: str) -> list[dict[str, str]]:
    """Return the fields of a stream's entries."""
    found = cast("list[tuple[str, dict[str, str]]]", client.xrange(f"{example.own}_{stream}"))
    return [fields for _, fields in found]


def events(found: list[Record]) -> list[dict[str, Any]]:
    """Return the values of records."""
    return [json.loads(one.value or b"") for one in found]


Play = Callable[..., Example]
