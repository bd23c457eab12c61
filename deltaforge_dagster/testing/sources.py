"""Contract tests of sources: what every source promises a run, as a test class to subclass.

::

    class TestJsonLines(SourceContract):
        @pytest.fixture
        def bench(self, tmp_path: Path) -> JsonLinesBench:
            return JsonLinesBench(tmp_path / "shop.jsonl")

A source is tested through a `Bench`: a database with the tables `orders` and `items` (`id` integer
key, `v` text), which the source captures, and the table `other`, which it does not capture.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import PositionLost, SourceUnavailable
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, Source, WatchableSource
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.tables import ColumnChanges, SchemaStamp, TableFate, TableSchema

LIMITS = ReadLimits(max_wait=0.05)
SECONDS = 60.0


class HasSource(Protocol):
    """Anything that can make sources, such as a `Bench`."""

    def source(self) -> Source:
        """Return a new source for its tables."""


class Bench(ABC):
    """A database, and the sources that read it.

    Attributes:
        holds_log: Whether the server keeps its log until the source has confirmed it; otherwise it
            discards log by age.
        has_transactions: Whether the log says where transactions end; otherwise each change is a
            transaction.
        appends_only: Whether rows can only be added. Then all statements are made by `insert` and
            `insert_large`; otherwise statements are SQL.
        maintained: Whether `Source.maintain` checks tables and log.
        lost_log_is_finding: Whether `Source.maintain` returns a finding for lost log, instead of
            raising `PositionLost`.
    """

    holds_log: bool
    has_transactions: bool
    appends_only = False
    maintained = True
    lost_log_is_finding = False

    @abstractmethod
    def source(self) -> Source:
        """Return a new source, which the bench closes at the end of the test."""

    @abstractmethod
    def execute(self, *statements: str) -> None:
        """Run the statements in one transaction."""

    def insert(self, table: str, *ids: int) -> str:
        """Return a statement that inserts rows with these ids, each with its id as text in `v`."""
        return insert(table, *ids)

    def insert_large(self, table: str, id_: int, size: int) -> str:
        """Return a statement that inserts one row with `size` characters in `v`."""
        return f"INSERT INTO {table} VALUES ({id_}, repeat('x', {size}))"  # noqa: S608 - of a test

    @abstractmethod
    def cut(self) -> None:
        """Terminate the source's connections on the server."""

    def forget(self) -> None:
        """Make the server lose log that the source has not confirmed."""
        raise NotImplementedError

    def confirmed(self) -> Position | None:
        """Return the position that was confirmed to the server; None if it keeps none."""
        return None


class Versions:
    """An in-memory schema registry (`sources.base.SourceNotes`)."""

    def __init__(self) -> None:
        self.registered: list[tuple[TableSchema, Position]] = []
        self.definitions: list[tuple[Position, dict[str, str | None]]] = []
        self.alterations: list[tuple[TableSchema, ColumnChanges, Position]] = []
        self.fates: list[tuple[str, TableFate]] = []
        self.on_hold: dict[str, str] = {}

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Assign the next number to a version; every call counts as a new version."""
        self.registered.append((table, position))
        return SchemaStamp(f"f{len(self.registered)}", 1, len(self.registered))

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Record table definitions."""
        self.definitions.append((position, dict(definitions)))

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Record what a statement does to columns."""
        self.alterations.append((table, changes, position))

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what a statement does to tables."""
        self.fates += fates

    def defined(self, position: Position) -> dict[str, str]:
        """Return the table definitions at a position."""
        merged: dict[str, str | None] = {}
        for noted, definitions in self.definitions:
            if noted <= position:
                merged |= definitions
        return {table: text for table, text in merged.items() if text is not None}

    def holds(self) -> dict[str, str]:
        """Return the tables that are on hold."""
        return self.on_hold


