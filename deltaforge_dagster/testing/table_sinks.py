"""Contract tests of sinks that keep tables: what every writer of tables promises a delivery.

They are test classes to subclass::

    class TestDuckdbTables(TableSinkContract):
        @pytest.fixture
        def subject(self, tmp_path: Path) -> TableSubject:
            return TableSubject(
                make=lambda owner: DuckdbWriter(str(tmp_path / "copy.duckdb"), owner), ...
            )

The tables have the rows as they are in the source (`mode: current`), which every kind has. A
contract gives a writer what Spark's tasks would have staged (`sinks.tables.staged`), and reads the
table back as its users do.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltaforge_dagster.errors import LeaseLost, TableRejected
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.tables.staged import (
    META,
    OLD_KEY,
    ChangePlace,
    StagedSegment,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import TableOwner, TableWriter
from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.value_types import INT32, INT64, TEXT, ValueType
from deltaforge_dagster.testing.sinks import allow, refuse_from
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema

OWNER = TableOwner("uid-1", "shop", "copy", "server-1")
"""Who writes, unless a test says otherwise."""

COLUMNS: Mapping[str, ValueType] = {"id": INT64, "name": TEXT, "note": TEXT}
"""The columns of the table, unless a test says otherwise; `id` is its key."""

_EPOCH = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
_SEGMENT_BYTES = 0x100
"""How many bytes of the source's log a segment has here."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableSubject:
    """A sink that keeps tables, and how a user reads one of them.

    Attributes:
        make: Makes a writer for an owner, as another process would, each time.
        rows: Returns the rows of the table `destination`, in any order, with the columns that the
            source has or had; nothing if there is no such table.
        folder: An empty folder for staged files.
        destination: Name of the table at the sink, as the sink's `name_of` would return it.
        atomic: Whether readers see each commit of a table as a whole, however many steps it has.
    """

    make: Callable[[TableOwner], TableWriter]
    rows: Callable[[], Sequence[Row]]
    folder: Path
    destination: tuple[str, ...] = ("public", "orders")
    atomic: bool = True

    @contextmanager
    def writer(self, owner: TableOwner = OWNER) -> Iterator[TableWriter]:
        """Provide a new writer, which is closed at the end."""
        writer = self.make(owner)
        try:
            yield writer
        finally:
            writer.close()

    def commit(
        self,
        changes: StagedTable,
        *,
        owner: TableOwner = OWNER,
        guard: SendGuard = allow,
        exists: bool = False,
    ) -> Sequence[tuple[str, str]]:
        """Commit changes with a writer of their own; return the table's columns."""
        with self.writer(owner) as writer:
            written = writer.commit(changes, max(changes.segments), guard, exists=exists)
        return written.columns

    def table(self, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of the table's rows, in the order of the rows' ids."""
        rows = sorted(self.rows(), key=lambda row: row["id"])
        return [tuple(row[name] for name in columns) for row in rows]


@dataclass
class Staged:
    """Makes the staged changes of a table.

    Attributes:
        subject: The sink.
        columns: The columns of the source's table, with their types.
        segment: The segment in which the changes are; each commit has one.
        key: Names of the key columns.
        source: Name of the source's table.
    """

    subject: TableSubject
    columns: Mapping[str, ValueType] = field(default_factory=lambda: COLUMNS)
    segment: int = 0
    key: tuple[str, ...] = ("id",)
    source: tuple[str, str | None, str] = ("shop", "public", "orders")
    _ordinal: Iterator[int] = field(default_factory=itertools.count)

    def changes(self, *steps: StagedStep, **identities: str) -> StagedTable:
        """Return steps as the changes of a commit; identities of columns are given by name."""
        start, end = (
            f'{{"lsn": "0/{(self.segment + at) * _SEGMENT_BYTES + 1:X}"}}' for at in (0, 1)
        )
        return StagedTable(
            self.subject.destination,
            self.source,
            self._schema,
            self.key,
            frozenset(self.columns) - {*self.key},
            steps,
            sum(step.rows for step in steps),
            {self.segment: StagedSegment(start, end, _EPOCH.timestamp() + self.segment)},
            identities or {name: f"{name}@1" for name in self.columns},
        )

    # The changes of a step follow those of the steps that were made before it, as in a journal.

    def upsert(self, *rows: Row) -> StagedStep:
        """Return a step that inserts or updates rows; columns that a row lacks keep their values.

        That is the form of an update of whose row the source's log has only a part.
        """
        return self._rows([{"df_op": "u", "df_absent": self._absent(row), **row} for row in rows])

    def delete(self, *ids: Any) -> StagedStep:
        """Return a step that deletes rows."""
        return self._rows([{"df_op": "d", "id": id_} for id_ in ids])

    def rekey(self, *rows: Row) -> StagedStep:
        """Return a step that gives rows another key, and perhaps other values.

        Args:
            rows: The rows, with the former key as `df_old_id`.
        """
        staged = [{"df_op": "u", "df_absent": self._absent(row), **row} for row in rows]
        return self._rows(staged, rekey=True)

    def truncate(self) -> StagedStep:
        """Return a step that truncates the table."""
        place = ChangePlace(self.segment, next(self._ordinal))
        return StagedStep("truncate", [], 0, False, place, self._time_us(place.ordinal))

    def _absent(self, row: Row) -> list[str] | None:
        return [name for name in self.columns if name not in row] or None

    @property
    def _schema(self) -> TypedSchema:
        columns = (TypedColumn(name, type_, "any") for name, type_ in self.columns.items())
        return TypedSchema(tuple(columns))

    def _time_us(self, ordinal: int) -> int:
        return int((_EPOCH.timestamp() + self.segment) * 1e6) + ordinal

    def _rows(self, rows: Sequence[dict[str, Any]], *, rekey: bool = False) -> StagedStep:
        columns = self._schema.arrow
        fields = [*columns, *META]
        if rekey:
            fields += [columns.field(name).with_name(OLD_KEY + name) for name in self.key]
        for row in rows:
            ordinal = next(self._ordinal)
            row |= {
                "df_segment": self.segment,
                "df_ordinal": ordinal,
                "df_event_time": self._time_us(ordinal),
                "df_event_id": f"{self.segment}-{ordinal}",
            }
        arrays = [_array([row.get(field.name) for row in rows], field.type) for field in fields]
        path = self.subject.folder / f"{self.segment}-{rows[0]['df_ordinal']}.parquet"
        pq.write_table(pa.table(arrays, schema=pa.schema(fields)), path)
        last = ChangePlace(self.segment, rows[-1]["df_ordinal"])
        return StagedStep("rekey" if rekey else "rows", [str(path)], len(rows), False, last)


def _array(values: Sequence[Any], type_: pa.DataType) -> pa.Array[Any]:
    """Return values in Arrow, which makes none of an extension type (UUIDs) by itself."""
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))
    return pa.array(values, type_)


def _numbered(*names: str | None) -> list[Row]:
    """Return rows with ids from 1, and these names."""
    return [{"id": id_, "name": name, "note": f"n{id_}"} for id_, name in enumerate(names, 1)]


class TableSinkContract:
    """The promises of every sink that keeps tables; needs a fixture `subject`."""

    def test_rows_are_those_of_the_source(self, subject: TableSubject) -> None:
        """After inserts, updates, deletes, changed keys and a truncate, in the order of steps."""
        first, second = Staged(subject), Staged(subject, segment=1)
        subject.commit(first.changes(first.upsert(*_numbered("a", "b", "c", None))))
        inserted = subject.table("id", "name", "note")
        subject.commit(
            second.changes(
                second.upsert({"id": 2, "name": "B", "note": None}),
                second.delete(3, 99),
                second.rekey({"id": 7, "df_old_id": 1, "name": "a", "note": "moved"}),
            )
        )
        changed = subject.table("id", "name", "note")
        third = Staged(subject, segment=2)
        steps = third.truncate(), third.upsert({"id": 2, "name": "new", "note": ""})
        subject.commit(third.changes(*steps))

        assert inserted == [(1, "a", "n1"), (2, "b", "n2"), (3, "c", "n3"), (4, None, "n4")]
        assert changed == [(2, "B", None), (4, None, "n4"), (7, "a", "moved")]
        assert subject.table("id", "name", "note") == [(2, "new", "")]

    def test_a_commit_is_applied_once(self, subject: TableSubject) -> None:
        """Whoever repeats a commit, even an earlier one, changes nothing."""
        first, second = Staged(subject), Staged(subject, segment=1)
        commits = [
            first.changes(first.upsert(*_numbered("a", "b"))),
            second.changes(second.delete(1), second.upsert({"id": 3, "name": "c", "note": "x"})),
        ]
        with subject.writer() as writer:
            for changes in [*commits, commits[1]]:
                written = writer.commit(changes, max(changes.segments), allow)
        # As after a crash, and after the checkpoint was set back.
        again = [subject.commit(commits[1], exists=True), subject.commit(commits[0])]

        assert subject.table("id", "name") == [(2, "b"), (3, "c")]
        assert again == [written.columns] * 2

    def test_guard_refuses_at_once(self, subject: TableSubject) -> None:
        """If the guard raises at first, nothing changes, and the same writer can go on."""
        staged = Staged(subject)
        changes = staged.changes(staged.upsert(*_numbered("a")))
        with subject.writer() as writer:
            with pytest.raises(LeaseLost):
                writer.commit(changes, 0, refuse_from(1, LeaseLost("gone"))[0])
            refused = list(subject.rows())
            writer.commit(changes, 0, allow)

        assert refused == []
        assert subject.table("id", "name") == [(1, "a")]

    def test_guard_refuses_on_the_way(self, subject: TableSubject) -> None:
        """Wherever a commit ends, its repetition completes it; an atomic table has it or not."""
        first, second = Staged(subject), Staged(subject, segment=1)
        before, after = [(1, "a"), (2, "b")], [(2, "B"), (3, "c")]
        subject.commit(first.changes(first.upsert(*_numbered("a", "b"))))
        changes = second.changes(
            second.delete(1), second.upsert({"id": 2, "name": "B"}, {"id": 3, "name": "c"})
        )
        for call in itertools.count(2):
            guard, _ = refuse_from(call, LeaseLost("gone"))
            try:
                subject.commit(changes, guard=guard, exists=True)
            except LeaseLost:
                table = subject.table("id", "name")
                assert table in (before, after) or not subject.atomic
            else:
                break
        subject.commit(changes, exists=True)

        assert subject.table("id", "name") == after

    def test_values_that_a_change_lacks(self, subject: TableSubject) -> None:
        """The row keeps them, also if its key changes."""
        first, second = Staged(subject), Staged(subject, segment=1)
        subject.commit(first.changes(first.upsert(*_numbered("a", "b", "c"))))
        subject.commit(
            second.changes(
                second.upsert({"id": 1, "name": "A"}, {"id": 2, "note": None}),
                second.rekey({"id": 9, "df_old_id": 3, "note": "moved"}),
            ),
            exists=True,
        )

        rows = [(1, "A", "n1"), (2, "b", None), (9, "c", "moved")]
        assert subject.table("id", "name", "note") == rows

    def test_added_columns(self, subject: TableSubject) -> None:
        """Rows from before have what the source gave them in a new column, or null."""
        first = Staged(subject, {"id": INT64})
        second = Staged(subject, {"id": INT64, "n": INT32, "t": TEXT, "o": TEXT}, segment=1)
        subject.commit(first.changes(first.upsert({"id": 1}, {"id": 2})))
        rows = [(2, 1, None, "x"), (3, None, "y", "z")]
        step = second.upsert(*(dict(zip(second.columns, row, strict=True)) for row in rows))
        changes = second.changes(step)
        columns = subject.commit(replace(changes, fills={"n": "7", "t": "it's"}), exists=True)

        assert subject.table("id", "n", "t", "o") == [(1, 7, "it's", None), *rows]
        assert [name for name, _ in columns if name in second.columns] == [*second.columns]

    def test_renamed_columns(self, subject: TableSubject) -> None:
        """Columns keep their values under other names, even with each other's."""
        first = Staged(subject, {"id": INT64, "a": TEXT, "b": TEXT, "c": TEXT})
        step = first.upsert({"id": 1, "a": "1a", "b": "1b", "c": "1c"})
        subject.commit(first.changes(step))
        second = Staged(subject, {"id": INT64, "b": TEXT, "a": TEXT, "d": TEXT}, segment=1)
        step = second.upsert({"id": 2, "b": "2a", "a": "2b", "d": "2c"})
        changes = second.changes(step, id="id@1", b="a@1", a="b@1", d="c@1")
        subject.commit(changes, exists=True)
        subject.commit(changes, exists=True)

        rows = [(1, "1a", "1b", "1c"), (2, "2a", "2b", "2c")]
        assert subject.table("id", "b", "a", "d") == rows

    def test_a_column_whose_name_another_gets(self, subject: TableSubject) -> None:
        """A dropped column keeps its values; they are not taken for those of the new column."""
        first = Staged(subject, {"id": INT64, "a": TEXT})
        second = Staged(subject, {"id": INT64, "a": TEXT}, segment=1)
        subject.commit(first.changes(first.upsert({"id": 1, "a": "old"})))
        step = second.upsert({"id": 2, "a": "new"})
        subject.commit(second.changes(step, id="id@1", a="a@2"), exists=True)

        assert subject.table("id", "a", "a_dropped_1") == [(1, None, "old"), (2, "new", None)]

    def test_a_column_that_gets_a_wider_type(self, subject: TableSubject) -> None:
        """The table has each value as it is, or is held as it was."""
        first = Staged(subject, {"id": INT64, "n": INT32})
        second = Staged(subject, {"id": INT64, "n": INT64}, segment=1)
        subject.commit(first.changes(first.upsert({"id": 1, "n": 7})))
        rows = [(1, 7), (2, 2**40)]
        try:
            subject.commit(second.changes(second.upsert({"id": 2, "n": 2**40})), exists=True)
        except TableRejected:
            rows = [(1, 7)]

        assert subject.table("id", "n") == rows

    def test_values_are_exact(self, subject: TableSubject) -> None:
        """Values of each common type come back as they were, also extreme ones."""
        values: Mapping[str, tuple[ValueType, Sequence[Any]]] = {
            "i": (INT64, [-(2**63), 2**63 - 1]),
            "f": (types.FLOAT64, [5e-324, -1.7976931348623157e308]),
            "d": (types.decimal(38, 10), [Decimal("-1." + "0" * 9 + "1"), Decimal("9" * 28)]),
            "s": (TEXT, [" ä🜁\n\t\\'\"", ""]),
            "y": (types.BOOLEAN, [True, False]),
            "raw": (types.BINARY, [b"\x00\xff", b""]),
            "at": (types.TIMESTAMPTZ, [_EPOCH + dt.timedelta(microseconds=1), _EPOCH]),
            "day": (types.DATE, [dt.date(1969, 12, 31), dt.date(2024, 2, 29)]),
        }
        staged = Staged(
            subject, {"id": INT64} | {name: type_ for name, (type_, _) in values.items()}
        )
        rows: list[Row] = [
            {"id": number, **{name: pair[number] for name, (_, pair) in values.items()}}
            for number in range(2)
        ]
        rows.append({"id": 2, **dict.fromkeys(values)})
        subject.commit(staged.changes(staged.upsert(*rows)))

        names = ["id", *values]
        assert subject.table(*names) == [tuple(row[name] for name in names) for row in rows]

    def test_a_table_that_is_gone(self, subject: TableSubject) -> None:
        """It is not made again, because its earlier rows would be missing without notice."""
        staged = Staged(subject)
        with pytest.raises(TableRejected, match="is gone"):
            subject.commit(staged.changes(staged.upsert(*_numbered("a"))), exists=True)

        assert list(subject.rows()) == []

    @pytest.mark.parametrize("other", ["pipeline", "source"])
    def test_a_table_of_somebody_else(self, subject: TableSubject, other: str) -> None:
        """A table with the rows of another sink, or of another table, is left as it is."""
        staged = Staged(subject)
        subject.commit(staged.changes(staged.upsert(*_numbered("a"))))
        owner = OWNER if other == "source" else replace(OWNER, uid="uid-2", pipeline="other")
        source = ("shop", "public", "people") if other == "source" else staged.source
        stranger = Staged(subject, segment=1, source=source)
        changes = stranger.changes(stranger.truncate(), stranger.upsert({"id": 9, "name": "z"}))
        for _ in range(2):
            with pytest.raises(TableRejected):
                subject.commit(changes, owner=owner)
            with subject.writer(owner) as writer, pytest.raises(TableRejected):
                writer.recreate(changes, allow)

        assert subject.table("id", "name") == [(1, "a")]

    @pytest.mark.parametrize("name", ["df_op", "NAME"])
    def test_names_that_columns_cannot_have(self, subject: TableSubject, name: str) -> None:
        """Names of DeltaForge's own columns, and two that differ in case only, hold the table."""
        staged = Staged(subject, {"id": INT64, "name": TEXT, name: TEXT})
        with pytest.raises(TableRejected, match="cannot have the column"):
            subject.commit(staged.changes())

        assert list(subject.rows()) == []

    def test_loaded_again(self, subject: TableSubject) -> None:
        """A recreated table has today's columns and no rows, and takes the commits that follow."""
        first = Staged(subject)
        subject.commit(first.changes(first.upsert(*_numbered("a", "b"))))
        today = Staged(subject, {"id": INT64, "name": INT32}, segment=1)
        with subject.writer() as writer:
            columns = writer.recreate(today.changes(), allow)
            empty = list(subject.rows())
            writer.commit(today.changes(today.upsert({"id": 2, "name": 5})), 1, allow)

        assert [name for name, _ in columns if name in COLUMNS] == ["id", "name"]
        assert (empty, subject.table("id", "name")) == ([], [(2, 5)])

    def test_a_journal_that_begins_anew(self, subject: TableSubject) -> None:
        """Its first commit is not taken for one that the table has, though its number is smaller.

        The source's log goes on: positions are behind those of the former journal.
        """
        first = Staged(subject, segment=5)
        subject.commit(first.changes(first.upsert(*_numbered("a", "b"))))
        anew = Staged(subject, segment=6)
        changes = anew.changes(anew.upsert({"id": 2, "name": "B", "note": "n2"}), anew.delete(1))
        with subject.writer(replace(OWNER, uid="uid-2")) as writer:
            changes = replace(changes, segments={6: changes.segments[6]})
            writer.commit(changes, 0, allow, exists=True)

        assert subject.table("id", "name") == [(2, "B")]

    def test_close_twice(self, subject: TableSubject) -> None:
        """Closing twice is safe, before and after a commit."""
        staged = Staged(subject)
        for writer in (subject.make(OWNER), subject.make(OWNER)):
            writer.commit(staged.changes(staged.upsert(*_numbered("a"))), 0, allow)
            writer.close()
            writer.close()
        unused = subject.make(OWNER)
        unused.close()
        unused.close()

        assert subject.table("id", "name") == [(1, "a")]
