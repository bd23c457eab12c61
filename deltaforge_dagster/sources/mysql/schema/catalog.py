"""Table definitions from the server's catalog, for logs that lack them.

With `binlog_row_metadata = FULL` the log describes all columns, and this module is not used for
decoding. With MINIMAL, MySQL's default, names, labels and keys come from `information_schema` as it
was when the pipeline began. Every later statement in the log is applied to them (`definitions`),
and the result is stored with its position before a row depends on it, so that the next run
continues with it.

If the definition of a table is not known in this way (after a statement that is not understood, or
for a table that was not known at the start), the current catalog is read. It is right for a row
only if the table was not redefined since. So two conditions are checked: its types must be those in
the log, and the log between the row and the time when the catalog was read must not contain a
statement that changes the table. That part of the log is scanned once, as far as needed. If a check
fails, the table is `Unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SourceNotes
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession, MysqlSourceServer
from deltaforge_dagster.sources.mysql.events import binlog
from deltaforge_dagster.sources.mysql.events.sql_text import Name
from deltaforge_dagster.sources.mysql.events.statements import DdlEffect, TableChange, table_changes
from deltaforge_dagster.sources.mysql.events.table_map import CatalogColumn, CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.columns import (
    catalog_default,
    is_binary,
    labels,
    text_charset,
)
from deltaforge_dagster.sources.mysql.schema.definitions import (
    Definitions,
    apply,
    column_changes,
    fit,
    is_table,
    key_of,
    lacks_charsets,
    lacks_defaults,
    name_of,
    parse_definition,
    text_of,
)
from deltaforge_dagster.sources.mysql.stream.log_scan import LogScan
from deltaforge_dagster.sources.mysql.values.types import LABEL_FORMS, ValueForms
from deltaforge_dagster.tables import (
    ColumnChanges,
    ColumnDetails,
    TableDetails,
    TableFate,
    TableSchema,
)

SYSTEM_DATABASES = ("mysql", "information_schema", "performance_schema", "sys")
"""Databases that are never captured."""

_SECONDS = 30.0
_COLUMNS = """
    SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name, COLUMN_NAME AS col, COLUMN_TYPE AS type,
        CHARACTER_SET_NAME AS charset, COLUMN_DEFAULT AS value, IS_NULLABLE AS nullable, \
EXTRA AS extra
    FROM information_schema.COLUMNS WHERE {which} ORDER BY ORDINAL_POSITION
"""
_KEYS = """
    SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name, COLUMN_NAME AS col
    FROM information_schema.STATISTICS WHERE INDEX_NAME = 'PRIMARY' AND {which}
    ORDER BY SEQ_IN_INDEX
"""
_COLLATIONS = """
    SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name, TABLE_COLLATION AS collation
    FROM information_schema.TABLES WHERE TABLE_COLLATION IS NOT NULL AND {which}
"""
_DETAILS = """
    SELECT COLUMN_NAME AS name, IS_NULLABLE AS nullable, COLUMN_DEFAULT AS value, EXTRA AS extra
    FROM information_schema.COLUMNS WHERE {which}
"""
_TABLE_DETAILS = """
    SELECT ENGINE AS engine, TABLE_COLLATION AS collation
    FROM information_schema.TABLES WHERE {which}
