"""Tests of watching the head of an idle source, on a real PostgreSQL server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.pipeline.control import unread_log
from deltaforge_dagster.pipeline.control.unread_log import HeadWatch
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.source import PostgresSource
from tests.pipeline.changes import PlayedSource, eventually, transaction
from tests.sources.postgres.bench import PIPELINE, PostgresBench

LONG = 300.0
"""Seconds of a watch that only something it sees may end."""


class Told(PostgresSource):
    """A source over a bench's tables that keeps what it has answered.

    Args:
        bench: The database.
    """

    def __init__(self, bench: PostgresBench) -> None:
        super().__init__(bench.config(), PIPELINE)
        self.ends: list[object] = []
        self.looks: list[bool] = []

    def log_ends(self, seconds: float) -> Generator[LsnPosition]:
        """Keep each end that was asked for."""
        for end in super().log_ends(seconds):
            self.ends.append(end)
            yield end

    def has_changes(self, after: Position) -> bool:
        """Keep each look."""
        self.looks.append(super().has_changes(after))
        return self.looks[-1]


def watch(source: Callable[[], Source], seconds: float) -> HeadWatch:
    """Return a watch that has so many seconds from now on."""
    return HeadWatch(source, time.monotonic() + seconds)


@pytest.mark.postgres
def test_a_change_ends_a_watch(postgres_dsn: str) -> None:
    """A watch that has begun to ask before a commit sees it, and until then looks for nothing."""
    with PostgresBench(postgres_dsn) as bench, ThreadPoolExecutor(1) as pool:
        start = bench.source().ensure_start()
        told = Told(bench)
        with watch(lambda: told, LONG) as watching:
            seen = pool.submit(watching.sees_changes, start)
            eventually(lambda: len(told.ends) > 3)
            assert not seen.done()

            bench.execute(bench.insert("orders", 1))

            assert seen.result()
        assert told.looks[-1:] == [True]


@pytest.mark.postgres
def test_what_is_committed_before_the_watch_asks_again_is_seen(postgres_dsn: str) -> None:
    """Between the beginning of a watch and the first question nothing is missed."""
    with PostgresBench(postgres_dsn) as bench:
        start = bench.source().ensure_start()
        told = Told(bench)
        with watch(lambda: told, LONG) as watching:
            bench.execute(bench.insert("orders", 1))

            assert watching.sees_changes(start)
        assert len(told.ends) == 2, "one before the commit, and one after it"


@pytest.mark.postgres
def test_an_idle_source_is_watched_without_a_look(postgres_dsn: str) -> None:
    """When the time is up the answer is no; the log was not decoded, and no slot was in use."""
    with PostgresBench(postgres_dsn) as bench:
        start = bench.source().ensure_start()
        told = Told(bench)
        with watch(lambda: told, 0.5) as watching:
            assert bench.reader() is None
            assert not watching.sees_changes(start)
        assert len(told.ends) > 1
        assert len(told.looks) < len(set(told.ends)), "only where the server itself wrote"


@contextmanager
def busy(bench: PostgresBench) -> Iterator[None]:
    """Write to a table that is not captured, all the time."""
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            bench.execute(bench.insert("other", number := number + 1))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            yield
        finally:
            over.set()
            writing.result()


@pytest.mark.postgres
def test_a_busy_table_beside_hides_no_change(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others write, looks find nothing; then a change of ours ends the watch."""
    monkeypatch.setattr(unread_log, "_PAUSE_SECONDS", 0.0)
    with PostgresBench(postgres_dsn) as bench, ThreadPoolExecutor(1) as pool:
        start = bench.source().ensure_start()
        told = Told(bench)
        with watch(lambda: told, LONG) as watching:
            seen = pool.submit(watching.sees_changes, start)
            with busy(bench):
                eventually(lambda: len(told.looks) > 2 or seen.done())
            assert told.looks[:2] == [False, False]
            assert not seen.done()

            bench.execute(bench.insert("orders", 1))

            assert seen.result()


@pytest.mark.postgres
def test_looks_that_find_nothing_have_pauses(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the log grows, it is not decoded again before the pause is over."""
    monkeypatch.setattr(unread_log, "_PAUSE_SECONDS", LONG)
    with PostgresBench(postgres_dsn) as bench, ThreadPoolExecutor(1) as pool:
        start = bench.source().ensure_start()
        told = Told(bench)
        with watch(lambda: told, LONG) as watching:
            seen = pool.submit(watching.sees_changes, start)
            with busy(bench):
                eventually(lambda: len(set(told.ends)) > 5)
            assert told.looks == [False]
            watching.until = 0.0

            assert not seen.result()


def test_a_source_that_fails_ends_a_watch() -> None:
    """The answer is no: the next tick reports what is wrong."""

    class Failing(PlayedSource):
        def log_ends(self, seconds: float) -> Generator[int]:
            del seconds
            yield 1
            raise SourceUnavailable("gone")

    def missing() -> Source:
        raise SourceUnavailable("not there")

    for build in (lambda: Failing([transaction(5)]), missing):
        with watch(build, LONG) as watching:
            assert not watching.sees_changes(LsnPosition(0))


def test_a_source_that_cannot_be_watched() -> None:
    """A source without `log_ends`, or of which there is nothing to ask, is not watched."""

    class Silent(PlayedSource):
        def log_ends(self, seconds: float) -> Generator[int]:
            del seconds
            yield from ()

    for source in (PlayedSource([transaction(5)]), Silent([transaction(5)])):
        with watch(lambda source=source: source, LONG) as watching:  # type: ignore[misc]
            assert not watching.sees_changes(LsnPosition(0))
        assert source.closed.is_set()
