"""The Avro schema of the events of a table version (Apache Avro 1.12, "Specification").

An event is a record `Envelope` in the namespace
`deltaforge.cdc.<connector>.<db>[.<schema>].<table>`::

    before, after     null, or a record BeforeValue or AfterValue with the columns
    source            a record deltaforge.cdc.Source: version connector name ts_ms db schema table
                      snapshot position
    op ts_ms          as in the native event, and so are the next ones, which may be null
    event_id schema_version transaction tenant_id schema_sequence ddl tags synthetic tx_end
    before_missing, after_missing
                      names of the columns whose values the log, or a processor, has left out

Every column may be null and has the default null, because the log may lack the value of a column.
So columns can be added and removed without making a new version of the schema incompatible. A
column that is null because its value is unknown is listed in `before_missing` or `after_missing`.

Names in Avro have letters, digits and `_`. Other characters of a column's name become `_`, and the
field has the original name as its property `column`. A number is appended if another column has the
resulting name.

Events that belong to no registered table version (schema changes, logical messages, events that
processors create) have a schema of their own, `deltaforge.cdc.<connector>.Envelope`, whose records
have a single field: the row as JSON text. In a pipeline with processors, the tables' schemas have
this field as well, for fields that processors add.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltaforge_dagster.config.engine import Engine
from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from deltaforge_dagster.sources.registry import PositionField, SourceType
from deltaforge_dagster.sources.value_types import INT64, TEXT, ValueType
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema, typed_schema
from deltaforge_dagster.typed_rows.tables import VersionName

OTHER_FIELDS = "_other_fields"
"""The field for what a row has besides the table's columns: a JSON object as text."""

