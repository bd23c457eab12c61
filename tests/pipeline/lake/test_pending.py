"""Pending changes beside a table: what a reader of the view sees, before, while and after they are folded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pydantic import SecretStr

from deltaforge_dagster.errors import LeaseLost, TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.lake import writer as module
from deltaforge_dagster.pipeline.lake.target import LakeTarget
from deltaforge_dagster.pipeline.lake.writer import LakeWriter
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.sinks.lake.pending import DUCKDB, PendingRows, pending_name
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sources.value_types import INT32, TEXT
from deltaforge_dagster.state.store import StateStore
from tests.fix_spark import SparkAddress
from tests.pipeline.encode.test_encoder import segment
from tests.pipeline.lake.lake_tables import Lake, Staging, dialect_of
from tests.pipeline.lake.test_readers import DUCKDB_DELTA
from tests.pipeline.tables.changes import stager_here
from tests.pipeline.tables.changes import table as table_version
from tests.pipeline.tables.test_fold import COLUMNS, Source, play
from tests.state.make import held, position

pytestmark = pytest.mark.spark

ORDERS = ("public", "orders")
KEYS = 40
FEW = ("spark.sql.shuffle.partitions", "1")
"""A setting with which small statements take less time."""


class Killed(BaseException):
    """What stands for a kill."""


@pytest.fixture(params=[pytest.param("delta", marks=pytest.mark.soak("formats")), "iceberg"])
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, spark_server: SparkAddress
) -> Iterator[Lake]:
    """An empty folder for tables; what is the same in both formats is tried with Iceberg, the faster one."""
    made = Lake(request.param, tmp_path, spark_server.remote)
    yield made
    made.close()


def unguarded() -> None:
    """A guard that lets everything pass."""


def writing(lake: Lake, **options: Any) -> LakeWriter:
    """A writer whose small statements take less time."""
    return lake.writer(spark={FEW[0]: SecretStr(FEW[1])}, **options)


@dataclass
class Reader:
    """Reads a table with its pending changes."""

    lake: Lake
    key: Sequence[str] = ("id",)
    columns: Sequence[str] = ("id", *COLUMNS)

    def __post_init__(self) -> None:
        self.session = self.lake.reading()
        self.session.conf.set(*FEW)
        self.dialect = dialect_of(self.lake.config())

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """What the view has."""
        beside = self.dialect.table(pending_name(ORDERS))
        view = PendingRows(beside, self.columns, self.key).view(
            self.dialect.table(ORDERS), self.columns
        )
        return self._rows(f"({view})")

    @property
    def rows_in_duckdb(self) -> list[tuple[Any, ...]]:
        """What the view has in DuckDB, which reads Delta tables only."""
        folder = self.lake.folder / "lake" / "public"
        table, beside = (f"delta_scan('{folder / name}')" for name in ("orders", "orders_pending"))
        view = PendingRows(beside, self.columns, self.key, DUCKDB).view(table, self.columns)
        with duckdb.connect(config={"allow_unsigned_extensions": True}) as database:
            database.execute(f"LOAD '{DUCKDB_DELTA}'")
            query = f"SELECT {', '.join(self.columns)} FROM ({view}) ORDER BY id"
            return database.execute(query).fetchall()

    @property
    def table(self) -> list[tuple[Any, ...]]:
        """What the table has."""
        return self._rows(self.dialect.table(ORDERS))

    @property
    def waiting(self) -> int:
        """Number of pending rows."""
        return self.session.sql(f"SELECT 1 FROM {self.dialect.table(pending_name(ORDERS))}").count()

    def _rows(self, what: str) -> list[tuple[Any, ...]]:
        found = self.session.sql(f"SELECT {', '.join(self.columns)} FROM {what} ORDER BY id")
        return [tuple(row) for row in found.collect()]


@dataclass
class Stream:
    """Random changes of a table, commit by commit.

    Attributes:
        source: The table.
        journal: Has the changes.
        stager: Stages them.
        random: Where chance comes from.
        segments: Number of segments so far.
    """

    source: Source
    journal: Journal
    stager: TableStager
    random: random.Random
    segments: int = 0

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The rows that the table has."""
        return [(key, *self.source.rows[key].values()) for key in sorted(self.source.rows)]

    def commit(self, operations: int, *, rows_only: bool = True) -> StagedTable:
        """Return the changes of some random operations."""
        self.source.changes.clear()
        if not rows_only:
            self.source.truncate()
        play(self.source, [self._operation(rows_only=rows_only) for _ in range(operations)])
        self.segments += 1
        commit = self.stager.stage([segment(self.journal, self.segments, self.source.changes)])
        (staged,) = commit.tables
        assert not rows_only or {step.kind for step in staged.steps} == {"rows"}
        return staged

    def _operation(self, *, rows_only: bool) -> tuple[Any, ...]:
        pick = self.random
        key, other = pick.randrange(KEYS), pick.randrange(KEYS)
        values = {name: pick.choice([None, *range(9)]) for name in COLUMNS}
        absent = frozenset(name for name in COLUMNS if pick.random() < 0.4)
        match pick.choice(["insert", "insert", "update", "update", "update", "rekey", "delete"]):
            case "insert":
                return "insert", key, values, pick.random() < 0.2
            case "update":
                return "update", key, values, absent
            case "rekey":
                return "rekey", key, other, values, frozenset() if rows_only else absent
            case name:
                return name, key


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """Changes that are random, but the same in each run of the tests."""
    store = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    with store.fenced(held(store)) as writer:
        stamp = writer.schemas.register("acme", table_version("id", *COLUMNS), position(1))
    journal = Journal((tmp_path / "journal").as_uri())
    source = Source(stamp.fingerprint, {}, [], [])
    stager = stager_here(tmp_path, journal, store, "mode: current")
    yield Stream(source, journal, stager, random.Random(7))
    store.close()


