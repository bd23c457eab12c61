"""Table versions: what the changes after a TABLE_MAP event are decoded with.

The server describes a table before each group of its changes, almost always as before. Each
different description becomes a version: registered, so that it is durable with its position before
any row of it is, and laid out in integer arrays for the kernels. Versions are never altered; a
repeated description finds the version it made before. Tables that are not captured have versions,
too: their changes are counted, for which the sizes of their values must be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SchemaRegistry
from deltaforge_dagster.sources.mysql.column_layout import ColumnLayout
from deltaforge_dagster.sources.mysql.layout import (
    MAP_END,
    MAP_ID,
    MAP_START,
    MAP_VERSION,
    MAP_WIDTH,
    TABLE_WIDTH,
)
from deltaforge_dagster.sources.mysql.scan import find_table
from deltaforge_dagster.sources.mysql.table_map import (
    ID_SIZE,
    CatalogTable,
    TableMap,
    Unknown,
    parse_table_map,
)
from deltaforge_dagster.sources.mysql.values import ValueForms, ValueType, skipped_type, value_type
from deltaforge_dagster.tables import Column, SchemaStamp, TableSchema

_NO_STAMP = SchemaStamp("", 0, 0)
_MAX_MAPS = 4096
"""Tables remembered at once; more are described again."""


class Catalog(Protocol):
    """What the decoder asks of the source's catalog; both may block, and both are asked rarely."""

    def table(
        self, db: str, table: str, types: tuple[str, ...], position: Position
    ) -> CatalogTable | Unknown:
        """Return what the log leaves out of a table as it was at `position`, if that is certain.

        Asked only without `binlog_row_metadata=FULL`. `types` are the columns' types in the log, as
        `information_schema.columns.column_type` has them, without labels.
        """
        ...

    def statement(self, db: str, sql: str, position: Position) -> None:
        """Take notice of a statement in the log (DDL, GRANT ...), whose default database is `db`."""
        ...


