"""Which columns the rows of a table version have for a destination, and of which types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa

from deltaforge_dagster.config.engine import Engine
from deltaforge_dagster.sources.registry import SourceType
from deltaforge_dagster.sources.rows.columns import TRUNCATE, ColumnRules
from deltaforge_dagster.sources.value_types import (
    INT16,
    INT32,
    INT64,
    TEXT,
    ValueType,
    decimal,
    list_of,
)
from deltaforge_dagster.tables import TableSchema
from deltaforge_dagster.typed_rows.exact import FLOATS

SOURCE_TYPE = b"deltaforge.source_type"
"""Metadata of an Arrow field: the type of its column in the source."""

_INTEGERS: Mapping[tuple[int, bool], pa.DataType] = {
    (8, True): pa.int8(), (16, True): pa.int16(), (32, True): pa.int32(), (64, True): pa.int64(),
    (8, False): pa.uint8(), (16, False): pa.uint16(),
    (32, False): pa.uint32(), (64, False): pa.uint64(),
}  # fmt: skip
_SCALARS: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "text": pa.string(),
    "json": pa.string(),
    "binary": pa.binary(),
    "geometry": pa.binary(),
    "uuid": pa.uuid(),
    "date": pa.date32(),
    "time": pa.time64("us"),
}
_SIGNED = {8: INT16, 16: INT32, 32: INT64, 64: decimal(20, 0)}
"""By its bits, the type that has all values of an unsigned integer."""
_TRUNCATABLE = {"text", "binary"}
"""Kinds whose values stay of their kind when a column rule truncates them."""


@dataclass(frozen=True, slots=True)
class TargetTypes:
    """Which types a destination has; a type that it lacks is replaced by one with the same values.

    Attributes:
        unsigned: Unsigned integers; else the next wider signed ones, and `decimal(20,0)` for 64
            bits.
        time: Times of a day; else text.
        uuid: UUIDs; else text.
        not_finite: NaN and infinities in floats; else they do not fit.
        own_equality: Whether columns that get texts may compare them in their own way, so that
            different texts are the same key: `10.0` and `10.00` in a number, `a` and `A` if case
            does not matter.
    """

    unsigned: bool = True
    time: bool = True
    uuid: bool = True
    not_finite: bool = True
    own_equality: bool = False


EVERY_TYPE = TargetTypes()
"""A destination with all of Arrow's types."""


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """A column.

    Attributes:
        name: Its name.
        type: What its values are.
        source_type: Its type in the source; None for a field that a processor added.
    """

    name: str
    type: ValueType
    source_type: str | None = None

    @property
    def field(self) -> pa.Field[Any]:
        """The column in Arrow; every one may be null, because images may lack values."""
        metadata = None if self.source_type is None else {SOURCE_TYPE: self.source_type.encode()}
        return pa.field(self.name, arrow_type(self.type), metadata=metadata)


@dataclass(frozen=True, slots=True)
class TypedSchema:
    """The columns of a table version.

    Attributes:
        columns: In the table's order, then declared fields that it does not have.
        marks_unchanged: Whether `{"_unchanged":true}` in an image says that it lacks the value.
    """

    columns: tuple[TypedColumn, ...]
    marks_unchanged: bool = False

    @property
    def arrow(self) -> pa.Schema:
        """The schema in Arrow."""
        return pa.schema([column.field for column in self.columns])

    def with_added(self, names: Iterable[str]) -> Self:
        """Return the schema with more fields, which are text, after the others."""
        return replace(self, columns=(*self.columns, *(TypedColumn(name, TEXT) for name in names)))


def typed_schema(
    table: TableSchema,
    kind: SourceType[Any],
    engine: Engine,
    declared: Mapping[str, ValueType] | None = None,
    target: TargetTypes = EVERY_TYPE,
) -> TypedSchema:
    """Return the columns that rows of a table version have, as they are delivered.

    The result depends only on the arguments, so a column has the same type in every batch and run.

    Args:
        table: The version as it is registered: without excluded columns, with hashed and masked
            ones as text.
        kind: The kind of source that it is of.
        engine: `spec.engine` of the file.
        declared: Types that the file declares for this table, by column. They may name fields that
            a processor adds.
        target: What the destination's columns can be.

    Raises:
        SourceMisconfigured: A column rule would exclude, mask or truncate a key column.
    """
    wanted = dict(declared or {})
    rules = ColumnRules(engine.columns).of(table)
    columns = []
    for number, column in enumerate(table.columns):
        value_type = kind.value_type(column, engine.values)
        if (
            rules is not None
            and rules[number].action == TRUNCATE
            and value_type.kind not in _TRUNCATABLE
        ):
            value_type = TEXT
        type_ = fitted(wanted.pop(column.name, value_type), target)
        columns.append(TypedColumn(column.name, type_, column.data_type))
    columns += [TypedColumn(name, fitted(type_, target)) for name, type_ in wanted.items()]
    return TypedSchema(tuple(columns), kind.marks_unchanged)


def fitted(type_: ValueType, target: TargetTypes) -> ValueType:
    """Return the type that holds the same values in a destination."""
    match type_.kind:
        case "integer" if not (type_.signed or target.unsigned):
            return _SIGNED[type_.bits]
        case "time" if not target.time:
            return TEXT
        case "uuid" if not target.uuid:
            return TEXT
        case "float" if not target.not_finite:
            return replace(type_, form="finite")
        case "list":
            assert type_.element is not None
            return list_of(fitted(type_.element, target))
        case _:
            return type_


def arrow_type(type_: ValueType) -> pa.DataType:
    """Return the type of Arrow's arrays of such values."""
    match type_.kind:
        case "integer":
            return _INTEGERS[type_.bits, type_.signed]
        case "float":
            return FLOATS[type_.bits]
        case "decimal":
            return pa.decimal128(type_.precision, type_.scale)
        case "timestamp":
            return pa.timestamp("us", "UTC" if type_.zone else None)
        case "list":
            assert type_.element is not None
            return pa.list_(arrow_type(type_.element))
        case _:
            return _SCALARS[type_.kind]
