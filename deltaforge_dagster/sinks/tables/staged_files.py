"""Reads the files of staged steps, for writers that send the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.journal.storage import open_located
from deltaforge_dagster.sinks.tables.staged import StagedStep

BATCH_ROWS = 16_384
"""Maximum number of rows of a batch."""


def staged_batches(step: StagedStep, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a step in batches with these columns; columns a file lacks are null.

    Args:
        step: The step.
        schema: The columns, with their types.

    Raises:
        StoreUnavailable: A file is gone or cannot be read; the commit must be staged again.
    """
    for name in step.files:
        try:
            with open_located(name) as file, pq.ParquetFile(cast("pa.NativeFile", file)) as parquet:
                names = [column for column in schema.names if column in parquet.schema_arrow.names]
                for batch in parquet.iter_batches(BATCH_ROWS, columns=names):
                    yield _completed(batch, schema)
        except (OSError, pa.ArrowException, JournalDamaged) as error:
            raise StoreUnavailable(f"the staged file {name} cannot be read") from error


def lacking(absent: pa.Array[Any], name: str) -> npt.NDArray[np.bool_]:
    """Return which rows lack a column, given their `df_absent`."""
    mask = np.zeros(len(absent), np.bool_)
    if absent.null_count < len(absent):
        rows = pc.list_parent_indices(absent).to_numpy()
        names = cast("pa.Array[Any]", pc.list_flatten(absent))
        mask[rows[pc.equal(names, pa.scalar(name)).to_numpy(zero_copy_only=False)]] = True
    return mask


def _completed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with all columns of a schema, in its order and with its types."""
    columns: list[pa.Array[Any]] = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, names=schema.names)
