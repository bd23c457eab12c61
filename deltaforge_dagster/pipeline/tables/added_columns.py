"""Finds what older rows have in columns that were added or changed their type, as far as known.

A source may say which value it gave existing rows in an added column.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
from deltaforge_dagster.tables import Column
from deltaforge_dagster.typed_rows.schema import TypedSchema
from deltaforge_dagster.typed_rows.tables import typed_rows


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """Columns of a commit that earlier table versions did not have, or had with another type.

    Attributes:
        fills: By column name, the value that rows which existed before the column have in it: of
            the column's type, never null.
        texts: The same values as text that a cast to the column's type reads at every sink.
        unfilled: Columns that were added, or changed their type, within the commit, and whose
            values in rows that existed before are not known.
    """

    fills: Mapping[str, pa.Scalar[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    unfilled: frozenset[str] = frozenset()


def added_columns(
    history: TableHistory,
    newest: SchemaVersion,
    identities: Mapping[str, str],
    schema: TypedSchema,
    start: Position,
    *,
    keeps_values: Callable[[Column, Column], bool],
    processed: bool,
) -> AddedColumns:
    """Return the columns of a commit that were added to a table, or changed their type.

    Args:
        history: The versions of the table.
        newest: The last table version of the commit's rows.
        identities: What identifies the columns of the commit, by name.
        schema: The columns of the commit.
        start: Where the commit begins in the log.
        keeps_values: Whether a column's values certainly stay the same when its type changes, given
            the old and the new column.
        processed: Whether processors may have changed values: then no value is known.
    """
    stated = {
        version.columns.identities[name]: (fill, version.position)
        for version in reversed(history.versions)
        for name, fill in version.columns.fills.items()
    }
    fills: dict[str, pa.Scalar[Any]] = {}
    texts: dict[str, str] = {}
    unfilled: set[str] = set()
    for name, identity in identities.items():
        fill, position = stated.get(identity, ("null", ""))
        if fill == "null":
            continue
        value = None if fill is None or processed else _typed(name, fill, schema)
        text = None if value is None else _text(value)
        if value is not None and text is not None:
            fills[name], texts[name] = value, text
        elif start < _position(position):
            unfilled.add(name)
    converted = _converted(history.passage(newest), start, keeps_values)
    unfilled |= {name for name, identity in identities.items() if identity in converted}
    return AddedColumns(fills, texts, frozenset(unfilled))


def _converted(
    passage: Sequence[tuple[str | None, SchemaVersion]],
    start: Position,
    keeps_values: Callable[[Column, Column], bool],
) -> set[str]:
    """Return the identities of columns whose values may have been converted after a position."""
    converted: set[str] = set()
    columns: dict[str, Column] = {}
    for begin, version in passage:
        is_later = begin is not None and start < _position(begin)
        identities = version.columns.identities
        for column in version.table.columns:
            identity = identities[column.name]
            before = columns.get(identity, column)
            columns[identity] = column
            if is_later and not keeps_values(before, column):
                converted.add(identity)
    return converted


def _text(value: pa.Scalar[Any]) -> str | None:
    """Return a value as text; None for types whose text differs between systems."""
    try:
        native = value.as_py()
    except (ValueError, OverflowError):  # a time that Python does not have
        return None
    text: str | None = None
    match native:
        case bool():
            text = str(native).lower()
        case int() | str() | Decimal():
            text = str(native)
        case float() if math.isfinite(native):
            text = repr(native)
        case dt.datetime():
            text = native.isoformat(sep=" ")
        case dt.date() | dt.time():
            text = native.isoformat()
    return text


def _position(text: str) -> Position:
    position: Position = parse_position(text)
    return position


def _typed(name: str, fill: str, schema: TypedSchema) -> pa.Scalar[Any] | None:
    """Return a JSON value with the type of a column; None if it does not fit."""
    columns = tuple(column for column in schema.columns if column.name == name)
    column_schema = TypedSchema(columns, schema.marks_unchanged)
    image = f"{{{orjson.dumps(name).decode()}:{fill}}}"
    try:
        rows = typed_rows(pa.array([image]), column_schema, other_fields=False)
    except CorruptLog:
        return None
    value = rows.batch.column(name)[0]
    return None if rows.misfits or not value.is_valid else value
