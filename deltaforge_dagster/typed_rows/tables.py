"""Row images as tables: an Arrow array per column, what images lack, and what does not fit.

`typed_rows` makes the table of images of one table version, `typed_tables` those of a change frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.message_text import layout, slices
from deltaforge_dagster.kernels.runtime import Bytes, Longs, read_only
from deltaforge_dagster.sources.rows.images import members
from deltaforge_dagster.sources.value_types import parse_value_type
from deltaforge_dagster.typed_rows.cells import (
    ABSENT,
    FITS,
    KNOWN,
    NO_NAME,
    NO_OBJECT,
    REASONS,
    UNKNOWN_MEMBER,
    ColumnCells,
    locate_members,
)
from deltaforge_dagster.typed_rows.columns import typed_column
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema

_WITH_KERNELS = (
    *(
        "boolean",
        "int64",
        "decimal(9,2)",
        "float64",
        "text",
        "binary",
        "uuid",
        "date",
        "time",
        "timestamp",
    ),
    "list<int64>",
)
"""Types whose columns together use every kernel."""

_NOT_A_ROW = {
    NO_OBJECT: "it is not a JSON object",
    NO_NAME: "a field's name has half of a surrogate pair, which is not a character",
}
_VERSION = ("db", "schema", "table", "schema_version")
_IMAGES = ("after", "before", "key")
"""In order of preference: the first image that a change has is its row."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that its column cannot hold.

    Attributes:
        row: Number of its row.
        column: Name of its column; None if the image is no row at all.
        reason: Why, without the value.
    """

    row: int
    column: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Rows whose columns have types.

    Attributes:
        schema: The requested columns, then those of fields that had no column.
        batch: The values. Null stands for null, for a value that the image lacks, and for one that
            does not fit.
        present: For each column that some images lack: which images have it, be it null. Every
            image has all other columns.
        misfits: The values that do not fit, in the order of the rows. Such a row cannot be stored.
    """

    schema: TypedSchema
    batch: pa.RecordBatch
    present: Mapping[str, pa.BooleanArray]
    misfits: Sequence[Misfit]


def typed_rows(
    images: pa.StringArray, schema: TypedSchema, *, other_fields: bool = True
) -> TypedRows:
    """Return row images with types.

    A field that the schema does not have becomes a column of text, after the others, in
    alphabetical order. Finding such fields costs time, so pass the schema of the result with the
    next batch.

    Args:
        images: Row images; null has no columns.
        schema: The columns.
        other_fields: Whether other fields become columns; else they are left out.

    Raises:
        CorruptLog: An image is not valid JSON.
    """
    ends, source = layout(images)
    count = len(images)
    valid = np.ones(count, np.uint8)
    if images.null_count:
        valid[:] = images.is_valid().to_numpy(zero_copy_only=False)
    original, added = schema, set[str]()
    scratch = np.empty(int(np.diff(ends).max(initial=0)), np.uint8)
    while True:
        shape = len(schema.columns), count
        starts, stops = np.empty(shape, np.int32), np.empty(shape, np.int32)
        status, kinds = np.full(shape, ABSENT, np.uint8), np.empty(count, np.uint8)
        unknown_names = np.empty((2, count), np.int32)
        locate_members(
            source,
            ends,
            valid,
            *_names(schema),
            schema.marks_unchanged,
            scratch,
            starts,
            stops,
            status,
            kinds,
            unknown_names[0],
            unknown_names[1],
        )
        if not other_fields:
            kinds[kinds == UNKNOWN_MEMBER] = KNOWN
        rows = np.flatnonzero(kinds == UNKNOWN_MEMBER)
        if not rows.size:
            break
        names = slices(source, unknown_names[0, rows], unknown_names[1, rows])
        fields = _unknown_fields(images, names, rows, schema)
        if not fields:
            raise CorruptLog("a row image is not valid JSON")
        added |= fields
        schema = original.with_added(sorted(added))
    columns: list[pa.Array[Any]] = []
    misfits = [Misfit(row, None, _NOT_A_ROW[kinds[row]]) for row in np.flatnonzero(kinds).tolist()]
    present = {}
    for number, column in enumerate(schema.columns):
        cells = ColumnCells(source, starts[number], stops[number], status[number])
        if column.type.kind == "json":
            cells.find_null_documents()
        columns.append(typed_column(cells, column.type))
        if (cells.status == ABSENT).any():
            present[column.name] = pa.array(cells.status != ABSENT)
        misfits += [
            Misfit(row, column.name, REASONS[int(cells.status[row])])
            for row in np.flatnonzero(cells.status > FITS).tolist()
        ]
    misfits.sort(key=lambda misfit: misfit.row)
    batch = pa.RecordBatch.from_arrays(columns, schema=schema.arrow)
    return TypedRows(schema, batch, present, tuple(misfits))