"""
_USER_TABLES = "TABLE_SCHEMA NOT IN (%s, %s, %s, %s)"
_ONE_TABLE = "TABLE_SCHEMA = %s AND TABLE_NAME = %s"
_REDEFINES = {DdlEffect.DEFINES, DdlEffect.DROPS}
_FATES: Mapping[DdlEffect, TableFate] = {
    DdlEffect.DROPS: "dropped",
    DdlEffect.MAKES: "made",
    DdlEffect.DEFINES: "kept",
}
_ADVICE = (
    "with binlog_row_metadata = FULL, which MySQL 8 and MariaDB have, the log itself describes"
    " every table from then on"
)


@dataclass(slots=True)
class _Table:
    """A table from the catalog, and the end of the log after the catalog was read."""

    read_at: BinlogPosition
    columns: list[CatalogColumn] = field(default_factory=list)
    primary_key: list[str] = field(default_factory=list)
    charset: str = ""

    def definition(self) -> CatalogTable:
        """Return the table as an immutable definition."""
        return CatalogTable(tuple(self.columns), tuple(self.primary_key), self.charset)


class MysqlCatalog:
    """The definitions of a server's tables, for one reader of its log.

    Args:
        server: The server.
        registry: Where definitions are stored, and where earlier ones come from.
        start: Where the reader begins.
        reader_id: A replication server id for scanning the log ahead of the reader.
        forms: The formats of values where there is a choice.
    """

    def __init__(
        self,
        server: MysqlSourceServer,
        registry: SourceNotes,
        start: BinlogPosition,
        reader_id: int,
        forms: ValueForms = LABEL_FORMS,
    ) -> None:
        self._server = server
        self._registry = registry
        self._forms = forms
        self._reader_id = reader_id
        self._current: dict[Name, _Table] = {}
        self._scanned_until: BinlogPosition | None = None
        self._redefinitions: list[tuple[BinlogPosition, TableChange]] = []
        self._fold: bool | None = None
        self._tables: Definitions = {
            name_of(key): parse_definition(text)
            for key, text in registry.defined(start).items()
            if is_table(key)
        }

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable | Unknown:
        """Return the columns and key that a table had at `position`, or why they are not certain.

        Args:
            db: Its database.
            table: Its name.
            types: The types of its columns in the log.
            position: Where the log describes it.
            charsets: Whether the character sets of its texts must be known, too.
        """
        assert isinstance(position, BinlogPosition)
        definition = self._tables.get((db, table))
        if (
            definition is not None
            and fit(definition, types)
            and not (charsets and lacks_charsets(definition))
        ):
            return definition
        answer = self._table_if_unchanged(db, table, types, position)
        if isinstance(answer, CatalogTable):
            self._tables[db, table] = answer
            self._note({(db, table)}, position)
        return answer

    def defaults(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        columns: Collection[str],
        position: Position,
    ) -> CatalogTable | Unknown:
        """Return a table with the defaults of its columns at `position`, or why they are uncertain.

        Args:
            db: Its database.
            table: Its name.
            types: The types of its columns in the log.
            columns: The names of those whose defaults are needed.
            position: Where the log has a row without them.
        """
        assert isinstance(position, BinlogPosition)
        definition = self._tables.get((db, table))
        if (
            definition is not None
            and fit(definition, types)
            and not lacks_defaults(definition, columns)
        ):
            return definition
        answer = self._table_if_unchanged(db, table, types, position)
        if isinstance(answer, Unknown):
            return answer
        self._tables[db, table] = answer
        self._note({(db, table)}, position)
        return answer

    def statement(self, db: str, sql: str, position: Position) -> Collection[Name]:
        """Apply a statement in the log that may define tables.

        Stores the changed definitions, and what the statement does to columns.

        Returns:
            The tables that may have other columns since.
        """
        assert isinstance(position, BinlogPosition)
        fold = self._folds()
        touched = apply(self._tables, sql, db, fold=fold)
        for name in touched:
            self._current.pop(name, None)
        if touched:
            self._note(touched, position)
        fates = [
            (f"{change.db}.{change.table or '*'}", _FATES[change.change])
            for change in table_changes(sql, db, fold=fold)
            if change.change in _FATES
        ]
        if any(fate != "kept" for _, fate in fates):
            self._registry.note_fates(fates)
        altered = column_changes(sql, db, fold=fold, forms=self._forms)
        if altered is not None:
            name, changes = altered
            touched.add(name)
            if changes != ColumnChanges():
                table = TableSchema(name[0], None, name[1], (), ())
                self._registry.altered(table, changes, position)
        return touched

    def existing(self, names: Iterable[Name]) -> set[Name]:
        """Return those of `names` that tables have, here in the log or in the current catalog."""
        return {name for name in names if name in self._tables or self._find(*name) is not None}

    def _note(self, names: Iterable[Name], position: Position) -> None:
        self._registry.define(
            {key_of(name): text_of(self._tables, name) for name in names}, position
        )

    def _folds(self) -> bool:
        """Return whether the server stores table names in lower case; asks the server once."""
        if self._fold is None:
            self._fold = _folds(self._server, _SECONDS)
        return self._fold

    def _table_if_unchanged(
        self, db: str, table: str, types: tuple[str, ...], position: BinlogPosition
    ) -> CatalogTable | Unknown:
        """Return a table from the current catalog, if it certainly was the same at `position`."""
        current = self._find(db, table)
        where = f"table {db}.{table} at {position.file}, {position.pos}"
        if current is None:
            return Unknown(
                f"{where}: the catalog does not have it, and the log does not name its columns;"
                f" grant SELECT on it, unless it was dropped; {_ADVICE}"
            )
        changed = self._changed(db, table, position, current.read_at)
        if changed is not None:
            return Unknown(
                f"{where}: a statement at {changed.file}, {changed.pos} changed it since, and the"
                f" log does not name the columns that it had; {_ADVICE}"
            )
        definition = current.definition()
        if not fit(definition, types):
            return Unknown(
                f"{where}: its columns in the log ({', '.join(types)}) are not those of the catalog"
                f" ({', '.join(column.type for column in current.columns)}); {_ADVICE}"
            )
        return definition

    def _find(self, db: str, table: str) -> _Table | None:
        """Return a table from the current catalog; the first call reads all tables."""
        if not self._current:
            self._current = read_tables(self._server, _SECONDS)
        if (db, table) not in self._current:
            self._current |= read_tables(self._server, _SECONDS, (db, table))
        return self._current.get((db, table))

    def _changed(
        self, db: str, table: str, after: BinlogPosition, until: BinlogPosition
    ) -> BinlogPosition | None:
        """Return where the table was first redefined between two positions; None if it was not."""
        begin = after if self._scanned_until is None else max(after, self._scanned_until)
        if begin < until:
            self._scan_log(begin, until)
        return next(
            (
                position
                for position, change in self._redefinitions
                if after < position <= until and change.concerns(db, table)
            ),
            None,
        )

    def _scan_log(self, begin: BinlogPosition, until: BinlogPosition) -> None:
        self._redefinitions += statements_between(
            self._server, begin, until, self._reader_id, fold=self._folds()
        )
        self._scanned_until = until


def _folds(server: MysqlSourceServer, seconds: float) -> bool:
    """Return whether a server stores table names in lower case."""
    with server.query(seconds) as session:
        rows = session.rows("SELECT @@lower_case_table_names AS fold")
    return bool(int(rows[0]["fold"]))


def statements_between(
    server: MysqlSourceServer,
    begin: BinlogPosition,
    until: BinlogPosition,
    reader_id: int,
    *,
    fold: bool,
) -> list[tuple[BinlogPosition, TableChange]]:
    """Return the tables redefined between two positions, each with the end of the statement.

    Args:
        server: The server.
        begin: The first position.
        until: The second one.
        reader_id: A replication server id for scanning the log.
        fold: Whether the server stores table names in lower case.
    """
    if until <= begin:
        return []
    # Start at the file position if the protocol can: with GTIDs the server starts in an older file.
    by_set = begin.pos >> 32 and begin.gtid_set is not None
    start = begin if by_set else BinlogPosition(begin.file, begin.pos)
    redefinitions: list[tuple[BinlogPosition, TableChange]] = []
    with LogScan(server, start, reader_id, _SECONDS) as scan:
        for event in scan:
            if event is None:
                continue
            if event.type == binlog.QUERY:
                query = binlog.parse_query(event.body, scan.server)
                changes = table_changes(query.sql, query.database, fold=fold)
                redefinitions += [
                    (event.end, change) for change in changes if change.change in _REDEFINES
                ]
            if event.end >= until:
                break
    return redefinitions


def definitions_now(
    server: MysqlSourceServer, start: BinlogPosition, reader_id: int, seconds: float
) -> dict[str, str]:
    """Return the definitions of all tables unchanged since `start`, as texts by `key_of`."""
    current = read_tables(server, seconds)
    if not current:
        return {}
    read_at = next(iter(current.values())).read_at
    fold = _folds(server, seconds)
    changes = [
        change for _, change in statements_between(server, start, read_at, reader_id, fold=fold)
    ]
    tables: Definitions = {
        name: table.definition()
        for name, table in current.items()
        if not any(change.concerns(*name) for change in changes)
    }
    return {key_of(name): text for name in tables if (text := text_of(tables, name))}


def tables_now(server: MysqlSourceServer, name: Name) -> dict[Name, CatalogTable]:
    """Return one table from the current catalog, by its name; empty if it does not exist."""
    tables = read_tables(server, _SECONDS, name)
    return {table_name: table.definition() for table_name, table in tables.items()}


def read_tables(
    server: MysqlSourceServer, seconds: float, only: Name | None = None
) -> dict[Name, _Table]:
    """Return all user tables, or only one, from the current catalog."""
    which, parameters = (_USER_TABLES, SYSTEM_DATABASES) if only is None else (_ONE_TABLE, only)
    with server.query(seconds) as session:
        columns = session.rows(_COLUMNS.format(which=which), *parameters)
        keys = session.rows(_KEYS.format(which=which), *parameters)
        collations = session.rows(_COLLATIONS.format(which=which), *parameters)
        read_at = server_log.tail(session, server.where, gtids=False)
        is_mariadb = session.is_mariadb
    tables: dict[Name, _Table] = {}
    for row in columns:
        table = tables.setdefault((row["db"], row["name"]), _Table(read_at))
        type_ = row["type"]
        charset = row["charset"] or ("binary" if is_binary(type_) else "")
        default = catalog_default(
            row["value"],
            type_=type_,
            nullable=row["nullable"] == "YES",
            extra=row["extra"],
            is_mariadb=is_mariadb,
        )
        table.columns.append(CatalogColumn(row["col"], labels(type_), type_, charset, default))
    for row in keys:
        if (row["db"], row["name"]) in tables:
            tables[row["db"], row["name"]].primary_key.append(row["col"])
    for row in collations:
        if (row["db"], row["name"]) in tables:
            charset = row["collation"].partition("_")[0]  # a prefix of its name
            tables[row["db"], row["name"]].charset = text_charset(charset)
    return tables


def table_details(session: MysqlSession, where: str, table: str) -> TableDetails:
    """Return the properties of `database.table` that are only in the catalog, not in the log.

    Raises:
        SourceMisconfigured: There is no such table.
    """
    name = table.split(".", 1)
    columns = session.rows(_DETAILS.format(which=_ONE_TABLE), *name)
    of_table = session.rows(_TABLE_DETAILS.format(which=_ONE_TABLE), *name)
    if not columns or not of_table:
        raise SourceMisconfigured(f"{where}: there is no table {table}")
    # MariaDB writes defaults as expressions; a column without a default has the expression NULL.
    none = "NULL" if session.is_mariadb else None
    collation = of_table[0]["collation"]
    return TableDetails(
        {
            row["name"]: ColumnDetails(
                row["nullable"] == "YES",
                None if row["value"] == none else row["value"],
                row["extra"],
            )
            for row in columns
        },
        engine=of_table[0]["engine"],
        charset=collation and collation.partition("_")[0],  # a prefix of its name
        collation=collation,
    )


def captured_tables(session: MysqlSession, captures: Callable[[str, str], bool]) -> list[str]:
    """Return `database.table` of every existing base table that is captured."""
    rows = session.rows(
        "SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name FROM information_schema.TABLES"
        " WHERE TABLE_TYPE = 'BASE TABLE' ORDER BY 1, 2"
    )
    return [f"{row['db']}.{row['name']}" for row in rows if captures(row["db"], row["name"])]
