"""Parked events of a MySQL log: their serialized form, and the catalog for decoding them later.

For a table on hold, everything that its changes depend on is kept, in log order:

- each rows event, with the TABLE_MAP event that describes its table, and its location in the log:
  the transaction (a line of `layout.TX_*`), the number of earlier changes in it, file and offset.
  So the changes later get the ids, positions and times that they would have had without the hold;
- a TRUNCATE, as the finished row of the change frame;
- every statement that defines tables, because it may change how later rows are decoded.

Each is stored as one byte string (`base.pack_parked`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import pack_parked, unpack_parked
from deltaforge_dagster.sources.mysql.events.binlog import (
    HEADER,
    UNKNOWN_SERVER,
    LogServer,
)
from deltaforge_dagster.sources.mysql.events.sql_text import Name, SqlSession, plain
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.definitions import (
    Definitions,
    apply,
    column_changes,
    fit,
    lacks_charsets,
    table_of_statement,
)


@dataclass(frozen=True, slots=True)
class ParkedRows:
    """A parked rows event.

    Attributes:
        file, pos: Where the event ends in the log.
        tx: The line of its transaction, `layout.TX_*`.
        tag: The tag of the transaction's GTID.
        index: Number of changes of the transaction before it.
        table_map: Body of the TABLE_MAP event that describes the table.
        event: The event with header, without checksum.
        server: The server that wrote it.
    """

    file: str
    pos: int
    tx: tuple[int, ...]
    tag: str
    index: int
    table_map: bytes
    event: bytes
    server: LogServer = UNKNOWN_SERVER

    def data(self) -> bytes:
        """Return the bytes to store.

        The size in the event's header is corrected, because the checksum is cut off.
        """
        head = {
            "rows": [self.file, self.pos, list(self.tx), self.tag, self.index, len(self.table_map)],
            "server": self.server.text,
        }
        size = len(self.event).to_bytes(4, "little")
        event = self.event[:9] + size + self.event[13:]
        return pack_parked(head, self.table_map + event)


@dataclass(frozen=True, slots=True)
class ParkedStatement:
    """A parked statement that may define tables; `sql` as in `QueryEvent`."""

    database: str
    sql: str

    def data(self) -> bytes:
        """Return the bytes to store."""
        return pack_parked({"statement": [self.database, self.sql]}, b"")


@dataclass(frozen=True, slots=True)
class ParkedBatch:
    """A parked change that is decoded already; `tx` is the line of its transaction."""

    tx: tuple[int, ...]
    rows: pa.RecordBatch

    def data(self) -> bytes:
        """Return the bytes to store."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.rows.schema) as stream:
            stream.write_batch(self.rows)
        return pack_parked({"batch": list(self.tx)}, sink.getvalue().to_pybytes())


ParkedItem = ParkedRows | ParkedStatement | ParkedBatch


def parse_parked(data: bytes) -> ParkedItem:
    """Parse the bytes that `data()` of a parked item returned.

    Raises:
        CorruptLog: The bytes are not a parked item.
    """
    try:
        head, rest = unpack_parked(data)
        if "statement" in head:
            return ParkedStatement(*head["statement"])
        if "batch" in head:
            with pa.ipc.open_stream(rest) as stream:
                return ParkedBatch(tuple(head["batch"]), stream.read_next_batch())
        file, pos, tx, tag, index, described = head["rows"]
        event = rest[described:]
        if len(event) < HEADER:
            raise CorruptLog("a held event that is too short")
        server = LogServer.named(head.get("server", ""))
        return ParkedRows(file, pos, tuple(tx), tag, index, rest[:described], event, server)
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CorruptLog(f"a held event that cannot be read: {error}") from error


class KnownTables:
    """A catalog for decoding parked events: a user's definitions, and the statements after them.

    Args:
        tables: The definitions at the first event.
        fixed: Whether the definitions hold for all events, so that statements are ignored.
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
        """Return a table's definition, if it is known and compatible with the types in the log."""
        assert isinstance(position, BinlogPosition)
        definition = self.tables.get((db, table))
        where = f"table {db}.{table} at {position.file}, {position.pos}"
        if definition is None:
            return Unknown(
                f"{where}: nobody says which columns it had; deltaforge hold release ..."
                " --create-table FILE does"
            )
        if not fit(definition, types) or (charsets and lacks_charsets(definition)):
            columns = ", ".join(column.type for column in definition.columns)
            return Unknown(
                f"{where}: its columns in the log ({', '.join(types)}) are not those that were"
                f" given for it ({columns})"
            )
        return definition

    def defaults(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        columns: Collection[str],
        position: Position,
    ) -> CatalogTable | Unknown:
        """Return a table's definition, which may lack defaults; see `table`."""
        del columns
        return self.table(db, table, types, position)

    def statement(self, db: str, sql: str, position: Position) -> Collection[Name]:
        """Apply a statement unless the definitions are fixed; return the tables that it may alter.

        The column changes in it were recorded already when the log was read.
        """
        del position
        text = plain(sql, SqlSession())  # versions before stored it as logged
        touched = set() if self._fixed else apply(self.tables, text, db)
        altered = column_changes(text, db, fold=False)
        return touched if altered is None else touched | {altered[0]}

    def existing(self, names: Iterable[Name]) -> set[Name]:
        """Return which of these tables have a definition."""
        return {name for name in names if name in self.tables}


def tables_of_fix(
    fix: Mapping[str, Any], name: Name, now: Mapping[Name, CatalogTable]
) -> KnownTables:
    """Return the catalog for decoding the events of a table that is released.

    Args:
        fix: What the user declared: `{"create_table": "CREATE TABLE ..."}`, `{"catalog": true}` or
            `{}`.
        name: The table.
        now: Definitions from the server's current catalog; used with `catalog`.

    Raises:
        UnsupportedEvent: The CREATE TABLE statement is not understood.
    """
    if "create_table" in fix:
        text = str(fix["create_table"])
        sql = plain(text, SqlSession(is_mariadb="/*M!" in text))
        table = table_of_statement(sql, name[0])
        if table is None:
            raise UnsupportedEvent("the CREATE TABLE statement that was given is not understood")
        return KnownTables({name: table}, fixed=False)
    return KnownTables(dict(now), fixed=bool(fix.get("catalog")))


def follow(events: Iterator[bytes]) -> Iterator[tuple[ParkedItem, ParkedItem | None]]:
    """Parse parked events; yield each with the first later one that is not a statement, or None."""
    waiting: list[ParkedItem] = []
    for data in events:
        parked = parse_parked(data)
        if not isinstance(parked, ParkedStatement):
            yield from ((earlier, parked) for earlier in waiting)
            waiting = []
        waiting.append(parked)
    yield from ((earlier, None) for earlier in waiting)