_ROOT = "deltaforge"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")
_LABEL = re.compile(r"'((?:[^'\\]|''|\\.)*)'")
_STRING = "string"
_INT_BITS = 32
_SCALARS: Mapping[str, Any] = {
    "boolean": "boolean",
    "text": "string",
    "json": "string",
    "binary": "bytes",
    "geometry": "bytes",
    "uuid": {"type": "string", "logicalType": "uuid"},
    "date": {"type": "int", "logicalType": "date"},
    "time": {"type": "long", "logicalType": "time-micros"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
}
_JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AvroColumn:
    """A column of a record.

    Attributes:
        name: The name of the table's column.
        field: The name of the record's field.
        type: How its values are read.
        symbols: The symbols of an enum; empty for all other types.
    """

    name: str
    field: str
    type: ValueType
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AvroTable:
    """How the events of a table version are written.

    Attributes:
        text: The schema, as JSON.
        record: The full name of its record.
        columns: The columns of a row.
        rows: The same columns, for `typed_rows`; None for events of no table, whose whole rows are
            text in `OTHER_FIELDS`.
        other_fields: Whether rows have the field `OTHER_FIELDS`.
    """

    text: str
    record: str
    columns: tuple[AvroColumn, ...]
    rows: TypedSchema | None
    other_fields: bool


class AvroTables:
    """Makes the schemas of a pipeline's table versions, each once.

    Args:
        encoding: The types that a sink wants.
        origin: Where the events come from.
        kind: The kind of source.
        engine: `spec.engine` of the file.
        other_fields: Whether rows may have fields that their tables do not have.
    """

    def __init__(
        self,
        encoding: AvroEncoding,
        origin: EventOrigin,
        kind: SourceType[Any],
        engine: Engine,
        *,
        other_fields: bool,
    ) -> None:
        self._encoding = encoding
        self._origin = origin
        self._kind = kind
        self._engine = engine
        self._other_fields = other_fields
        self._enums = encoding.enum_mode == "enum" and engine.values.mysql_enum == "label"
        self._schemas: dict[VersionName, AvroTable] = {}
        self.of_no_table = self._table((), (), None, other=True)
        """The schema of events of no registered table version."""

    def of(self, version: VersionName, table: TableSchema) -> AvroTable:
        """Return the schema of a table version's events."""
        if version not in self._schemas:
            typed = typed_schema(table, self._kind, self._engine)
            columns = self._columns(table.columns, typed)
            rows = TypedSchema(
                tuple(TypedColumn(column.name, column.type) for column in columns),
                typed.marks_unchanged,
            )
            names = [name for name in (table.db, table.schema, table.table) if name is not None]
            self._schemas[version] = self._table(names, columns, rows, other=self._other_fields)
        return self._schemas[version]

    def _columns(self, columns: Sequence[Column], typed: TypedSchema) -> tuple[AvroColumn, ...]:
        names = [column.name for column in typed.columns]
        fields = _field_names(names)
        return tuple(
            self._column(column, field, typed_column.type)
            for column, field, typed_column in zip(columns, fields, typed.columns, strict=True)
        )

    def _column(self, column: Column, field: str, type_: ValueType) -> AvroColumn:
        symbols: tuple[str, ...] = ()
        if type_.kind == "integer" and type_.bits == INT64.bits and not type_.signed:
            type_ = TEXT if self._encoding.unsigned_bigint_mode == "string" else INT64
        elif type_.kind == "timestamp" and not type_.zone:
            type_ = TEXT if self._encoding.naive_timestamp_mode == "string" else type_
        elif type_ == TEXT and self._enums:
            symbols = _symbols(column.data_type)
        return AvroColumn(column.name, field, type_, symbols)

    def _table(
        self,
        path: Sequence[str],
        columns: Sequence[AvroColumn],
        rows: TypedSchema | None,
        *,
        other: bool,
    ) -> AvroTable:
        parts = [_avro_name(name) for name in (self._origin.connector, *path)]
        values = ".".join((_ROOT, *parts))
        namespace = ".".join((_ROOT, "cdc", *parts))
        images = [
            _record(
                name,
                values,
                [
                    *(
                        _column_field(column, values, defines=name == "BeforeValue")
                        for column in columns
                    ),
                    *([_optional(OTHER_FIELDS, _STRING)] if other else []),
                ],
            )
            for name in ("BeforeValue", "AfterValue")
        ]
        fields = [
            *map(_optional, ("before", "after"), images),
            {"name": "source", "type": _source(self._origin.position_fields)},
            {"name": "op", "type": _STRING},
            {"name": "ts_ms", "type": "long"},
            *_optionals("event_id", "schema_version"),
            _optional(
                "transaction",
                _record("Transaction", f"{_ROOT}.cdc", [{"name": "id", "type": _STRING}]),
            ),
            *_optionals("tenant_id"),
            _optional("schema_sequence", "long"),
            *_optionals("ddl", "tags", "synthetic"),
            _optional("tx_end", "boolean"),
            *(
                _optional(name, {"type": "array", "items": _STRING})
                for name in ("before_missing", "after_missing")
            ),
        ]  # fmt: skip
        text = json.dumps(_record("Envelope", namespace, fields), separators=(",", ":"))
        return AvroTable(text, f"{namespace}.Envelope", tuple(columns), rows, other)


def avro_type(type_: ValueType) -> Any:
    """Return the type in Avro of the values of a type."""
    match type_.kind:
        case "integer":
            return "int" if type_.bits + (not type_.signed) <= _INT_BITS else "long"
        case "float":
            return "float" if type_.bits == _INT_BITS else "double"
        case "decimal":
            return {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": type_.precision,
                "scale": type_.scale,
            }
        case "list":
            assert type_.element is not None
            return {"type": "array", "items": ["null", avro_type(type_.element)]}
        case _:
            return _SCALARS[type_.kind]


def _column_field(column: AvroColumn, namespace: str, *, defines: bool) -> _JsonSchema:
    type_ = avro_type(column.type)
    if column.symbols:
        name = f"{column.field}_enum"
        named = {"type": "enum", "name": name, "namespace": namespace, "symbols": column.symbols}
        type_ = named if defines else f"{namespace}.{name}"
    original = {} if column.field == column.name else {"column": column.name}
    return {**_optional(column.field, type_), **original}


def _source(positions: Iterable[PositionField]) -> _JsonSchema:
    fields: list[_JsonSchema] = [
        *({"name": name, "type": _STRING} for name in ("version", "connector", "name")),
        {"name": "ts_ms", "type": "long"},
        {"name": "db", "type": _STRING},
        *_optionals("schema"),
        {"name": "table", "type": _STRING},
        *_optionals("snapshot"),
    ]
    position = [
        _optional(field.name, "long" if is_number(field) else _STRING) for field in positions
    ]
    fields.append(_optional("position", _record("Position", f"{_ROOT}.cdc", position)))
    return _record("Source", f"{_ROOT}.cdc", fields)


def is_number(position: PositionField) -> bool:
    """Return whether a field of positions is a long; else it is text."""
    return position.column is None or position.form in {"number", "json"}


def _record(name: str, namespace: str, fields: Sequence[_JsonSchema]) -> _JsonSchema:
    return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


def _optional(name: str, type_: Any) -> _JsonSchema:
    return {"name": name, "type": ["null", type_], "default": None}


def _optionals(*names: str) -> list[_JsonSchema]:
    return [_optional(name, _STRING) for name in names]


def _avro_name(name: str) -> str:
    """Return a name that Avro allows."""
    allowed = _NOT_IN_NAMES.sub("_", name)
    return allowed if _NAME.fullmatch(allowed) else f"_{allowed}"


def _field_names(names: Sequence[str]) -> list[str]:
    """Return the fields' names; names that Avro allows stay as they are."""
    taken = {OTHER_FIELDS, *(name for name in names if _NAME.fullmatch(name))}
    allocated = []
    for name in names:
        if _NAME.fullmatch(name) and name != OTHER_FIELDS:
            allocated.append(name)
            continue
        allowed, number = _avro_name(name), 1
        field = allowed
        while field in taken:
            number += 1
            field = f"{allowed}_{number}"
        taken.add(field)
        allocated.append(field)
    return allocated


def _symbols(data_type: str) -> tuple[str, ...]:
    """Return the labels of an ENUM of MySQL; none if one of them cannot be a symbol in Avro."""
    if not data_type.lower().startswith("enum("):
        return ()
    labels = tuple(_LABEL.findall(data_type))
    return labels if all(_NAME.fullmatch(label) for label in labels) else ()