@dataclass
class Taken:
    """What was read: rows, batches, and the last position at which a segment may end.

    Rows of DDL statements, which MySQL's log contains, are left out of `rows`, because most tests
    create tables.
    """

    rows: list[dict[str, object]]
    end: Position
    batches: list[ChangeBatch]

    @property
    def changes(self) -> list[tuple[object, object, object]]:
        """Table, operation and newest row image of each row."""
        return [
            (row["table"], row["op"], json.loads(str(row["after"] or row["before"])))
            for row in self.rows
        ]


def take(
    bench: HasSource,
    start: Position,
    until: Callable[[Taken], bool],
    *,
    limits: ReadLimits = LIMITS,
    source: Source | None = None,
    versions: Versions | None = None,
    seconds: float = SECONDS,
) -> Taken:
    """Read from `start` until `until` returns True, and close the source."""
    source = source or bench.source()
    taken = Taken([], start, [])
    deadline = time.monotonic() + seconds
    try:
        for batch in source.read(start, limits, versions or Versions()):
            add(taken, batch)
            if until(taken):
                return taken
            assert time.monotonic() < deadline, f"only {len(taken.rows)} rows came"
    finally:
        source.close()
    raise AssertionError("the stream ended by itself")


def add(taken: Taken, batch: ChangeBatch) -> None:
    """Add a batch to what was taken."""
    taken.batches.append(batch)
    if batch.rows is not None:
        assert batch.rows.schema.equals(CAPTURED)
        taken.rows += [row for row in batch.rows.to_pylist() if row["op"] != "ddl"]
    if batch.end is not None:
        taken.end = batch.end


def read_into(taken: Taken, reading: Iterator[ChangeBatch]) -> None:
    """Add all batches until the stream ends."""
    for batch in reading:
        add(taken, batch)


def whole(count: int) -> Callable[[Taken], bool]:
    """Return a condition for `take`: at least `count` rows are read, no transaction is open."""
    return lambda taken: len(taken.rows) >= count and taken.batches[-1].end is not None


def inserts(table: str, *ids: int) -> list[tuple[object, object, object]]:
    """Return the changes that result from inserting these ids."""
    return [(table, "c", {"id": id_, "v": str(id_)}) for id_ in ids]


def insert(table: str, *ids: int) -> str:
    """Return a statement that inserts rows with these ids."""
    return f"INSERT INTO {table} VALUES " + ", ".join(  # noqa: S608 - of a test
        f"({id_}, '{id_}')" for id_ in ids
    )


