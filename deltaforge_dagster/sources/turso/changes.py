"""Changes of rows: the interface of the three modes that find them, and batches of them.

A mode is a `ChangeLog`. Its `Reading` keeps its position, and reads on step by step: a step reads
everything that it needs in one session. Record batches are made afterwards, when the database is
unlocked again: with table versions, column rules and the columns of the change frame.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.sources.base import ParkedEvent, SchemaRegistry, SourceNotes
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.rows.hiding import HiddenTable
from deltaforge_dagster.sources.turso.connection import TursoSession, identifier
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.tables import SchemaStamp, TableSchema


@dataclass(frozen=True, slots=True)
class TursoChange:
    """One change of a row.

    Attributes:
        table: The table's definition at the time of the change.
        op: As in the change frame.
        ts_us: When it was made, in microseconds since 1970.
        number: Its number in the change table; in mode `polling` the row's rowid.
        before, after, key: As in the change frame.
        row: Its index in its transaction, from 0.
        tx_id: Its transaction; None if unknown.
        tx_end: Whether it is the last of its transaction.
        by_table: Whether `number` is unique only within the table.
        ddl: The payload of a DDL event; None for a change of a row.
    """

    table: TableSchema
    op: str
    ts_us: int
    number: int
    before: str | None
    after: str | None
    key: str | None
    row: int = 0
    tx_id: str | None = None
    tx_end: bool = True
    by_table: bool = False
    ddl: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Changes in the database's order.

    Attributes:
        changes: The changes.
        end: The position after them, at which a segment may end; None inside a transaction.
        reached: The position of the reading after them.
        parked: Events of tables on hold.
    """

    changes: Sequence[TursoChange]
    end: TursoPosition | None
    reached: TursoPosition
    parked: tuple[ParkedEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one poll.

    Attributes:
        parts: The changes.
        more: Whether there may be more changes, so that the next poll should follow at once.
        read_bytes: Approximate number of bytes read.
    """

    parts: list[Part] = field(default_factory=list)
    more: bool = False
    read_bytes: int = 0


class Reading(Protocol):
    """Reads changes from a position on, and keeps its position."""

    def step(self, session: TursoSession, limit: int) -> Step:
        """Read the next changes, at most `limit` (in mode `polling`, of each table).

        Raises:
            PositionLost: Changes after the position no longer exist.
            UnsupportedEvent: A change cannot be decoded; nothing is skipped.
        """
        ...


class ChangeLog(Protocol):
    """A mode of finding changes; stateless."""

    def newest(self, session: TursoSession) -> TursoPosition:
        """Return the newest position."""
        ...

    def start(self, session: TursoSession) -> TursoPosition:
        """Return the position at which a new pipeline begins."""
        ...

    def check(self, session: TursoSession, position: TursoPosition) -> None:
        """Check that all changes after a position still exist, as far as the mode can tell.

        Raises:
            PositionLost: They do not.
        """
        ...

    def has_changes(self, session: TursoSession, after: TursoPosition) -> bool:
        """Return whether a captured table has changes after a position."""
        ...

    def reading(self, start: TursoPosition, notes: SourceNotes) -> Reading:
        """Return a reading of the changes after a position."""
        ...


class Batches:
    """Makes record batches of changes, and registers their table versions.

    Args:
        source_id: `id` of the source.
        rules: The column rules.
        registry: Where versions are registered.
    """

    def __init__(self, source_id: str, rules: ColumnRules, registry: SchemaRegistry) -> None:
        self._source_id = source_id
        self._rules = rules
        self._registry = registry
        self._stamped: dict[TableSchema, tuple[HiddenTable, SchemaStamp]] = {}
        self._newest: dict[str, TableSchema] = {}

    def batch(self, changes: Sequence[TursoChange], position: TursoPosition) -> pa.RecordBatch:
        """Return changes as a record batch of the change frame, with column rules applied.

        Args:
            changes: Changes of any tables, in order.
            position: The position from which on table versions that are new in `changes` are valid.

        Raises:
            SourceMisconfigured: A column rule cannot be applied to a value.
            LeaseLost: The run that reads no longer holds the pipeline's lease.
        """
        columns: dict[str, list[Any]] = {field.name: [None] * len(changes) for field in CAPTURED}
        for at, change in enumerate(changes):
            self._fill(columns, at, change, position)
        for name in ("before", "after", "key"):
            self._hide(columns[name], changes)
        arrays = [pa.array(columns[field.name], field.type) for field in CAPTURED]
        return pa.RecordBatch.from_arrays(arrays, schema=CAPTURED)

    def _fill(
        self, columns: dict[str, list[Any]], at: int, change: TursoChange, position: TursoPosition
    ) -> None:
        columns["op"][at] = change.op
        columns["ts_us"][at] = change.ts_us
        columns["db"][at] = change.table.db
        columns["table"][at] = change.table.table
        columns["before"][at] = change.before
        columns["after"][at] = change.after
        columns["key"][at] = change.key
        columns["pos"][at] = change.number
        columns["row"][at] = change.row
        columns["tx_id"][at] = change.tx_id
        columns["tx_end"][at] = change.tx_end
        columns["ddl"][at] = change.ddl
        columns["raw_payload"][at] = False
        if change.ddl is None:
            _, stamp = self._version(change.table, position)
            columns["schema_version"][at] = stamp.fingerprint
            columns["schema_sequence"][at] = stamp.sequence
        if change.by_table:
            columns["file"][at] = change.table.table  # `read_view` needs the table of the number
            change_id, ts_us = f"{change.table.table}\0{change.number}", 0
        else:
            change_id, ts_us = f"{change.ts_us}\0{change.number}", change.ts_us
        columns["event_id"][at] = event_id(self._source_id, change_id, ts_us)

    def _hide(self, texts: list[Any], changes: Sequence[TursoChange]) -> None:
        """Replace the texts by those that result from the column rules."""
        if not self._rules:
            return
        by_table: dict[TableSchema, list[int]] = {}
        for at, change in enumerate(changes):
            if change.ddl is None:
                by_table.setdefault(change.table, []).append(at)
        for table, indexes in by_table.items():
            hidden, _ = self._stamped[table]
            shown = hidden.column(pa.array([texts[at] for at in indexes], pa.string()))
            for at, text in zip(indexes, shown.to_pylist(), strict=True):
                texts[at] = text

    def _version(
        self, table: TableSchema, position: TursoPosition
    ) -> tuple[HiddenTable, SchemaStamp]:
        stamped = self._stamped.get(table)
        if stamped is None or self._newest.get(table.table) != table:
            hidden = HiddenTable(self._rules, table) if stamped is None else stamped[0]
            # An earlier version that is in force again is registered again, too.
            stamped = hidden, self._registry.register(hidden.visible, position)
            self._stamped[table] = stamped
            self._newest[table.table] = table
        return stamped


_VERSION, _VARIANT = 7 << 76, 2 << 62  # the fixed bits of such a UUID (RFC 9562, section 5.7)


def event_id(source_id: str, change_id: str, ts_us: int) -> str:
    """Return a change's event id, a version 7 UUID as for other sources (`sources.rows.event_ids`).

    Its 74 free bits are a hash of the source and of `change_id`.

    Args:
        source_id: `id` of the source.
        change_id: A text that identifies the change within the source.
        ts_us: When it was made, in microseconds since 1970; 0 if unknown.
    """
    digest = hashlib.blake2b(
        f"{source_id}\0{change_id}".encode(), digest_size=16, person=b"event_id"
    )
    free = int.from_bytes(digest.digest(), "big")
    high = free >> 64 & 0xFFF
    low = free & (1 << 62) - 1
    millis = (ts_us // 1000) & (1 << 48) - 1
    return str(uuid.UUID(int=millis << 80 | _VERSION | high << 64 | _VARIANT | low))


_SAMPLE = 100


def mean_bytes(session: TursoSession, table: str, number: str, before: str, after: str) -> float:
    """Return the mean size of the images in the newest rows of a change table; 0 if it is empty.

    Args:
        session: A session.
        table: The change table.
        number: The column that numbers its rows.
        before: A column with an image of the row.
        after: The column with the other image.
    """
    sizes = " + ".join(f"coalesce(length({identifier(name)}), 0)" for name in (before, after))
    ((mean,),) = session.query(
        f"SELECT avg(size) FROM (SELECT {sizes} AS size"  # noqa: S608 - names are quoted
        f" FROM {identifier(table)} ORDER BY {identifier(number)} DESC LIMIT {_SAMPLE})"
    )
    return float(mean) if isinstance(mean, int | float) else 0.0
