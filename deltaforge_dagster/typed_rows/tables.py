"""A change frame as tables: its rows by table version, each version with its own columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.typed_rows.schema import TypedSchema
from deltaforge_dagster.typed_rows.tables import TypedRows, typed_rows

_VERSION = ("db", "schema", "table", "schema_version")
_IMAGES = ("after", "before", "key")
"""In order of preference: the first image that a change has is its row."""


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