def is_quiet(bench: HasSource, after: Position) -> bool:
    """Return whether `has_changes` reports no change of the captured tables after a position.

    A timeout, or a reader that has not quite ended, counts as a change; so the source is asked
    again for up to a minute.
    """
    deadline = time.monotonic() + SECONDS
    while bench.source().has_changes(after):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _read_until(reading: Iterator[ChangeBatch], until: Callable[[], bool]) -> None:
    """Keep reading until a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not until():
        next(reading)
        assert time.monotonic() < deadline


def _only_if(condition: bool, reason: str) -> None:
    """Skip the test if a condition does not hold."""
    if not condition:
        pytest.skip(reason)


class SourceContract:
    """The promises of every source; needs a fixture `bench`, a `Bench`."""

    def test_every_kind_of_change_arrives_in_log_order(self, bench: Bench) -> None:
        """Inserts, updates and deletes of two tables arrive in the order of the log."""
        _only_if(not bench.appends_only, "rows are only added")
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        bench.execute(bench.insert("items", 7, 8), "UPDATE orders SET v = 'new' WHERE id = 1")
        bench.execute("DELETE FROM items WHERE id = 8")

        taken = take(bench, start, whole(5))

        assert taken.changes[:3] == inserts("orders", 1) + inserts("items", 7, 8)
        assert taken.changes[3] == ("orders", "u", {"id": 1, "v": "new"})
        assert [(row["table"], row["op"], row["key"]) for row in taken.rows[4:]] == [
            ("items", "d", '{"id":8}')
        ]

    def test_a_transaction_ends_on_its_last_row(self, bench: Bench) -> None:
        """`tx_end` is true on the last change of each transaction and false on all others."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1, 2), bench.insert("items", 3))
        bench.execute(bench.insert("orders", 4))

        taken = take(bench, start, whole(4))

        if not bench.has_transactions:
            assert {(row["tx_end"], row["row"], row["tx_id"]) for row in taken.rows} == {
                (True, 0, None)
            }
            return
        assert [row["tx_end"] for row in taken.rows] == [False, False, True, True]
        assert [row["row"] for row in taken.rows] == [0, 1, 2, 0]
        assert len({row["tx_id"] for row in taken.rows}) == 2

    def test_a_change_after_ensure_start_is_read(self, bench: Bench) -> None:
        """`ensure_start` fixes the start: every later commit arrives, even one before `read`."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))

        assert take(bench, start, whole(1)).changes == inserts("orders", 1)

    def test_ensure_start_can_be_called_again(self, bench: Bench) -> None:
        """A second call creates nothing.

        It returns a later start only if the server keeps no log for the source.
        """
        first = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))

        second = bench.source().ensure_start()

        assert second <= first if bench.holds_log else second > first
        assert take(bench, first, whole(1)).changes == inserts("orders", 1)

    def test_reading_on_neither_repeats_nor_loses(self, bench: Bench) -> None:
        """Many short streams, each from the end of the last, give the same rows as a single one."""
        begin = bench.source().ensure_start()
        for id_ in range(1, 21):
            bench.execute(bench.insert("orders", id_), bench.insert("items", id_))
        once = take(bench, begin, whole(40))

        pieces: list[dict[str, object]] = []
        start = begin
        while len(pieces) < 40:
            piece = take(bench, start, whole(1), limits=ReadLimits(max_events=1, max_wait=0.05))
            pieces += piece.rows
            start = piece.end

        for row in () if bench.has_transactions else (*pieces, *once.rows):
            # `Versions` numbers versions in the order of arrival, and streams may begin with any
            # table.
            del row["schema_version"], row["schema_sequence"]
        assert pieces == once.rows

    def test_a_position_survives_its_text(self, bench: Bench) -> None:
        """Reading can continue from a position that was stored as JSON text."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        end = take(bench, start, whole(1)).end
        bench.execute(bench.insert("orders", 2))

        taken = take(bench, parse_position(end.to_json()), whole(1))

        assert taken.changes == inserts("orders", 2)

    def test_reading_again_gives_the_same_rows(self, bench: Bench) -> None:
        """Event ids and every other column are a function of the log."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1, 2), bench.insert("items", 3))
        bench.execute(
            bench.insert("items", 4) if bench.appends_only else "UPDATE items SET v = 'x'"
        )

        first, second = (take(bench, start, whole(4)) for _ in range(2))

        assert first.rows == second.rows
        assert len({row["event_id"] for row in first.rows}) == 4

    def test_a_rolled_back_transaction_leaves_nothing(self, bench: Bench) -> None:
        """Only what was committed is captured."""
        _only_if(not bench.appends_only, "rows are only added")
        start = bench.source().ensure_start()
        bench.execute("SAVEPOINT s", bench.insert("orders", 1), "ROLLBACK TO SAVEPOINT s")
        bench.execute(bench.insert("orders", 2))

        assert take(bench, start, whole(1)).changes == inserts("orders", 2)

    def test_a_large_transaction_comes_in_parts_and_ends_once(self, bench: Bench) -> None:
        """More rows than `max_events` make several batches; only the last one is an end."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", *range(1, 5001)))

        taken = take(bench, start, whole(5000), limits=ReadLimits(max_events=700, max_wait=0.05))

        with_rows = [batch for batch in taken.batches if batch.rows is not None]
        assert max(batch.rows.num_rows for batch in with_rows if batch.rows) <= 700
        assert taken.changes == inserts("orders", *range(1, 5001))
        if not bench.has_transactions:
            return
        assert [batch.end is not None for batch in with_rows] == [False] * (len(with_rows) - 1) + [
            True
        ]
        assert [row["tx_end"] for row in taken.rows].index(True) == 4999

    def test_a_row_larger_than_a_batch_arrives_whole(self, bench: Bench) -> None:
        """`max_bytes` bounds read buffers, not rows."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert_large("orders", 1, 12_000_000), bench.insert("orders", 2))
        bench.execute(bench.insert("orders", 3))

        taken = take(bench, start, whole(3))

        images = [json.loads(str(row["after"])) for row in taken.rows]
        assert [len(image["v"]) for image in images] == [12_000_000, 1, 1]

    def test_an_idle_source_yields_within_max_wait(self, bench: Bench) -> None:
        """Without changes the source yields empty batches; so the reader can check time limits."""
        start = bench.source().ensure_start()
        source = bench.source()
        reading = source.read(start, LIMITS, Versions())
        next(reading)
        times = []
        for _ in range(20):
            began = time.monotonic()
            batch = next(reading)
            times.append(time.monotonic() - began)

            assert batch.rows is None
        source.close()

        # The median, with a generous limit: a busy machine may delay any of them.
        assert sorted(times)[len(times) // 2] < 5

    def test_idle_progress_passes_changes_of_others(self, bench: Bench) -> None:
        """Changes of uncaptured tables advance the confirmable position, and nothing is lost."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("other", 1))
        passed = take(bench, start, lambda taken: taken.end > start)
        bench.execute(bench.insert("orders", 1))

        taken = take(bench, passed.end, whole(1))

        assert passed.rows == []
        assert taken.changes == inserts("orders", 1)

    def test_only_confirmed_log_is_forgotten(self, bench: Bench) -> None:
        """The server keeps its log after the confirmed position, even if more was read."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        bench.execute(bench.insert("orders", 2))
        source = bench.source()
        taken = Taken([], start, [])
        reading = source.read(start, LIMITS, Versions())
        while len(taken.rows) < 1 or taken.end == start:
            add(taken, next(reading))
        confirmed = taken.end
        source.confirm(confirmed)
        while len(taken.rows) < 2:
            add(taken, next(reading))
        if bench.holds_log:
            _read_until(reading, lambda: bench.confirmed() == confirmed)
        source.close()

        assert bench.confirmed() == (confirmed if bench.holds_log else None)
        assert take(bench, confirmed, lambda _: True).rows in ([], taken.rows[1:])

    def test_a_position_may_be_confirmed_before_the_stream_opens(self, bench: Bench) -> None:
        """Connecting takes a while: a server that keeps log is told what was confirmed before."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        taken = take(bench, start, whole(1))
        source = bench.source()

        source.confirm(taken.end)

        _read_until(
            source.read(taken.end, LIMITS, Versions()),
            lambda: bench.confirmed() == (taken.end if bench.holds_log else None),
        )
        source.close()

    def test_a_cut_connection_is_retryable_and_reading_goes_on(self, bench: Bench) -> None:
        """The stream ends with `SourceUnavailable`; reading on from the last end loses nothing."""
        start = bench.source().ensure_start()
        source = bench.source()
        reading = source.read(start, LIMITS, Versions())
        taken = Taken([], start, [])
        bench.execute(bench.insert("orders", 1))
        while len(taken.rows) < 1:
            add(taken, next(reading))
        bench.cut()
        with pytest.raises(SourceUnavailable):
            read_into(taken, itertools.islice(reading, 200))
        bench.execute(bench.insert("orders", 2))

        more = take(bench, taken.end, whole(1))

        assert taken.changes + more.changes == inserts("orders", 1, 2)

    def test_closing_from_another_thread_ends_the_stream(self, bench: Bench) -> None:
        """`close` ends a stream that another thread is reading, and may be called twice."""
        start = bench.source().ensure_start()
        source = bench.source()
        ended = threading.Event()

        def read() -> None:
            try:
                for _ in source.read(start, ReadLimits(max_wait=30), Versions()):
                    pass
            except SourceUnavailable:
                ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(1)
        source.close()
        source.close()

        assert ended.wait(5)
        thread.join()

    def test_the_head_moves_with_changes(self, bench: Bench) -> None:
        """The head is at or past the end of every change that was committed."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        end = take(bench, start, whole(1)).end

        assert start <= end <= bench.source().head()

    def test_changes_are_worth_a_run(self, bench: Bench) -> None:
        """`has_changes` reports a change after the given position, and nothing if there is none."""
        start = bench.source().ensure_start()
        assert is_quiet(bench, start)
        bench.execute(bench.insert("orders", 1))
        assert bench.source().has_changes(start)

        end = take(bench, start, whole(1)).end

        assert is_quiet(bench, end)
        bench.execute(bench.insert("orders", 2))
        assert bench.source().has_changes(end)

    def test_changes_move_the_end_of_the_log(self, bench: Bench) -> None:
        """`log_ends` yields another value soon after a commit; files have only coarse times."""
        source = bench.source()
        _only_if(isinstance(source, WatchableSource), "the source cannot be watched")
        assert isinstance(source, WatchableSource)
        source.ensure_start()
        with closing(source.log_ends(SECONDS)) as ends:
            before = next(ends)
            for number in range(100):
                bench.execute(bench.insert("orders", number))
                if next(ends) != before:
                    break
            else:
                pytest.fail("the end of the log does not move")

    def test_a_look_finds_a_captured_table_that_is_gone(self, bench: Bench) -> None:
        """`maintain` finds nothing if all tables are captured, and names one that was renamed."""
        start = bench.source().ensure_start()
        assert bench.source().maintain(start) == []
        _only_if(bench.maintained and not bench.appends_only, "`maintain` does not look at tables")
        bench.execute("ALTER TABLE items RENAME TO others")

        for findings in (bench.source().maintain(start), bench.source().maintain(None)):
            assert [(finding.subject, finding.level) for finding in findings] == [
                ("tables", "error")
            ]
            assert "no such table is there" in findings[0].text
            assert "items" in findings[0].text

    def test_a_look_at_lost_log(self, bench: Bench) -> None:
        """`maintain` reports, like reading, that the log after the captured position is gone."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        bench.forget()
        _only_if(bench.maintained, "`maintain` does not look at the log")

        if bench.lost_log_is_finding:
            assert [finding.subject for finding in bench.source().maintain(start)] == ["changes"]
        else:
            with pytest.raises(PositionLost, match="Re-snapshot required"):
                bench.source().maintain(start)

    def test_a_pipeline_may_start_over(self, bench: Bench) -> None:
        """`reset` has nothing to drop if the source can be read."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        assert bench.source().reset(dry_run=False) == []
        assert take(bench, start, whole(1)).changes == inserts("orders", 1)

    def test_a_busy_table_of_others_is_not_worth_a_run(self, bench: Bench) -> None:
        """Changes of an uncaptured table do not make `has_changes` true."""
        start = bench.source().ensure_start()
        for id_ in range(50):
            bench.execute(bench.insert("other", id_))

        assert is_quiet(bench, start)

    def test_lost_log_stops_the_pipeline(self, bench: Bench) -> None:
        """Reading raises `PositionLost` if the server no longer has the log after the position."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))
        bench.forget()

        with pytest.raises(PositionLost, match="Re-snapshot required"):
            take(bench, start, lambda _: True)

    def test_columns_of_a_batch_are_those_of_the_frame(self, bench: Bench) -> None:
        """Every batch has the columns and types of the change frame."""
        start = bench.source().ensure_start()
        bench.execute(bench.insert("orders", 1))

        rows = next(
            batch.rows for batch in take(bench, start, whole(1)).batches if batch.rows is not None
        )

        assert isinstance(rows, pa.RecordBatch)
        assert rows.schema.equals(CAPTURED)