def test_the_view_equals_the_source_after_each_commit(
    lake: Lake, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random commits, added or applied to the table; folds that die between their steps and are repeated."""
    writer, reader = writing(lake), Reader(lake)

    def die(at: str, work: Callable[[], object]) -> None:
        def kill(name: str) -> None:
            if name == at:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(module, "failpoint", kill)
            with pytest.raises(Killed):
                work()
        assert reader.rows == stream.rows

    for number in range(2):
        staged = stream.commit(60)
        writer.append(staged, stream.segments, unguarded, exists=number > 0)
        assert reader.rows == stream.rows
    if lake.format == "delta":
        assert reader.rows_in_duckdb == stream.rows
    die("lake-fold-merged", lambda: writer.fold(staged, stream.segments, unguarded, "after"))
    writer = writing(lake)
    writer.fold(staged, stream.segments, unguarded, "after")
    assert (reader.table, reader.waiting) == (stream.rows, 0)

    writer.append(stream.commit(60), stream.segments, unguarded)
    before = stream.rows
    more = stream.commit(200, rows_only=False)
    assert {step.kind for step in more.steps} == {"rows", "rekey", "truncate"}
    stream.source.rows, after = dict_of(before), stream.source.rows
    die("lake-fold-deleted", lambda: writer.commit(more, stream.segments, unguarded))
    stream.source.rows = after
    writing(lake).commit(more, stream.segments, unguarded)
    assert (reader.table, reader.waiting) == (stream.rows, 0)
    assert reader.rows == stream.rows


def dict_of(rows: Sequence[tuple[Any, ...]]) -> dict[int, dict[str, int | None]]:
    """Return rows as a source has them."""
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows}


@pytest.mark.soak("kills")
def test_a_successor_repeats_a_fold_wherever_the_first_one_is(lake: Lake) -> None:
    """Before each statement of the first one, another writer folds as well, and then deletes the row."""
    staging, reader = Staging(lake, "current", {"id": INT32, "a": TEXT}), None
    interrupted = 0
    for number in range(100):
        staging.destination = ("public", f"t{number}")
        there = dialect_of(lake.config()).table(staging.destination)
        writer, successor = writing(lake), writing(lake)
        added = staging.table(staging.step({"id": 1, "a": "x"}, segment=1))
        gone = staging.table(staging.step({"id": 1, "df_op": "d"}, segment=2))
        writer.append(added, 1, unguarded)
        calls = 0

        def guard() -> None:
            nonlocal calls
            calls += 1
            if calls == number + 1:  # noqa: B023 - called in this round
                successor.append(added, 1, unguarded, exists=True)  # noqa: B023
                successor.fold(added, 1, unguarded, "after")  # noqa: B023
                successor.append(gone, 2, unguarded, exists=True)  # noqa: B023
                successor.fold(gone, 2, unguarded, "after")  # noqa: B023

        writer.fold(added, 1, guard, "after")
        reader = reader or lake.reading()
        left = reader.sql(f"SELECT id FROM {there}").collect()
        if calls <= number:
            assert [row.id for row in left] == [1]
            break
        interrupted += 1
        assert not left, f"before statement {number}"
    assert interrupted >= 2


@pytest.mark.soak("formats")
def test_columns_and_keys_that_change(lake: Lake) -> None:
    """Pending changes are folded before the table of them gets another column or key; a dropped column stays as it is."""
    staging, writer = Staging(lake, "current", {"id": INT32, "a": TEXT, "b": TEXT}), writing(lake)
    reader = Reader(lake, columns=("id", "a", "b"))
    first = staging.step({"id": 1, "a": "a1", "b": "b1"}, {"id": 2, "a": "a2", "b": "b2"})
    writer.append(staging.table(first), 0, unguarded)
    staging.types = {"id": INT32, "a": TEXT}
    writer.append(staging.table(staging.step({"id": 1, "a": "a3"}, segment=1)), 1, unguarded)
    assert reader.rows == [(1, "a3", "b1"), (2, "a2", "b2")]
    assert reader.waiting == 3

    staging.types = {"id": INT32, "a": TEXT, "C": TEXT}
    step = staging.step(
        {"id": 2, "C": "c2", "df_absent": ["a"]}, {"id": 3, "a": "a3", "C": "c3"}, segment=2
    )
    writer.append(staging.table(step, absent=["a"]), 2, unguarded)
    assert reader.waiting == 2
    reader.columns = ("id", "a", "b", "C")
    assert reader.rows == [(1, "a3", "b1", None), (2, "a2", "b2", "c2"), (3, "a3", None, "c3")]

    staging.key = ("a", "id")
    step = staging.step({"id": 2, "a": "other", "C": "c4"}, segment=3)
    writer.append(staging.table(step), 3, unguarded)
    reader.key = ("a", "id")
    assert reader.waiting == 1
    expected = [(1, "a3", "b1", None), (2, "a2", "b2", "c2"), (2, "other", None, "c4"), (3, "a3", None, "c3")]  # fmt: skip
    assert sorted(reader.rows, key=str) == expected
    writer.fold(staging.table(), 3, unguarded, "later")
    assert (sorted(reader.table, key=str), reader.waiting) == (expected, 0)


def test_a_column_that_is_renamed(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending changes are folded before, also if the writer dies when only the table of them has the new name."""
    staging = Staging(lake, "current", {"id": INT32, "a": TEXT, "b": TEXT})
    identities = {"id": "id@1", "a": "a@1", "b": "b@1"}
    rows = [{"id": 1, "a": "a1", "b": "b1"}, {"id": 2, "a": "a2", "b": "b2"}]
    first = replace(staging.table(staging.step(*rows)), identities=identities)
    writing(lake).append(first, 0, unguarded)
    staging.types = {"id": INT32, "c": TEXT, "b": TEXT}
    step = staging.step({"id": 1, "c": "c1", "df_absent": ["b"]}, {"id": 3, "c": "c3"}, segment=1)
    identities = {"id": "id@1", "c": "a@1", "b": "b@1"}
    second = replace(staging.table(step, absent=["b"]), identities=identities)
    reader = Reader(lake, columns=("id", "a", "b"))

    rename = LakeTarget.rename

    def dies(target: LakeTarget, *arguments: Any) -> None:
        if target.identities:
            raise Killed
        rename(target, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LakeTarget, "rename", dies)
        with pytest.raises(Killed):
            writing(lake).append(second, 1, unguarded)
    assert reader.table == [(1, "a1", "b1"), (2, "a2", "b2")]
    reader.columns = ("id", "c", "b")
    for _ in range(2):
        writing(lake).append(second, 1, unguarded)
        expected = [(1, "c1", "b1"), (2, "a2", "b2"), (3, "c3", None)]
        assert (reader.waiting, reader.rows) == (2, expected)
    writing(lake).fold(second, 1, unguarded, "later")
    assert (reader.table, reader.waiting) == (expected, 0)


@pytest.mark.soak("formats")
def test_tables_that_are_gone_or_somebody_else_s(lake: Lake) -> None:
    """Pending changes that are gone hold the table; those of a table that was dropped are forgotten."""
    staging, writer = Staging(lake, "current", {"id": INT32, "a": TEXT}), writing(lake)
    session = writer.sessions.session()
    first = staging.table(staging.step({"id": 1, "a": "x"}, segment=1))
    second = staging.table(staging.step({"id": 2, "a": "y"}, segment=2))
    writer.append(first, 1, unguarded)
    reader = Reader(lake, columns=("id", "a"))
    if lake.format == "iceberg":
        session.sql(f"DROP TABLE {reader.dialect.table(pending_name(ORDERS))}")
        with pytest.raises(
            TableRejected, match=r"orders_pending.* is gone.* deltaforge resync shop"
        ):
            writing(lake).append(second, 2, unguarded, exists=True, required=True)
        with pytest.raises(TableRejected, match=r"orders_pending.* is gone"):
            writing(lake).fold(second, 2, unguarded, "later", required=True)
        writing(lake).append(first, 1, unguarded, exists=True)
        session.sql(f"DROP TABLE {reader.dialect.table(ORDERS)}")
        writing(lake).append(second, 2, unguarded)
        assert reader.rows == [(2, "y")]

    reset = writing(lake, uid="uid-2")
    reset.append(staging.table(staging.step({"id": 2, "a": "z"}, segment=1)), 1, unguarded)
    assert (2, "z") in reader.rows
    reset.fold(second, 1, unguarded, "after")
    assert (2, "z") in reader.table

    staging.destination = (*ORDERS[:-1], ORDERS[-1] + "_pending")
    staging.source = ("shop", "public", "orders_pending")
    other = staging.table(staging.step({"id": 1}))
    with pytest.raises(TableRejected, match=r"rows of shop\.public\.orders,"):
        writing(lake, uid="uid-2").commit(other, 9, unguarded)


@pytest.mark.soak("formats")
def test_a_table_recreated_has_no_pending_changes(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever dies on the way; what follows is pending with today's types, and is folded although its numbers are smaller."""
    staging, writer = Staging(lake, "current", {"id": INT32, "a": TEXT}), writing(lake)
    first = staging.table(staging.step({"id": 1, "a": "x"}, segment=8))
    writer.append(first, 8, unguarded)
    writer.fold(first, 8, unguarded, "later")
    writer.append(staging.table(staging.step({"id": 2, "a": "y"}, segment=9)), 9, unguarded)
    reader = Reader(lake, columns=("id", "a"))
    staging.types = {"id": INT32, "a": INT32}

    def kill(name: str) -> None:
        raise Killed(name)

    with monkeypatch.context() as patched:
        patched.setattr(module, "failpoint", kill)
        with pytest.raises(Killed, match="lake-pending-recreated"):
            writer.recreate(staging.table(), unguarded)
    assert (reader.table, reader.waiting) == ([(1, "x")], 0)
    writing(lake).recreate(staging.table(), unguarded)
    assert (reader.rows, reader.table, reader.waiting) == ([], [], 0)

    following = staging.table(staging.step({"id": 2, "a": 5}, segment=3))
    writing(lake).append(following, 3, unguarded, exists=True)
    assert (reader.rows, reader.table) == ([(2, 5)], [])
    writing(lake).fold(following, 3, unguarded, "after", required=True)
    assert (reader.table, reader.waiting) == ([(2, 5)], 0)


@pytest.mark.soak("formats")
def test_rows_of_a_snapshot_behind_pending_changes(lake: Lake) -> None:
    """Those that are added find the keys that were pending, and those that go beside the table are as later changes."""
    staging, writer = Staging(lake, "current", {"id": INT32, "a": TEXT}), writing(lake)
    writer.append(staging.table(staging.step({"id": 1, "a": "live"}, segment=1)), 1, unguarded)
    read = [{"id": 1, "a": "read"}, {"id": 2, "a": "read"}]
    chunk = staging.table(staging.step(*read, segment=2, reads=True))
    writer.commit(chunk, 2, unguarded)
    reader = Reader(lake, columns=("id", "a"))
    assert (reader.table, reader.waiting) == ([(1, "read"), (2, "read")], 0)
    more = [
        staging.step({"id": 3, "a": "read"}, segment=3, reads=True),
        staging.step({"id": 2, "a": "live"}, segment=3),
    ]
    for _ in range(2):
        writing(lake).append(staging.table(*more), 3, unguarded)
    assert reader.waiting == 2
    assert reader.rows == [(1, "read"), (2, "live"), (3, "read")]


def test_a_commit_is_added_once(lake: Lake) -> None:
    """Whoever repeats it, and although it was folded meanwhile and its row deleted again."""
    staging, writer = Staging(lake, "current", {"id": INT32, "a": TEXT}), writing(lake)
    first = staging.table(staging.step({"id": 1, "a": "x"}, segment=1))
    gone = staging.table(staging.step({"id": 1, "df_op": "d"}, segment=2))
    reader = Reader(lake, columns=("id", "a"))

    def lost() -> None:
        raise LeaseLost("somebody else has it")

    writer.append(first, 1, unguarded)
    writing(lake).append(first, 1, unguarded, exists=True)
    assert reader.waiting == 1
    with pytest.raises(LeaseLost):
        writing(lake).append(gone, 2, lost, exists=True)
    writer.append(gone, 2, unguarded)
    assert (reader.waiting, reader.rows) == (2, [])
    writer.fold(gone, 2, unguarded, "later")
    writing(lake).append(first, 1, unguarded, exists=True)
    assert (reader.waiting, reader.rows) == (0, [])


def test_commits_again_after_pending_changes(lake: Lake) -> None:
    """After a reset: a fold that finds nothing to fold yet does not hide what is pending of later segments."""
    staging, writer = Staging(lake, "current", {"id": INT32, "a": TEXT}), writing(lake)
    added = staging.table(staging.step({"id": 1, "a": "x"}, segment=1))
    gone = staging.table(staging.step({"id": 1, "df_op": "d"}, segment=2))
    later = staging.table(staging.step({"id": 2, "a": "y"}, segment=3))
    writer.append(added, 1, unguarded)
    writer.append(gone, 2, unguarded, exists=True)
    writer.fold(gone, 2, unguarded, "after")
    writer.append(later, 3, unguarded, exists=True)
    reader = Reader(lake, columns=("id", "a"))
    assert (reader.table, reader.waiting) == ([], 1)

    writer = writing(lake)
    writer.commit(added, 1, unguarded)
    assert reader.waiting == 1
    writer.fold(added, 3, unguarded, "after")
    assert (reader.table, reader.waiting) == ([(1, "x"), (2, "y")], 0)
    rest = staging.table(
        staging.step({"id": 1, "df_op": "d"}, segment=2),
        staging.step({"id": 2, "a": "y"}, segment=3),
    )
    writer.commit(rest, 3, unguarded)
    assert (reader.table, reader.rows) == ([(2, "y")], [(2, "y")])
