"""Table versions: with which definition of a table the changes after a TABLE_MAP event are decoded.

The server describes a table before each group of its changes, almost always in the same way. Each
different description becomes a version. It is registered, so that it is durable with its position
before any of its rows, and laid out in integer arrays for the kernels. Versions are immutable; a
repeated description finds the existing version. Tables that are not captured have versions, too:
their changes are counted, which requires the sizes of their values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SchemaRegistry
from deltaforge_dagster.sources.mysql.decode.layout import (
    COLUMN_DEFAULT,
    COLUMN_DEFAULT_END,
    COLUMN_WIDTH,
    MAP_END,
    MAP_ID,
    MAP_START,
    MAP_VERSION,
    MAP_WIDTH,
    NO_DEFAULT,
    NOT_ASKED,
    ON_HOLD,
    TABLE_COLUMNS,
    TABLE_FIRST,
    TABLE_SIZE,
    TABLE_WIDTH,
)
from deltaforge_dagster.sources.mysql.decode.scan_rows import find_table
from deltaforge_dagster.sources.mysql.events.binlog import UNKNOWN_SERVER, LogServer
from deltaforge_dagster.sources.mysql.events.sql_text import Name
from deltaforge_dagster.sources.mysql.events.table_map import (
    ID_SIZE,
    CatalogTable,
    TableMap,
    Unknown,
    parse_table_map,
)
from deltaforge_dagster.sources.mysql.schema.columns import (
    ANY_SIGN,
    default_json,
    is_unsigned,
    labels_text,
)
from deltaforge_dagster.sources.mysql.values.charsets import (
    BINARY_COLLATION,
    Charset,
    any_collation,
    code_points,
)
from deltaforge_dagster.sources.mysql.values.types import (
    ENUM,
    LABEL_FORMS,
    SET,
    MysqlValueType,
    ValueForms,
    fixed_type,
    may_be_fixed,
    skipped_type,
    value_type,
)
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.rows.hiding import Hiding
from deltaforge_dagster.tables import Column, SchemaStamp, TableSchema

_Described = tuple[bytes, LogServer, CatalogTable | None, bool]
"""What distinguishes versions of a table: the TABLE_MAP event without the table id, the server that
wrote it, the definition if the table is captured and not on hold, and whether the table is
captured."""

_NO_STAMP = SchemaStamp("", 0, 0)
_MAX_MAPS = 4096
"""The most TABLE_MAP events remembered; beyond that, all are forgotten and described again."""


class TableCatalog(Protocol):
    """The catalog as the decoder uses it. Its methods may block, and are called rarely."""

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
            types: The columns' types in the log, in the notation of
                `information_schema.columns.column_type`, without labels; integers whose sign the
                log does not say end in `columns.ANY_SIGN`.
            position: Where the log describes the table.
            charsets: Whether the character sets of texts must be known, because the log lacks them.
        """
        ...

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
            types: As for `table`.
            columns: The names of those whose defaults are needed.
            position: Where the log has a row without them.
        """
        ...

    def statement(self, db: str, sql: str, position: Position) -> Collection[Name]:
        """Apply the effect of a statement in the log on tables; `db` is its default database.

        Returns:
            The tables that may have other columns since.
        """
        ...

    def existing(self, names: Iterable[Name]) -> set[Name]:
        """Return those of `names` that tables have, here in the log or in the current catalog."""
        ...


@dataclass(frozen=True, slots=True)
class MysqlTableContext:
    """What the tables of one stream are selected and described with.

    Attributes:
        registry: Where table versions are registered.
        catalog: Provides names, labels and keys that the log lacks.
        captures: Returns whether changes of (database, table) are captured. Others are skipped, but
            counted, so that ids do not depend on the choice of tables.
        forms: The formats of values where there is a choice.
        rules: The column rules.
        whole_inserts: Whether a table is on hold if a column that an insert lacks has no certain
            default.
    """

    registry: SchemaRegistry
    catalog: TableCatalog
    captures: Callable[[str, str], bool]
    forms: ValueForms = LABEL_FORMS
    rules: ColumnRules = NO_RULES
    whole_inserts: bool = False


class MysqlTableVersions:
    """The table versions of one stream by number, and the current version of each table id.

    Args:
        context: What tables are selected and described with.
        holds: Full names of tables whose changes are held, with the reasons.

    Attributes:
        holds: The tables of the argument, and those that were put on hold while this stream was
            read.
        schemas, stamps: Table and stamp of each version; without columns if it is not captured.
        hiding: Applies the column rules to rows.
        tables, layout: The versions and their columns as arrays for the kernels (`decode.layout`).
        maps, map_texts: The TABLE_MAP events in force: the hash table that `scan_rows.find_table`
            reads, and the events' bodies.
        server: The server that wrote the log from here on.
    """

    def __init__(self, context: MysqlTableContext, holds: Mapping[str, str]) -> None:
        self.holds = dict(holds)
        self.hiding = Hiding(context.rules)
        self._context = context
        self._types: dict[int, list[MysqlValueType]] = {}
        self.server = UNKNOWN_SERVER
        self._versions: dict[Name, dict[_Described, int]] = {}
        self._newest: dict[str, int] = {}
        self._visible_schemas: dict[int, TableSchema] = {}
        self.schemas: list[TableSchema] = []
        self.stamps: list[SchemaStamp] = []
        self.tables = np.empty((0, TABLE_WIDTH), np.int64)
        self.layout = ColumnLayout()
        self.forget()

    def forget(self) -> None:
        """Forget the TABLE_MAP events in force: a statement or new file may have changed tables."""
        self._mapped = 0
        self.maps = np.full((4 * _MAX_MAPS, MAP_WIDTH), -1, np.int64)
        self.map_texts = np.empty(0, np.uint8)

    def redefined(self, tables: Iterable[Name]) -> None:
        """Forget the versions of tables: equal TABLE_MAP events may mean other columns now."""
        for table in tables:
            self._versions.pop(table, None)

    @property
    def captured(self) -> set[str]:
        """Full names of the captured tables that the log has described so far."""
        return {
            f"{schema.db}.{schema.table}"
            for schema, (_, _, _, captured, _) in zip(self.schemas, self.tables, strict=True)
            if captured
        }

    def hold(self, table: str, reason: str) -> None:
        """Hold a table, given by its full name, from its next TABLE_MAP event on.

        Raises:
            SourceMisconfigured: Values of it must be hidden, so that its changes cannot be parked.
        """
        database, _, name = table.partition(".")
        self.hiding.refuse_to_hold(database, name, reason)
        self.holds[table] = reason
        self.forget()

    def describe(self, content: bytes, position: Position) -> None:
        """Make the version that a TABLE_MAP event describes the current one for its table id.

        A new version is registered at `position`. If the table's columns are not certain, the table
        is on hold from here on.

        Args:
            content: The event's body.
            position: The event's position.

        Raises:
            CorruptLog: The bytes are not a TABLE_MAP event.
            UnsupportedEvent: A column's type cannot be decoded.
            DeltaforgeError: From catalog or registry.
        """
        described = parse_table_map(content, self.server)
        captured = self._context.captures(described.db, described.table)
        name = f"table {described.db}.{described.table}"
        definition = None
        types: list[MysqlValueType] = []
        if captured:
            definition = self._unless_on_hold(described, name, position)
        if definition is not None:
            types = _types(described, definition, name, self._context.forms)
        key = (content[ID_SIZE:], self.server, definition, captured)
        versions = self._versions.setdefault((described.db, described.table), {})
        version = versions.get(key)
        if version is None:
            if definition is not None:
                version = self._add(described, types, definition, position)
            else:
                version = self._add_skipped(described, name, ON_HOLD if captured else 0)
            versions[key] = version
        elif version in self._visible_schemas and self._newest.get(name) != version:
            self._context.registry.register(
                self._visible_schemas[version], position
            )  # it is in force again
        self._newest[name] = version
        self._put_in_force(content, version)

    def complete(self, table_id: int, lacking: Sequence[int], position: Position) -> None:
        """Look up the defaults of a table, because the log has inserts that lack columns.

        If the default of a lacking column is not certain, the table is on hold from here on
        (`whole_inserts`); otherwise the inserts stay without that column.

        Args:
            table_id: The table's id; the table must be captured.
            lacking: The numbers of the columns, from 0 on.
            position: Where the inserts are.

        Raises:
            DeltaforgeError: From catalog or registry.
        """
        content = self.map_of(table_id)
        described = parse_table_map(content, self.server)
        version = int(self.maps[int(find_table(self.maps, table_id))][MAP_VERSION])
        names = [column.name for column in self.schemas[version].columns]
        name = f"table {described.db}.{described.table}"
        needed = [names[number] for number in lacking]
        answer = self._context.catalog.defaults(
            described.db, described.table, _logged_types(described, name), needed, position
        )
        texts: list[str | None] = [None] * len(names)
        if isinstance(answer, CatalogTable) and [column.name for column in answer.columns] == names:
            texts = [
                default_json(column.default, type_, column.labels)
                for column, type_ in zip(answer.columns, self._types[version], strict=True)
            ]
        line = self.tables[version]
        line[TABLE_SIZE] += self.layout.set_defaults(int(line[TABLE_FIRST]), texts)
        uncertain = [names[number] for number in lacking if texts[number] is None]
        if not uncertain or not self._context.whole_inserts:
            return
        why = f" ({answer.reason})" if isinstance(answer, Unknown) else ""
        reason = (
            f"{name}: an insert lacks {', '.join(uncertain)} (binlog_row_image), and the default"
            f" that the row has there is not certain{why}; set binlog_row_image=FULL on the server"
            " and in its sessions, release the hold (deltaforge hold release ... --catalog), which"
            " leaves the column null in these rows, and then read the table again: deltaforge"
            " resync"
        )
        self.hiding.refuse_to_hold(described.db, described.table, reason)
        self.holds[f"{described.db}.{described.table}"] = reason
        self.describe(content, position)

    def map_of(self, table_id: int) -> bytes:
        """Return the body of the TABLE_MAP event that is in force for a table id."""
        line = self.maps[int(find_table(self.maps, table_id))]
        return self.map_texts[line[MAP_START] : line[MAP_END]].tobytes()

    def version_name(self, version: int) -> str:
        """Return `database.table` of a version, for error messages."""
        schema = self.schemas[version]
        return f"{schema.db}.{schema.table}"

    def _unless_on_hold(
        self, described: TableMap, name: str, position: Position
    ) -> CatalogTable | None:
        """Return a table's columns; None if its changes are parked.

        Adds it to `holds` if its columns are uncertain.
        """
        table = f"{described.db}.{described.table}"
        if table in self.holds:
            self.hiding.refuse_to_hold(described.db, described.table, self.holds[table])
            return None
        definition = self._known_columns(described, name, position)
        if isinstance(definition, CatalogTable) and len(definition.columns) != len(described.types):
            definition = Unknown(
                f"{name} has {len(described.types)} columns in the log, but"
                f" {len(definition.columns)} in the catalog; set binlog_row_metadata=FULL on the"
                " server, so that the log describes its tables"
            )
        if isinstance(definition, Unknown):
            self.hiding.refuse_to_hold(described.db, described.table, definition.reason)
            self.holds[table] = definition.reason
            return None
        return definition

    def _known_columns(
        self, described: TableMap, name: str, position: Position
    ) -> CatalogTable | Unknown:
        """Return a table's columns as the log describes them, completed from the catalog."""
        logged = described.described
        fixed = self.server.is_mariadb and any(map(may_be_fixed, described.types))
        if logged is not None and not fixed and None not in described.unsigned:
            return logged
        answer = self._context.catalog.table(
            described.db,
            described.table,
            _logged_types(described, name),
            position,
            charsets=None in described.text_collations(),
        )
        if isinstance(answer, Unknown) or logged is None:
            return answer
        pairs = list(zip(logged.columns, answer.columns, strict=True))
        if any(in_log.name != in_catalog.name for in_log, in_catalog in pairs):
            return Unknown(
                f"{name}: only the catalog says which of its columns are"
                f" {'UUID, INET4 or INET6' if fixed else 'unsigned'}, and it names other columns"
                " than the log"
            )
        columns = tuple(replace(in_log, type=in_catalog.type) for in_log, in_catalog in pairs)
        return replace(logged, columns=columns)

    def _put_in_force(self, content: bytes, version: int) -> None:
        if self._mapped == _MAX_MAPS:
            self.forget()
        table_id = int.from_bytes(content[:ID_SIZE], "little")
        line = self.maps[int(find_table(self.maps, table_id))]
        self._mapped += line[MAP_ID] == -1
        line[MAP_ID], line[MAP_VERSION] = table_id, version
        line[MAP_START] = self.map_texts.size
        line[MAP_END] = self.map_texts.size + len(content)
        self.layout.forget_defaults(*self.tables[version, [TABLE_FIRST, TABLE_COLUMNS]].tolist())
        self.map_texts = np.concatenate([self.map_texts, np.frombuffer(content, np.uint8)])

    def _add(
        self,
        described: TableMap,
        types: list[MysqlValueType],
        definition: CatalogTable,
        position: Position,
    ) -> int:
        """Register a new version, lay it out for the kernels, and return its number."""
        names = [column.name for column in definition.columns]
        schema = TableSchema(
            db=described.db,
            schema=None,
            table=described.table,
            columns=tuple(
                Column(
                    name=column.name,
                    data_type=type_.name + labels_text(column.labels),
                    type_oid=None,
                    nullable=nullable,
                    ordinal_position=ordinal,
                )
                for ordinal, (column, type_, nullable) in enumerate(
                    zip(definition.columns, types, described.nullable, strict=True), start=1
                )
            ),
            primary_key=tuple(name for name in names if name in definition.primary_key),
        )
        shown = self._visible_schemas[len(self.schemas)] = self.hiding.add(
            len(self.schemas), schema
        )
        self.stamps.append(self._context.registry.register(shown, position))
        self.schemas.append(schema)
        in_key = [name in definition.primary_key for name in names]
        keys = len(in_key) - in_key[::-1].index(True) if any(in_key) else 0
        room = 2
        for column, type_, is_key in zip(definition.columns, types, in_key, strict=True):
            room += self.layout.add(column.name, type_, column.labels, is_key=is_key)
        self._add_table(len(types), keys, 1, room)
        self._types[len(self.schemas) - 1] = types
        return len(self.schemas) - 1

    def _add_skipped(self, described: TableMap, name: str, captured: int) -> int:
        """Lay out a table whose changes are counted or parked only; return its version's number."""
        for number, log_type in enumerate(described.types, start=1):
            try:
                type_ = skipped_type(log_type)
            except UnsupportedEvent as error:
                raise UnsupportedEvent(f"{name}, column {number}: {error}") from error
            self.layout.add_skipped(type_)
        self._add_table(len(described.types), 0, captured, 0)
        self.schemas.append(TableSchema(described.db, None, described.table, (), ()))
        self.stamps.append(_NO_STAMP)
        return len(self.schemas) - 1

    def _add_table(self, columns: int, keys: int, captured: int, room: int) -> None:
        line = [len(self.layout.columns) - columns, columns, keys, captured, room]
        self.tables = np.vstack([self.tables, np.array([line], np.int64)])


