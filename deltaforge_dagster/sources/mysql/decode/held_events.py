"""Held events of a MySQL log: what is kept of them, and how they are decoded later.

Of a table whose columns nobody knows every event is kept that its changes depend on, in log order:

- its rows: the event itself, the TABLE_MAP event that describes its table, and where it stands: the
  transaction (a line of `layout.TX_*`), how many changes of it come before, file and offset. So the
  changes get the ids, positions and times that they would have had;
- a TRUNCATE: the finished row of the change frame;
- while a table is held, every statement that defines tables: it may change how rows behind it are
  read.

Each is one byte string (`base.pack_held`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import pack_held, unpack_held
from deltaforge_dagster.sources.mysql.events.binlog import HEADER
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import Name
from deltaforge_dagster.sources.mysql.schema.definitions import (
    Definitions,
    apply,
    fit,
    lacks_charsets,
    table_of_statement,
)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A rows event.

    Attributes:
        file, pos: Where it ends.
        tx: The line of its transaction, `layout.TX_*`.
        tag: The tag of its GTID.
        index: Changes of the transaction before it.
        table_map: Body of the TABLE_MAP event.
        event: The event, without a checksum.
    """

    file: str
    pos: int
    tx: tuple[int, ...]
    tag: str
    index: int
    table_map: bytes
    event: bytes

    def data(self) -> bytes:
        """Return the bytes to keep; the event's size no longer counts a checksum."""
        head = {
            "rows": [self.file, self.pos, list(self.tx), self.tag, self.index, len(self.table_map)]
        }
        size = len(self.event).to_bytes(4, "little")
        event = self.event[:9] + size + self.event[13:]
        return pack_held(head, self.table_map + event)


@dataclass(frozen=True, slots=True)
class HeldStatement:
    """A statement that may define tables."""

    database: str
    sql: str

    def data(self) -> bytes:
        """Return the bytes to keep."""
        return pack_held({"statement": [self.database, self.sql]}, b"")


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A change that is decoded already; `tx` is the line of its transaction."""

    tx: tuple[int, ...]
    rows: pa.RecordBatch

    def data(self) -> bytes:
        """Return the bytes to keep."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.rows.schema) as stream:
            stream.write_batch(self.rows)
        return pack_held({"batch": list(self.tx)}, sink.getvalue().to_pybytes())


HeldItem = HeldRows | HeldStatement | HeldBatch


def parse_held(data: bytes) -> HeldItem:
    """Return what `data()` of one of the three returned.

    Raises:
        CorruptLog: The bytes are none of them.
    """
    try:
        head, rest = unpack_held(data)
        if "statement" in head:
            return HeldStatement(*head["statement"])
        if "batch" in head:
            with pa.ipc.open_stream(rest) as stream:
                return HeldBatch(tuple(head["batch"]), stream.read_next_batch())
        file, pos, tx, tag, index, described = head["rows"]
        event = rest[described:]
        if len(event) < HEADER:
            raise CorruptLog("a held event that is too short")
        return HeldRows(file, pos, tuple(tx), tag, index, rest[:described], event)
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CorruptLog(f"a held event that cannot be read: {error}") from error


class KnownTables:
    """A catalog for held events: what somebody says of a table, and the statements since.

    Args:
        tables: Definitions where the first event stands.
        fixed: Whether statements change nothing: the definitions are those of all events.
    """

    def __init__(self, tables: Definitions, *, fixed: bool) -> None:
        self.tables = tables
        self._fixed = fixed

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable | Unknown:
        """Return a table, if it is known and can be that of the log."""
        assert isinstance(position, BinlogPosition)
        known = self.tables.get((db, table))
        where = f"table {db}.{table} at {position.file}, {position.pos}"
        if known is None:
            return Unknown(
                f"{where}: nobody says which columns it had; deltaforge hold release ..."
                " --create-table FILE does"
            )
        if not fit(known, types) or (charsets and lacks_charsets(known)):
            columns = ", ".join(column.type for column in known.columns)
            return Unknown(
                f"{where}: its columns in the log ({', '.join(types)}) are not those that were"
                f" given for it ({columns})"
            )
        return known

    def statement(self, db: str, sql: str, position: Position) -> None:
        """Follow a statement."""
        del position
        if not self._fixed:
            apply(self.tables, sql, db)


def tables_of_fix(
    fix: Mapping[str, Any], name: Name, now: Mapping[Name, CatalogTable]
) -> KnownTables:
    """Return the catalog that a release asks for.

    Args:
        fix: `{"create_table": "CREATE TABLE ..."}`, `{"catalog": true}` or nothing.
        name: The table.
        now: The tables of today's catalog; asked for with `catalog` only.

    Raises:
        UnsupportedEvent: The statement does not make a table for certain.
    """
    if "create_table" in fix:
        table = table_of_statement(str(fix["create_table"]), name[0])
        if table is None:
            raise UnsupportedEvent("the CREATE TABLE statement that was given is not understood")
        return KnownTables({name: table}, fixed=False)
    return KnownTables(dict(now), fixed=bool(fix.get("catalog")))


def follow(events: Iterator[bytes]) -> Iterator[tuple[HeldItem, HeldItem | None]]:
    """Yield each kept event, and the next one behind it that is no statement."""
    waiting: list[HeldItem] = []
    for data in events:
        kept = parse_held(data)
        if not isinstance(kept, HeldStatement):
            yield from ((one, kept) for one in waiting)
            waiting = []
        waiting.append(kept)
    yield from ((one, None) for one in waiting)
