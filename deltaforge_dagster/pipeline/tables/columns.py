"""The columns of a table in a commit, whose rows may have several versions of the table.

The rows are added to the table together, so they get the columns of all versions (`union`), each
with a type that represents the values of all versions exactly. A column may have another name in
each version; in the commit it has the name that it has in the last one (`commit_columns`,
`RowNames`).

Of columns that were added or changed their type, `added_columns` finds what older rows have in
them, as far as known: a source may say which value it gave existing rows in an added column.

Columns that a row lacks are a column of names (`df_absent`), or a mask per column.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.errors import CorruptLog, TableRejected
from deltaforge_dagster.kernels.message_text import Mask
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sinks.tables.writer import uncertain_column
from deltaforge_dagster.sources.registry import SourceType, parse_position
from deltaforge_dagster.sources.value_types import MAX_DIGITS, ValueType, list_of
from deltaforge_dagster.state.identities import dropped_name, is_certain
from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
from deltaforge_dagster.tables import Column
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_dagster.typed_rows.tables import TypedRows, typed_rows

_TIMES = {"time", "timestamp"}
_DIGITS = re.compile(r"\((\d)\)")
_PADDED = re.compile(r"(character|char|binary)\(\d+\)")
_FLOAT_DIGITS = {32: 7, 64: 15}
"""Number of decimal digits of integers that a float of so many bits represents exactly."""

ABSENT_NAMES = pa.list_(pa.string())
"""The type of `df_absent`."""


def union(versions: Sequence[TypedSchema], table: str) -> TypedSchema:
    """Return the columns of the newest version, then those that only older versions have.

    Args:
        versions: The versions, oldest first; at least one.
        table: The name of the table, for errors.

    Raises:
        TableRejected: No type holds the values of a column in all versions.
    """
    *older, newest = versions
    columns = {column.name: column for column in newest.columns}
    for version in reversed(older):
        for column in version.columns:
            newer = columns.setdefault(column.name, column)
            type_ = wider(newer.type, column.type)
            if type_ is None:
                raise TableRejected(
                    f"table {table}: column {column.name} was {column.type.name} and became "
                    f"{newer.type.name}, and no type holds the values of both. Load "
                    f"the table again; if this happens often, declare the column as text under "
                    f"`types` before"
                )
            columns[column.name] = replace(newer, type=type_)
    return replace(newest, columns=tuple(columns.values()))


def wider(left: ValueType, right: ValueType) -> ValueType | None:
    """Return the type that represents the values of both types; None if there is none."""
    if left == right:
        return left
    match left.kind, right.kind:
        case ("integer", "integer") | ("float", "float") if replace(left, bits=right.bits) == right:
            return max(left, right, key=lambda type_: type_.bits)
        case ("decimal", "decimal"):
            return _wider_decimal(left, right)
        case ("list", "list"):
            assert left.element is not None
            assert right.element is not None
            element = wider(left.element, right.element)
            return None if element is None else list_of(element)
        case _:
            # A type in a special form also reads values in the plain form, so it represents both.
            # Geometries have no plain form.
            pairs = ((left, right), (right, left))
            return next((a for a, b in pairs if replace(a, form="plain") == b), None)


def keeps_values(old: Column, new: Column, kind: SourceType[Any], options: ValueOptions) -> bool:
    """Return whether a column's values certainly stay the same when the source changes its type.

    Otherwise the source may have converted existing values: rounded a number, truncated a time, or
    computed another value (`ALTER TABLE ... USING`). Values of a text type that became shorter
    count as kept: values that are too long are refused.
    """
    if old.data_type == new.data_type:
        return True
    if any(_PADDED.fullmatch(column.data_type) for column in (old, new)):
        return False
    before, after = kind.value_type(old, options), kind.value_type(new, options)
    if before.kind in _TIMES and before.kind == after.kind:
        digits = [_second_digits(column.data_type, kind) for column in (old, new)]
        return before.zone == after.zone and digits[0] <= digits[1]
    if before.kind == "integer" and after.kind in {"decimal", "float"}:
        whole = (
            after.precision - after.scale if after.kind == "decimal" else _FLOAT_DIGITS[after.bits]
        )
        return whole >= len(str(2**before.bits))
    return after.kind == "text" or wider(before, after) == after


@dataclass(frozen=True, slots=True)
class CommitColumns:
    """The columns of a table of the source in a commit.

    Attributes:
        identities: By name in the commit, what identifies the column (`state.identities`).
        rows: By fingerprint of a table version, the names in its rows.
    """

    identities: Mapping[str, str]
    rows: Mapping[str, RowNames]

    def missing(self, versions: Iterable[Mapping[str, str]]) -> frozenset[str]:
        """Return the names of columns that none of these versions has.

        Each version is given as what identifies its columns, by name.
        """
        had = {identity for version in versions for identity in version.values()}
        return frozenset(name for name, identity in self.identities.items() if identity not in had)


def commit_columns(
    versions: Sequence[tuple[str, Mapping[str, str]]], history: Sequence[Mapping[str, str]]
) -> CommitColumns:
    """Return the names of a table's columns in a commit: each has its last name.

    If another column has had that name since, a dropped column gets a name of its own
    (`dropped_name`).

    Args:
        versions: The table versions of the rows, in the order of their last rows: fingerprint, and
            by name of a column what identifies it.
        history: For all versions up to the last of these, in order: what identifies the columns, by
            name.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for own in reversed(history):
        for name, identity in own.items():
            if identity not in names:
                names[identity] = dropped_name(identity) if name in taken else name
        taken.update(own)
    rows: dict[str, RowNames] = {}
    identities: dict[str, str] = {}
    for fingerprint, own in versions:
        former = {
            names[column_id]: name for name, column_id in own.items() if names[column_id] != name
        }
        rows[fingerprint] = RowNames(former) if former else SAME_NAMES
        identities |= {names[column_id]: column_id for column_id in own.values()}
    return CommitColumns(identities, rows)