def _logged_types(described: TableMap, name: str) -> tuple[str, ...]:
    """Return the columns' types, as far as the log contains them."""
    columns = zip(described.types, described.unsigned, described.collations, strict=True)
    types = []
    for number, (type_, sign, collation) in enumerate(columns, start=1):
        with _named(f"{name}, column {number}"):
            assumed = BINARY_COLLATION if collation is None else collation
            logged = value_type(type_, assumed, unsigned=bool(sign)).name
        types.append(logged + (ANY_SIGN if sign is None and type_.is_integer else ""))
    return tuple(types)


def _types(
    described: TableMap, definition: CatalogTable, name: str, forms: ValueForms
) -> list[MysqlValueType]:
    """Return how to decode the columns' values."""
    columns = zip(
        definition.columns, described.types, described.unsigned, described.collations, strict=True
    )
    types = []
    for column, type_, unsigned, collation in columns:
        with _named(f"{name}, column {column.name}"):
            fixed = fixed_type(type_, column.type)
            if fixed is None and type_.is_text and collation is None:
                # MariaDB has JSON as LONGTEXT in utf8mb4, which a statement does not say.
                charset = column.charset or ("utf8mb4" if column.type == "json" else "")
                collation = any_collation(charset)  # noqa: PLW2901 - now it is known
                if collation is None:
                    raise UnsupportedEvent(
                        f"text in the character set {column.charset!r}, which the log leaves out"
                    )
            unsigned = is_unsigned(column.type) if unsigned is None else unsigned  # noqa: PLW2901
            types.append(fixed or value_type(type_, collation, unsigned=unsigned, forms=forms))
    return types


