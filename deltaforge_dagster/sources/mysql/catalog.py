"""What the server's catalog says of tables, for logs that do not say it themselves.

With `binlog_row_metadata = FULL` the log names the columns of every table, and nothing is asked
here. With MINIMAL, MySQL's default, names, labels and keys come from `information_schema`, as
they are today. That is right for a row only if its table was not defined anew since. So the catalog
is vouched for in two ways: its types must be those of the log, and the log between the row and
the moment when the catalog was read must not hold a statement that changes the table. The rest of
the log is looked through once for that, piece by piece as tables come up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.positions import BinlogPosition, Position
from deltaforge_dagster.sources.mysql import binlog, server_log
from deltaforge_dagster.sources.mysql.connection import Server, Session
from deltaforge_dagster.sources.mysql.ddl import Change, TableChange, table_changes
from deltaforge_dagster.sources.mysql.log_scan import LogScan
from deltaforge_dagster.sources.mysql.table_map import CatalogColumn, CatalogTable

SYSTEM_DATABASES = ("mysql", "information_schema", "performance_schema", "sys")
"""Never captured."""

_SECONDS = 30.0
_COLUMNS = """
    SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name, COLUMN_NAME AS col, COLUMN_TYPE AS type
    FROM information_schema.COLUMNS WHERE {which} ORDER BY ORDINAL_POSITION
"""
_KEYS = """
    SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name, COLUMN_NAME AS col
    FROM information_schema.STATISTICS WHERE INDEX_NAME = 'PRIMARY' AND {which}
    ORDER BY SEQ_IN_INDEX
