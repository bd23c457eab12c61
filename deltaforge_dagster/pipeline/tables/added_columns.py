"""What older rows have in columns that were added, or that got another type: what the source says it gave them, if it does.

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
from deltaforge_dagster.typed_rows.rows import typed_rows
from deltaforge_dagster.typed_rows.schema import TypedSchema


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """Columns of a commit that earlier versions of the table did not have, or had with another type.

    Attributes:
        fills: By name, what rows have in it that were there: a value of the column's type, which is not null.
        texts: The same as text, which a cast to the column's type reads everywhere.
        unfilled: Those that were added within the commit, or got another type, and what rows have in them that were there is
            not known.
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
    """Return the columns of a commit that were added to a table, or got another type.

    Args:
        history: The versions of the table.
        newest: The last version that the commit has.
        identities: What identifies the columns of the commit, by name.
        schema: The columns of the commit.
        start: Where the commit begins in the log.
        keeps_values: Whether a column's values certainly stay what they are when it gets another type.
        processed: Whether processors may have changed values on their way: then no value is known.
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
    """Return the identities of columns whose values the source may have converted after a position of the log."""
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
    """Return a value as text; None for types without a text that is the same everywhere."""
    try:
        found = value.as_py()
    except (ValueError, OverflowError):  # a time that Python does not have
        return None
    text: str | None = None
    match found:
        case bool():
            text = str(found).lower()
        case int() | str() | Decimal():
            text = str(found)
        case float() if math.isfinite(found):
            text = repr(found)
        case dt.datetime():
            text = found.isoformat(sep=" ")
        case dt.date() | dt.time():
            text = found.isoformat()
    return text


def _position(text: str) -> Position:
    position: Position = parse_position(text)
    return position


def _typed(name: str, fill: str, schema: TypedSchema) -> pa.Scalar[Any] | None:
    """Return a value of JSON as a column has it; None if it does not fit."""
    columns = tuple(column for column in schema.columns if column.name == name)
    one = TypedSchema(columns, schema.marks_unchanged)
    image = f"{{{orjson.dumps(name).decode()}:{fill}}}"
    try:
        rows = typed_rows(pa.array([image]), one, other_fields=False)
    except CorruptLog:
        return None
    value = rows.batch.column(name)[0]
    return None if rows.misfits or not value.is_valid else value