def _names(schema: TypedSchema) -> tuple[Bytes, Longs]:
    """Return the names of columns, and where each ends, after a 0."""
    names = [column.name.encode() for column in schema.columns]
    return read_only(b"".join(names)), np.cumsum([0, *map(len, names)], dtype=np.int64)


def _unknown_fields(
    images: pa.StringArray, names: pa.StringArray, rows: Longs, schema: TypedSchema
) -> set[str]:
    """Return the names of fields that the schema does not have.

    `names` has the first such field of each image in `rows`. The others are looked for in one image
    for each distinct name.
    """
    columns = {column.name for column in schema.columns}
    samples = dict(zip(names.to_pylist(), rows.tolist(), strict=True))
    fields = {json.loads(name) for row in samples.values() for name in members(images[row].as_py())}
    return fields - columns


def warm() -> None:
    """Compile every kernel, or load it from the cache: read a row with a column of each type."""
    columns = tuple(TypedColumn(name, parse_value_type(name)) for name in _WITH_KERNELS)
    values = ",".join(f'"{column.name}":1' for column in columns)
    typed_rows(pa.array([f"{{{values}}}"]), TypedSchema(columns))


@dataclass(frozen=True, slots=True)
class VersionName:
    """Which version of a table rows are of.

    `schema_version` is None for rows that only a processor knows.
    """

    db: str
    schema: str | None
    table: str
    schema_version: str | None


@dataclass(frozen=True, slots=True)
class TypedTable:
    """The rows of one table version in a change frame.

    Attributes:
        version: The version.
        places: Where the rows are in the frame, in its order.
        rows: The rows; those of a delete are what was deleted, or its key only.
    """

    version: VersionName
    places: npt.NDArray[np.int64]
    rows: TypedRows


SchemaOf: TypeAlias = Callable[[VersionName], TypedSchema]


def typed_tables(frame: pa.RecordBatch, schema_of: SchemaOf) -> Iterator[TypedTable]:
    """Yield the rows of a change frame, or of processed changes, by table version.

    Versions come in the order of their first rows. The row of a change is its image after the
    change, or, for a delete, the one before it; without either, it is the key, and all other
    columns are absent. Events without rows (truncates and schema changes) are in no table.

    Args:
        frame: The changes.
        schema_of: Returns the columns of a version.

    Raises:
        CorruptLog: An image is not valid JSON.
    """
    images = cast("pa.StringArray", pc.coalesce(*(frame.column(name) for name in _IMAGES)))
    has_row = images.is_valid().to_numpy(zero_copy_only=False)
    for version, rows in table_versions(frame, has_row):
        of_version = (
            images if len(rows) == frame.num_rows else images.take(pa.array(rows, pa.int64()))
        )
        yield TypedTable(version, rows, typed_rows(of_version, schema_of(version)))


def table_versions(
    frame: pa.RecordBatch, chosen: npt.NDArray[np.bool_]
) -> Iterator[tuple[VersionName, npt.NDArray[np.int64]]]:
    """Yield the table versions of the chosen rows of a change frame, each with its row numbers.

    Versions come in the order of their first rows.
    """
    codes = np.zeros(frame.num_rows, np.int64)
    for name in _VERSION:
        column = frame.column(name)
        if not isinstance(column, pa.DictionaryArray):
            column = column.dictionary_encode()
        indices = column.indices.fill_null(len(column.dictionary)).to_numpy()
        if len(indices) and (indices != indices[0]).any():
            codes = codes * (len(column.dictionary) + 1) + indices
            codes = np.unique(codes, return_inverse=True)[1]
    if chosen.all() and not codes.any() and frame.num_rows:
        yield _version(frame, 0), np.arange(frame.num_rows)
        return
    codes[~chosen] = -1
    distinct, first = np.unique(codes, return_index=True)
    for code in distinct[np.argsort(first)]:
        if code >= 0:
            rows = np.flatnonzero(codes == code)
            yield _version(frame, int(rows[0])), rows


def _version(frame: pa.RecordBatch, row: int) -> VersionName:
    return VersionName(*(cast("Any", frame.column(name)[row].as_py()) for name in _VERSION))