"""
_OF_USERS = "TABLE_SCHEMA NOT IN (%s, %s, %s, %s)"
_ONE = "TABLE_SCHEMA = %s AND TABLE_NAME = %s"
_ADVICE = (
    "run: SET PERSIST binlog_row_metadata = FULL, with which the log itself describes every table"
    " from then on"
)
_LABEL = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPES = {"0": "\0", "n": "\n", "r": "\r"}


@dataclass(slots=True)
class _Table:
    """A table of the catalog, and where the log ended when the catalog had been read."""

    read_at: BinlogPosition
    columns: list[tuple[str, str]] = field(default_factory=list)
    primary_key: list[str] = field(default_factory=list)


class Catalog:
    """The tables of a server, for one reader of its log.

    What was read once is used again until a statement of the log changes the table.

    Args:
        server: Where.
        captures: Whether changes of (database, table) are wanted.
        reader_id: A server id for looking ahead in the log.
    """

    def __init__(
        self, server: Server, captures: Callable[[str, str], bool], reader_id: int
    ) -> None:
        self._server = server
        self._captures = captures
        self._reader_id = reader_id
        self._tables: dict[tuple[str, str], _Table] = {}
        self._looked: BinlogPosition | None = None
        self._ahead: list[tuple[BinlogPosition, TableChange]] = []

    def table(
        self, db: str, table: str, types: tuple[str, ...], position: Position
    ) -> CatalogTable:
        """Return the table that a row of the log at `position` belongs to.

        Args:
            db: Its database.
            table: Its name.
            types: What the log says of its columns.
            position: Where the log describes it.

        Raises:
            UnsupportedEvent: The catalog may describe another version of the table.
        """
        assert isinstance(position, BinlogPosition)
        found = self._find(db, table)
        where = f"table {db}.{table} at {position.file}, {position.pos}"
        if found is None:
            raise UnsupportedEvent(
                f"{where}: the catalog does not have it, and the log does not name its columns;"
                f" grant SELECT on it, or, if it was dropped, {_ADVICE}"
            )
        changed = self._changed(db, table, position, found.read_at)
        if changed is not None:
            raise UnsupportedEvent(
                f"{where}: a statement at {changed.file}, {changed.pos} changed it since, and the"
                f" log does not name the columns that it had; {_ADVICE}"
            )
        if [_comparable(type_) for _, type_ in found.columns] != [_comparable(t) for t in types]:
            raise UnsupportedEvent(
                f"{where}: its columns in the log ({', '.join(types)}) are not those of the catalog"
                f" ({', '.join(type_ for _, type_ in found.columns)}); {_ADVICE}"
            )
        columns = tuple(CatalogColumn(name, labels(type_)) for name, type_ in found.columns)
        return CatalogTable(columns, tuple(found.primary_key))

    def statement(self, db: str, sql: str, position: Position) -> None:
        """Take note of a statement in the log that is not about rows.

        Raises:
            UnsupportedEvent: It empties a captured table.
        """
        assert isinstance(position, BinlogPosition)
        for change in table_changes(sql, db):
            for known in [name for name in self._tables if change.concerns(*name)]:
                del self._tables[known]
            if change.change is Change.EMPTIES and self._captures(change.db, change.table or ""):
                raise UnsupportedEvent(
                    f"the log holds a TRUNCATE TABLE of {change.db}.{change.table} at"
                    f" {position.file}, {position.pos}, which this version does not decode"
                )

    def _find(self, db: str, table: str) -> _Table | None:
        """Return a table as it is known, else as it is now; the first question reads them all."""
        if not self._tables:
            self._read(_OF_USERS, SYSTEM_DATABASES)
        if (db, table) not in self._tables:
            self._read(_ONE, (db, table))
        return self._tables.get((db, table))

    def _read(self, which: str, parameters: tuple[str, ...]) -> None:
        with self._server.query(_SECONDS) as session:
            columns = session.rows(_COLUMNS.format(which=which), *parameters)
            keys = session.rows(_KEYS.format(which=which), *parameters)
            now = server_log.tail(session, self._server.where, gtids=False)
        found: dict[tuple[str, str], _Table] = {}
        for row in columns:
            if self._captures(row["db"], row["name"]):
                table = found.setdefault((row["db"], row["name"]), _Table(now))
                table.columns.append((row["col"], row["type"]))
        for row in keys:
            if (row["db"], row["name"]) in found:
                found[row["db"], row["name"]].primary_key.append(row["col"])
        self._tables |= found

    def _changed(
        self, db: str, table: str, after: BinlogPosition, until: BinlogPosition
    ) -> BinlogPosition | None:
        """Return where between two places the table was defined anew."""
        begin = after if self._looked is None else max(after, self._looked)
        if begin < until:
            self._look(begin, until)
        return next(
            (
                place
                for place, change in self._ahead
                if after < place <= until and change.concerns(db, table)
            ),
            None,
        )

    def _look(self, begin: BinlogPosition, until: BinlogPosition) -> None:
        # By place where the protocol can, which is nearer: by GTIDs it begins at an older file.
        by_set = begin.pos >> 32 and begin.gtid_set is not None
        start = begin if by_set else BinlogPosition(begin.file, begin.pos)
        with LogScan(self._server, start, self._reader_id, _SECONDS) as scan:
            for event in scan:
                if event is None:
                    continue
                if event.type == binlog.QUERY:
                    query = binlog.parse_query(event.body)
                    changes = table_changes(query.statement, query.database)
                    self._ahead += [(event.end, change) for change in changes]
                if event.end >= until:
                    break
        self._looked = until


def captured_tables(session: Session, captures: Callable[[str, str], bool]) -> list[str]:
    """Return `database.table` of every base table that is captured."""
    found = session.rows(
        "SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name FROM information_schema.TABLES"
        " WHERE TABLE_TYPE = 'BASE TABLE' ORDER BY 1, 2"
    )
    return [f"{row['db']}.{row['name']}" for row in found if captures(row["db"], row["name"])]


def labels(column_type: str) -> tuple[str, ...]:
    """Return the labels of `enum('a','b')` or `set(...)`, unquoted; none for other types."""
    if not column_type.lower().startswith(("enum(", "set(")):
        return ()
    return tuple(
        re.sub(
            r"''|\\(.)",
            lambda match: _ESCAPES.get(match[1], match[1]) if match[1] else "'",
            label,
            flags=re.DOTALL,
        )
        for label in _LABEL.findall(column_type)
    )


def _comparable(column_type: str) -> str:
    """Return a type without what the log and the catalog say differently.

    The log knows no display widths, and lengths of text in bytes where the catalog has characters.
    """
    base, _, rest = column_type.lower().partition("(")
    words = base.split()
    name = words[0]
    if name in {"enum", "set"}:
        return name
    size, _, after = rest.partition(")")
    unsigned = "unsigned" in words[1:] or "unsigned" in after.split()
    if name in {"tinyint", "smallint", "mediumint", "int", "bigint"}:
        return f"{name} unsigned" if unsigned else name
    if name in {"decimal", "bit", "datetime", "timestamp", "time"}:
        return f"{name}({size.replace(' ', '') or 0})"
    if name in _GEOMETRIES:
        return "geometry"
    return name


_GEOMETRIES = {
    "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring",
    "multipolygon", "geometrycollection", "geomcollection",
}  # fmt: skip