def check_certain(versions: Sequence[Mapping[str, str]], table: str, command: str) -> None:
    """Reject a table if it is not certain which columns of its versions are the same column.

    Args:
        versions: By name of a column what identifies it, of each version that rows of the commit
            have.
        table: Name of the table, for the message.
        command: The command that has it loaded again.

    Raises:
        TableRejected: It is not certain.
    """
    for own in versions:
        for name, identity in own.items():
            if not is_certain(identity) and any(
                identity not in version.values() for version in versions
            ):
                raise uncertain_column(table, name, command)


@dataclass(frozen=True, slots=True)
class RowNames:
    """The names of columns in rows of one table version.

    Attributes:
        former: By name in the commit the name in these rows; only columns whose names differ.
    """

    former: Mapping[str, str]

    @property
    def hidden(self) -> frozenset[str]:
        """Names in these rows that, in the commit, can only name columns that the rows lack."""
        return frozenset(self.former.values()) - self.former.keys()

    def declared(self, types: Mapping[str, ValueType]) -> Mapping[str, ValueType]:
        """Return declared types, given by name in the commit, by name in these rows."""
        return {
            self.former.get(name, name): type_
            for name, type_ in types.items()
            if name not in self.hidden
        }

    def of_commit(self, schema: TypedSchema) -> TypedSchema:
        """Return columns of these rows with their names in the commit."""
        return replace(schema, columns=tuple(map(self._named, schema.columns)))

    def of_rows(self, schema: TypedSchema) -> TypedSchema:
        """Return the commit's columns, without `hidden` ones, under their names in these rows."""
        columns = (
            replace(column, name=self.former.get(column.name, column.name))
            for column in schema.columns
            if column.name not in self.hidden
        )
        return replace(schema, columns=tuple(columns))

    def renamed(self, rows: TypedRows, schema: TypedSchema) -> TypedRows:
        """Return rows, of `of_rows(schema)` and then added fields, with the names in the commit.

        Raises:
            TableRejected: An added field has the name of another column.
        """
        names = {column.name for column in schema.columns}
        asked = len(schema.columns) - len(self.hidden & names)
        added = rows.schema.columns[asked:]
        for column in added:
            if column.name in names:
                raise TableRejected(
                    f"a processor adds the field {column.name}, and a column of the source has "
                    "been given this name since; let the processor use another one"
                )
        columns = [*map(self._named, rows.schema.columns[:asked]), *added]
        values = {
            column.name: values for column, values in zip(columns, rows.batch.columns, strict=True)
        }
        whole = replace(schema, columns=(*schema.columns, *added))
        arrays = [
            values[field.name] if field.name in values else pa.nulls(len(rows.batch), field.type)
            for field in whole.arrow
        ]
        current_names = self._commit_names
        return replace(
            rows,
            schema=whole,
            batch=pa.RecordBatch.from_arrays(arrays, schema=whole.arrow),
            present={current_names.get(name, name): mask for name, mask in rows.present.items()},
            misfits=tuple(
                replace(misfit, column=current_names.get(misfit.column, misfit.column))
                if misfit.column is not None
                else misfit
                for misfit in rows.misfits
            ),
        )

    def _named(self, column: TypedColumn) -> TypedColumn:
        return replace(column, name=self._commit_names.get(column.name, column.name))

    @property
    def _commit_names(self) -> Mapping[str, str]:
        return {former: name for name, former in self.former.items()}


SAME_NAMES = RowNames({})
"""The names of rows whose columns have the same names as in the commit."""


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


def absent_names(masks: Mapping[str, Mask], rows: int) -> pa.Array[Any]:
    """Return for each row the names of the columns that it lacks; null if there are none.

    Args:
        masks: By the name of a column, which rows lack it.
        rows: Number of rows.
    """
    lacking = {name: mask for name, mask in masks.items() if mask.any()}
    if not lacking:
        return pa.nulls(rows, ABSENT_NAMES)
    table = np.column_stack(list(lacking.values()))
    counts = table.sum(axis=1)
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    names = pa.array(list(lacking)).take(np.nonzero(table)[1])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), names, mask=pa.array(counts == 0))


def absent_masks(names: pa.Array[Any]) -> dict[str, Mask]:
    """Return a mask of the rows that lack it for each column that some rows lack."""
    if names.null_count == len(names):
        return {}
    assert isinstance(names, pa.ListArray)
    encoded = names.flatten().dictionary_encode()
    codes = encoded.indices.to_numpy()
    rows = np.repeat(np.arange(len(names)), names.value_lengths().fill_null(0).to_numpy())
    masks = {}
    for code, name in enumerate(cast("list[str]", encoded.dictionary.to_pylist())):
        masks[name] = np.zeros(len(names), np.bool_)
        masks[name][rows[codes == code]] = True
    return masks


def _second_digits(data_type: str, kind: SourceType[Any]) -> int:
    digits = _DIGITS.search(data_type)
    return kind.second_digits if digits is None else int(digits[1])


def _wider_decimal(left: ValueType, right: ValueType) -> ValueType | None:
    scale = max(left.scale, right.scale)
    digits = max(left.precision - left.scale, right.precision - right.scale) + scale
    return None if digits > MAX_DIGITS else replace(left, precision=digits, scale=scale)


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