@contextmanager
def _named(column: str) -> Generator[None]:
    """Add the column's name to an `UnsupportedEvent` that is raised in the block."""
    try:
        yield
    except UnsupportedEvent as error:
        raise UnsupportedEvent(f"{column} is not decoded: {error}") from error


class ColumnLayout:
    """The columns of any number of tables in integer arrays for the kernels.

    Columns are only ever added.

    Attributes:
        columns: A line per column (`layout.COLUMN_*`).
        labels: Start and end in `names` of each label of an ENUM or SET.
        names: `"name":` of every column, and every label, as JSON text.
        characters: Tables of the character sets in use (`charsets.code_points`).
    """

    def __init__(self) -> None:
        self.columns = np.empty((0, COLUMN_WIDTH), np.int64)
        self.labels = np.empty((0, 2), np.int64)
        self.names = np.empty(0, np.uint8)
        self.characters = np.empty(0, np.uint16)
        self._tables: dict[str, int] = {}

    def add(self, name: str, type_: MysqlValueType, labels: Sequence[str], *, is_key: bool) -> int:
        """Add a column; return how much it adds to a row's JSON at most (`MysqlValueType.room`)."""
        start, end = self._add_text(json.dumps(name, ensure_ascii=False) + ":")
        first, second = type_.first, type_.second
        room = end - start + 1 + type_.room
        if type_.kind in (ENUM, SET):
            first, second = len(self.labels), len(labels)
            room += self._add_labels(labels)
        if type_.charset is not None:
            first = self._add_characters(type_.charset)
        self._add_line(type_, is_key, start, end, first, second)
        return room

    def set_defaults(self, first: int, texts: Sequence[str | None]) -> int:
        """Set defaults of consecutive columns, None for an uncertain one; return their size."""
        size = 0
        for line, text in zip(self.columns[first : first + len(texts)], texts, strict=True):
            line[COLUMN_DEFAULT] = NO_DEFAULT
            if text is not None:
                line[COLUMN_DEFAULT], line[COLUMN_DEFAULT_END] = self._add_text(text)
                size += len(text.encode())
        return size

    def forget_defaults(self, first: int, count: int) -> None:
        """Forget the defaults of consecutive columns, because a statement may have changed them."""
        self.columns[first : first + count, COLUMN_DEFAULT] = NOT_ASKED

    def add_skipped(self, type_: MysqlValueType) -> None:
        """Add a column whose values are skipped."""
        self._add_line(type_, False, 0, 0, 0, 0)

    def _add_line(self, type_: MysqlValueType, *fields: int) -> None:
        line = [type_.kind, type_.size, type_.prefix, *fields, NOT_ASKED, 0]
        self.columns = np.vstack([self.columns, np.array([line], np.int64)])

    def _add_text(self, text: str) -> tuple[int, int]:
        encoded = text.encode()
        start = self.names.size
        self.names = np.concatenate([self.names, np.frombuffer(encoded, np.uint8)])
        return start, start + len(encoded)

    def _add_labels(self, labels: Sequence[str]) -> int:
        """Add labels, without quotes; return the total size of them with one separator each."""
        lines = [self._add_text(json.dumps(label, ensure_ascii=False)[1:-1]) for label in labels]
        self.labels = np.vstack([self.labels, np.array(lines, np.int64).reshape(-1, 2)])
        return sum(end - start + 1 for start, end in lines)

    def _add_characters(self, charset: Charset) -> int:
        """Add the table of a character set, unless it is there already; return where it starts."""
        if charset.name not in self._tables:
            self._tables[charset.name] = self.characters.size
            self.characters = np.concatenate([self.characters, code_points(charset)])
        return self._tables[charset.name]