class TableVersions:
    """The table versions of one stream, by number, and which of them is in force per table id.

    Attributes:
        schemas, stamps: What was registered, by version; without columns where not captured.
        tables, layout: The versions, and their columns, for the kernels (`layout`).
        maps, map_texts: The TABLE_MAP events in force: the hash table that `scan.find_table`
            reads, and the events' bodies.
    """

    def __init__(
        self,
        *,
        registry: SchemaRegistry,
        catalog: Catalog,
        captures: Callable[[str, str], bool],
        forms: ValueForms,
    ) -> None:
        self._registry = registry
        self._forms = forms
        self._catalog = catalog
        self._captures = captures
        self._known: dict[tuple[bytes, CatalogTable | None], int] = {}
        self.schemas: list[TableSchema] = []
        self.stamps: list[SchemaStamp] = []
        self.tables = np.empty((0, TABLE_WIDTH), np.int64)
        self.layout = ColumnLayout()
        self.forget()

    def forget(self) -> None:
        """Let every table be described again: a statement or another file may have changed it."""
        self._mapped = 0
        self.maps = np.full((4 * _MAX_MAPS, MAP_WIDTH), -1, np.int64)
        self.map_texts = np.empty(0, np.uint8)

    def describe(self, content: bytes, position: Position) -> None:
        """Take in the body of a TABLE_MAP event; `position` is registered with it.

        Raises:
            CorruptLog: The bytes are not a TABLE_MAP event.
            UnsupportedEvent: A column is not decoded, or the catalog does not know the table.
            DeltaforgeError: What catalog or registry raise.
        """
        described = parse_table_map(content)
        captured = self._captures(described.db, described.table)
        name = f"table {described.db}.{described.table}"
        known = described.described
        types: list[ValueType] = []
        if captured:
            types = _types(described, name, self._forms)
            if known is None:
                answer = self._catalog.table(
                    described.db, described.table, tuple(t.name for t in types), position
                )
                if isinstance(answer, Unknown):
                    raise UnsupportedEvent(answer.reason)
                known = answer
            if len(known.columns) != len(types):
                raise UnsupportedEvent(
                    f"{name} has {len(types)} columns in the log, but {len(known.columns)} in the"
                    " catalog; set binlog_row_metadata=FULL on the server, so that the log"
                    " describes its tables"
                )
        key = (content[ID_SIZE:], known if captured else None)
        version = self._known.get(key)
        if version is None:
            if captured and known is not None:
                version = self._add(described, types, known, position)
            else:
                version = self._add_skipped(described, name)
            self._known[key] = version
        self._put_in_force(content, version)

    def version_name(self, version: int) -> str:
        """Return `database.table` of a version, for error messages."""
        schema = self.schemas[version]
        return f"{schema.db}.{schema.table}"

    def _put_in_force(self, content: bytes, version: int) -> None:
        if self._mapped == _MAX_MAPS:
            self.forget()
        table_id = int.from_bytes(content[:ID_SIZE], "little")
        line = self.maps[int(find_table(self.maps, table_id))]
        self._mapped += line[MAP_ID] == -1
        line[MAP_ID], line[MAP_VERSION] = table_id, version
        line[MAP_START] = self.map_texts.size
        line[MAP_END] = self.map_texts.size + len(content)
        self.map_texts = np.concatenate([self.map_texts, np.frombuffer(content, np.uint8)])

    def _add(
        self, described: TableMap, types: list[ValueType], known: CatalogTable, position: Position
    ) -> int:
        """Register a new version, lay it out, and return its number."""
        names = [column.name for column in known.columns]
        schema = TableSchema(
            db=described.db,
            schema=None,
            table=described.table,
            columns=tuple(
                Column(
                    name=column.name,
                    data_type=type_.name + _labels_text(column.labels),
                    type_oid=None,
                    nullable=nullable,
                    ordinal_position=ordinal,
                )
                for ordinal, (column, type_, nullable) in enumerate(
                    zip(known.columns, types, described.nullable, strict=True), start=1
                )
            ),
            primary_key=tuple(name for name in names if name in known.primary_key),
        )
        self.stamps.append(self._registry.register(schema, position))
        self.schemas.append(schema)
        in_key = [name in known.primary_key for name in names]
        keys = len(in_key) - in_key[::-1].index(True) if any(in_key) else 0
        room = 2
        for column, type_, is_key in zip(known.columns, types, in_key, strict=True):
            room += self.layout.add(column.name, type_, column.labels, is_key=is_key)
        self._add_table(len(types), keys, True, room)
        return len(self.schemas) - 1

    def _add_skipped(self, described: TableMap, name: str) -> int:
        """Lay out a table whose changes are only counted, and return its version's number."""
        for number, log_type in enumerate(described.types, start=1):
            try:
                type_ = skipped_type(log_type)
            except UnsupportedEvent as error:
                raise UnsupportedEvent(f"{name}, column {number}: {error}") from error
            self.layout.add_skipped(type_)
        self._add_table(len(described.types), 0, False, 0)
        self.schemas.append(TableSchema(described.db, None, described.table, (), ()))
        self.stamps.append(_NO_STAMP)
        return len(self.schemas) - 1

    def _add_table(self, columns: int, keys: int, captured: bool, room: int) -> None:
        line = [len(self.layout.columns) - columns, columns, keys, captured, room]
        self.tables = np.vstack([self.tables, np.array([line], np.int64)])


def _types(described: TableMap, name: str, forms: ValueForms) -> list[ValueType]:
    """Return how the columns' values are read."""
    types = []
    for number, (type_, unsigned, collation) in enumerate(
        zip(described.types, described.unsigned, described.collations, strict=True), start=1
    ):
        column = str(number)
        if described.described is not None:
            column = described.described.columns[number - 1].name
        if unsigned is None or (type_.is_text and collation is None):
            raise UnsupportedEvent(
                f"{name}, column {column}: the log does not say whether it is unsigned, or its"
                " character set; MySQL 8.0 or newer is needed"
            )
        try:
            types.append(value_type(type_, collation, unsigned=unsigned, forms=forms))
        except UnsupportedEvent as error:
            raise UnsupportedEvent(f"{name}, column {column} is not decoded: {error}") from error
    return types


def _labels_text(labels: Sequence[str]) -> str:
    """Return the labels as `column_type` shows them, nothing for other types."""
    if not labels:
        return ""
    return "(" + ",".join("'" + label.replace("'", "''") + "'" for label in labels) + ")"
