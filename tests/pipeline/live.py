"""A live run for tests: on real servers, in this process and a thread of its own, no Dagster."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.closed_ranges import pending
from deltaforge_dagster.pipeline.deliver.messages import MessageDelivery
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import RunContext, RunOptions
from deltaforge_dagster.pipeline.snapshots.read import SnapshotRun
from deltaforge_dagster.resources.platform import Opened, Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.resources.spark import SparkSessions
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop
from tests.fix_spark import SparkAddress

WARM = str(uuid.uuid4())
"""The Spark session that first runs of this process go on with, as if a run before them had stored it.

For each new one Spark starts a Python process that imports everything: a second or two of processor time.
"""


def warm_tools(opened: Opened, loaded: LoadedPipeline) -> RunContext:
    """Return what a run works with, with a Spark session that is warm unless the lease names another."""

    def sessions(session_id: str | None, remember: Callable[[str], None]) -> SparkSessions:
        return SparkSessions(opened.settings, session_id or WARM, remember)

    return dataclasses.replace(build_run_context(opened, loaded), sessions=sessions)


def in_one_segment(events: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the `segment` of a pipeline file, with which so many changes make one: no sink asks for less."""
    monkeypatch.setattr(MessageDelivery, "prompt", False)
    return f"{{max_ms: 600000, max_events: {events}}}"


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that a sink may be writing to: its last one may be half there yet."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Watcher:
    """Publishes as Dagster would, and remembers which ranges it was told of."""

    def __init__(self, store: StateStore, pipeline: str) -> None:
        self.ranges: list[int] = []
        self.warnings: list[str] = []
        self._store = store
        self._pipeline = pipeline

    def range_opened(self, number: int) -> None:
        """Remember a range."""
        self.ranges.append(number)

    def warn(self, message: str) -> None:
        """Remember what people were told."""
        self.warnings.append(message)

    def publish(self) -> None:
        """Mark what is due as published."""
        for one in pending(self._store, self._pipeline):
            self._store.ranges.mark_published(self._pipeline, one.range, one.asset)


class Background:
    """A run in a thread; `outcome` waits for its end."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self._outcome: RunOutcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._execute)
        self._thread.start()

    def _execute(self) -> None:
        try:
            self._outcome = self.run.execute()
        except BaseException as error:  # noqa: BLE001 - raised again by `outcome`
            self._error = error

    @property
    def ended(self) -> bool:
        """The run is over, however it went."""
        return not self._thread.is_alive()

    def outcome(self, seconds: float = 120.0) -> RunOutcome:
        """Return how the run ended, which must be within `seconds`."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the run has not ended in {seconds:.0f} s"
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def end(self) -> RunOutcome:
        """Ask the run to end, and wait for it."""
        self.run.request_end()
        return self.outcome()


class Feed:
    """A pipeline over a shop, and the installation it runs in."""

    def __init__(self, shop: Shop, opened: Opened, path: Path) -> None:
        self.shop = shop
        self.path = path
        self.opened = opened
        self.store = opened.store
        self._running: list[Background] = []

    @property
    def loaded(self) -> LoadedPipeline:
        """The pipeline file as it is now."""
        return load_pipeline(self.path)

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.path.stem

    def live_run(self, *, until_caught_up: bool = False, code: str | None = None) -> LiveRun:
        """Return a run, not yet begun; `code` is that of the tick that has started it."""
        return LiveRun(
            self.loaded,
            warm_tools(self.opened, self.loaded),
            RunOptions(
                str(uuid.uuid4()),
                Watcher(self.store, self.name),
                until_caught_up=until_caught_up,
                code=code,
            ),
        )

    def catch_up(self) -> RunOutcome:
        """Execute a run that ends when everything is captured and delivered."""
        return self.live_run(until_caught_up=True).execute()

    def read_snapshot(self) -> None:
        """Read the snapshot that is requested; runs take its rows into the journal."""
        tools = warm_tools(self.opened, self.loaded)
        SnapshotRun(self.loaded, tools, warn=lambda _: None, progress=lambda _: None).execute()

    def begin(self, code: str | None = None) -> Background:
        """Begin a run in a thread."""
        self._running.append(Background(self.live_run(code=code)))
        return self._running[-1]

    def end_all(self) -> None:
        """End what is still running."""
        for one in self._running:
            one.end()

    def delivered(self, table: str) -> list[dict[str, str]]:
        """Return the entries of a table's stream."""
        return self.shop.entries(f"{self.name}.{table}")


@contextmanager
def opened_feed(shop: Shop, path: Path, text: str, spark: SparkAddress) -> Iterator[Feed]:
    """Lend a feed whose pipeline file is `path`; its start position is fixed already."""
    path.write_text(text)
    home = path.parent / "home"
    settings = Settings.from_env({"DELTAFORGE_HOME": str(home), **spark.settings(home)})
    with Platform(settings, single_process=True).open() as opened:
        feed = Feed(shop, opened, path)
        feed.catch_up()
        try:
            yield feed
        finally:
            feed.end_all()
