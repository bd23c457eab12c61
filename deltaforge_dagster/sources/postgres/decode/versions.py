"""Table versions: which definition of a table decodes the changes after a Relation message.

The server describes a table before its first change, and again whenever the table may have changed
(also after an ANALYZE). Each different description becomes a version. It is registered, so that it
is durable with its position before any of its rows, and laid out in integer arrays for the kernels.
Versions are immutable; a repeated description finds the existing version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, Longs
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.base import SchemaRegistry
from deltaforge_dagster.sources.outbox import SCHEMA as OUTBOX
from deltaforge_dagster.sources.postgres.decode.column_numbers import ColumnNumbers, LoggedColumns
from deltaforge_dagster.sources.postgres.decode.layout import COLUMN_WIDTH, TABLE_WIDTH
from deltaforge_dagster.sources.postgres.decode.pgoutput import SCHEMA as MESSAGES
from deltaforge_dagster.sources.postgres.decode.pgoutput import (
    Relation,
    SentType,
    parse_relation,
    parse_type,
    xlog,
)
from deltaforge_dagster.sources.postgres.decode.scan import IGNORED, ON_HOLD, UNKNOWN
from deltaforge_dagster.sources.postgres.decode.types import (
    BUILT_IN,
    PostgresValueType,
    TypeCatalog,
    modified_name,
    value_type,
)
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.rows.hiding import Hiding
from deltaforge_dagster.tables import Column, SchemaStamp, TableSchema


class ColumnFills(Protocol):
    """Finds `Column.fill` of columns that were added."""

    def of(
        self, oid: int, types: Mapping[int, PostgresValueType], *, rewritten: bool | None
    ) -> Mapping[int, str | None]:
        """Return the fills of columns of a table, by number; None for those that are not known.

        Args:
            oid: OID of the table.
            types: The columns, by number.
            rewritten: Whether the table's rows were rewritten since the table was last described,
                without these columns; None if that is not known.
        """
        ...


NO_OUTBOX = Globs(())
"""Matches no prefix: there are no outboxes."""


@dataclass(frozen=True, slots=True)
class PostgresTableContext:
    """What the tables of one stream are selected and described with.

    Attributes:
        db: Name of the database.
        registry: Where table versions are registered.
        catalog: Provides types and keys that the log lacks.
        captures: Returns whether changes of (schema, table) are captured. Others are skipped, but
            counted, so that ids do not depend on the choice of tables.
        outboxes: The prefixes of logical messages that are outbox events.
        rules: The column rules.
        built_in: The built-in types, with the formats of their values.
        numbers: Finds the numbers of columns; None if it does not matter which columns they are.
        fills: Finds what older rows have in added columns; None if that does not matter.
    """

    db: str
    registry: SchemaRegistry
    catalog: TypeCatalog
    captures: Callable[[str, str], bool]
    outboxes: Globs = NO_OUTBOX
    rules: ColumnRules = NO_RULES
    built_in: Mapping[int, PostgresValueType] = field(default_factory=lambda: BUILT_IN)
    numbers: ColumnNumbers | None = None
    fills: ColumnFills | None = None


class PostgresTableVersions:
    """The table versions of one stream by number, and the current version of each relation.

    Args:
        context: What tables are selected and described with.
        holds: Full names of tables whose changes are held, with the reasons.

    Attributes:
        schemas, stamps: Table and stamp of each version.
        hiding: Applies the column rules to rows.
        relations: The table's OID, by version; 0 for logical messages.
        tables, columns, names: The versions as arrays for the kernels (`layout`); `names` has
            `"name":` of every column as JSON text.
        in_force: The hash table that `scan.find_version` reads.
        holds: Full names of tables whose changes are held, with the reasons.
    """

    def __init__(self, context: PostgresTableContext, holds: Mapping[str, str]) -> None:
        self.holds = dict(holds)
        self.hiding = Hiding(context.rules)
        self._context = context
        self._by_description: dict[tuple[bytes, tuple[str, ...], tuple[int, ...]], int] = {}
        self._visible: dict[int, TableSchema] = {}
        self._by_relation: dict[int, int] = {}
        self._by_prefix: dict[str, int] = {}
        self._sent_types: dict[int, SentType] = {}
        self._type_messages: dict[int, bytes] = {}
        self._descriptions: dict[int, tuple[str, bytes]] = {}
        self.schemas: list[TableSchema] = []
        self.stamps: list[SchemaStamp] = []
        self.relations: list[int] = []
        self.tables = np.empty((0, TABLE_WIDTH), np.int64)
        self.columns = np.empty((0, COLUMN_WIDTH), np.int64)
        self.names = np.empty(0, np.uint8)
        self.in_force = np.full((1, 2), -1, np.int64)

    def describe(self, message: bytes, position: LsnPosition) -> None:
        """Make the version that a Relation message describes the current one for its relation.

        A new version is registered at `position`. A table that cannot be decoded now is on hold
        from here on.

        Args:
            message: The message, without its type byte.
            position: The position of the current transaction.

        Raises:
            CorruptLog: The bytes are not a Relation message.
            SourceMisconfigured: The table would have to be put on hold, but column rules apply to
                it.
            DeltaforgeError: From catalog or registry.
        """
        relation = parse_relation(message)
        version = IGNORED
        if self._context.captures(relation.schema, relation.table):
            version = self._version(relation, message, position)
        if version == ON_HOLD:
            types = (self._type_messages.get(column.type_oid) for column in relation.columns)
            parts = [
                b"Y" + type_message
                for type_message in dict.fromkeys(types)
                if type_message is not None
            ]
            stream = b"".join(xlog(0, part) for part in [*parts, b"R" + message])
            self._descriptions[relation.oid] = relation.full_name, stream
        if self._by_relation.get(relation.oid) != version:
            self._by_relation[relation.oid] = version
            self._index()

    def name_type(self, message: bytes) -> None:
        """Remember a Type message (without its type byte) for the Relation message that needs it.

        Raises:
            CorruptLog: The bytes are not a Type message.
        """
        sent = parse_type(message)
        self._sent_types[sent.oid] = sent
        self._type_messages[sent.oid] = message

    def description(self, oid: int) -> tuple[str, bytes]:
        """Return the full name of a table on hold, and the XLogData messages that describe it."""
        return self._descriptions[oid]

    def of_messages(self, prefix: str) -> int:
        """Return the version, without columns and stamp, for logical messages with this prefix."""
        version = self._by_prefix.get(prefix)
        if version is None:
            schema = OUTBOX if self._context.outboxes.match([prefix]) else MESSAGES
            table = TableSchema(self._context.db, schema, prefix, (), ())
            version = self._lay_out(0, table, [], SchemaStamp("", 0, 0))
            self._by_prefix[prefix] = version
        return version

    def of_table(self, oid: int) -> int:
        """Return the current version of a table, or `ON_HOLD`, `IGNORED` or `UNKNOWN`."""
        return self._by_relation.get(oid, UNKNOWN)

    def version_name(self, version: int) -> str:
        """Return `schema.table` of a version, for error messages."""
        schema = self.schemas[version]
        return f"{schema.schema}.{schema.table}"

    def _version(self, relation: Relation, message: bytes, position: LsnPosition) -> int:
        """Return the version for a captured table, or `ON_HOLD`."""
        if relation.full_name in self.holds:
            reason = self.holds[relation.full_name]
            self.hiding.refuse_to_hold(relation.schema, relation.table, reason)
            return ON_HOLD
        try:
            key = self._key_columns(relation, position)
            columns = LoggedColumns(
                relation.oid, [column.name for column in relation.columns], None
            )
            numbers = self._context.numbers
            if numbers is not None:
                columns = numbers.of(relation, position)
            described = message, key, tuple(columns.numbers or ())
            version = self._by_description.get(described)
            if version is not None and self._by_relation.get(relation.oid) == version:
                return version
            if version is None:
                version = self._register(relation, key, columns, position)
                self._by_description[described] = version
            else:
                self._context.registry.register(
                    self._visible[version], position
                )  # it is in force again
            if numbers is not None:
                numbers.note(relation, columns, position)
        except UnsupportedEvent as error:
            self.hiding.refuse_to_hold(relation.schema, relation.table, str(error))
            self.holds[relation.full_name] = str(error)
            return ON_HOLD
        return version

    def _key_columns(self, relation: Relation, position: LsnPosition) -> tuple[str, ...]:
        """Return the key columns, in the table's order."""
        names = [column.name for column in relation.columns]
        if relation.identity in "di":
            return tuple(column.name for column in relation.columns if column.in_identity)
        # FULL marks every column and NOTHING none, so the primary key comes from the catalog.
        primary_key = self._context.catalog.primary_key(relation.oid)
        if not set(primary_key) <= set(names):
            raise UnsupportedEvent(
                f"table {relation.full_name} at {format_lsn(position.lsn)}: its log"
                f" does not have the columns of today's primary key ({', '.join(primary_key)});"
                " rename them back until the table is released"
            )
        return tuple(name for name in names if name in primary_key)

    def _register(
        self,
        relation: Relation,
        key: tuple[str, ...],
        logged: LoggedColumns,
        position: LsnPosition,
    ) -> int:
        """Register a new version, lay it out for the kernels, and return its number."""
        types = [
            self._type(relation, column.name, column.type_oid, position)
            for column in relation.columns
        ]
        fills = self._fills_of(relation, logged, types)
        schema = TableSchema(
            db=self._context.db,
            schema=relation.schema,
            table=relation.table,
            columns=tuple(
                Column(
                    name=column.name,
                    data_type=modified_name(type_.name, column.type_oid, column.modifier),
                    type_oid=column.type_oid,
                    nullable=column.name not in key,  # the log says no more than that
                    ordinal_position=ordinal,
                    number=logged.number(ordinal - 1),
                    fill=fills.get(ordinal - 1),
                )
                for ordinal, (column, type_) in enumerate(
                    zip(relation.columns, types, strict=True), start=1
                )
            ),
            primary_key=key,
            relation=relation.oid,
        )
        shown = self._visible[len(self.schemas)] = self.hiding.add(len(self.schemas), schema)
        stamp = self._context.registry.register(shown, position)
        return self._lay_out(relation.oid, schema, types, stamp)

    def _fills_of(
        self, relation: Relation, logged: LoggedColumns, types: list[PostgresValueType]
    ) -> Mapping[int, str | None]:
        """Return the fills of the columns that were added since the last description, by index."""
        column_numbers, column_fills = self._context.numbers, self._context.fills
        if column_numbers is None or column_fills is None or logged.numbers is None:
            return {}
        previous = column_numbers.known(relation)
        # If the publication left out columns, a new one may have existed before, with its own
        # values.
        if not (logged.whole and (previous is None or previous.whole)):
            return {}
        before = [] if previous is None or previous.numbers is None else previous.numbers
        indexes = {
            number: index for index, number in enumerate(logged.numbers) if number not in before
        }
        if not indexes:
            return {}
        rewritten: bool | None = None
        if previous is not None and None not in {previous.file, logged.file}:
            rewritten = previous.file != logged.file
        added = {number: types[index] for number, index in indexes.items()}
        fills = column_fills.of(relation.oid, added, rewritten=rewritten)
        return {indexes[number]: fill for number, fill in fills.items()}

    def _lay_out(
        self, relation: int, schema: TableSchema, types: list[PostgresValueType], stamp: SchemaStamp
    ) -> int:
        """Add a version to the arrays for the kernels, and return its number."""
        self.relations.append(relation)
        self.stamps.append(stamp)
        self.schemas.append(schema)
        lines, names = lay_out_columns(
            [column.name for column in schema.columns], types, schema.primary_key, len(self.names)
        )
        self.tables = np.vstack(
            [
                self.tables,
                np.array([[len(self.columns), len(lines), len(schema.primary_key)]], np.int64),
            ]
        )
        self.columns = np.vstack([self.columns, lines])
        self.names = np.concatenate([self.names, names])
        return len(self.schemas) - 1

    def _type(
        self, relation: Relation, column: str, oid: int, position: LsnPosition
    ) -> PostgresValueType:
        try:
            return value_type(
                oid, self._context.catalog, self._sent_types.get(oid), self._context.built_in
            )
        except UnsupportedEvent as error:
            raise UnsupportedEvent(
                f"table {relation.full_name}, column {column}, at"
                f" {format_lsn(position.lsn)}: {error}"
            ) from error

    def _index(self) -> None:
        """Rebuild `in_force`, at most half full."""
        size = 1 << len(self._by_relation).bit_length() + 1
        self.in_force = np.full((size, 2), -1, np.int64)
        for relation, version in self._by_relation.items():
            line = relation & (size - 1)
            while self.in_force[line, 0] != -1:
                line = (line + 1) & (size - 1)
            self.in_force[line] = relation, version


def lay_out_columns(
    columns: Sequence[str], types: Sequence[PostgresValueType], key: Collection[str], names_at: int
) -> tuple[Longs, Bytes]:
    """Return a table's columns as lines for the kernels (`layout.COLUMN_*`), and their names.

    Args:
        columns: The names of the columns.
        types: The columns' types.
        key: Names of the key columns.
        names_at: The offset that the names will have in `names`.
    """
    labels = [f"{json.dumps(name, ensure_ascii=False)}:".encode() for name in columns]
    ends = names_at + np.cumsum([len(label) for label in labels], dtype=np.int64)
    lines = np.empty((len(labels), COLUMN_WIDTH), np.int64)
    for line, (name, type_) in enumerate(zip(columns, types, strict=True)):
        end, delimiter = ends[line], ord(type_.delimiter or "\0")
        lines[line] = (type_.kind, delimiter, name in key, end - len(labels[line]), end)
    return lines, np.frombuffer(b"".join(labels), np.uint8)
