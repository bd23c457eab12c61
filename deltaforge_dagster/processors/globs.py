"""Select the rows of a batch whose tables match patterns: `shop.*`, `*.orders`, `order_%`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.kernels.message_text import Mask
from deltaforge_dagster.kernels.runtime import Longs


def tables(frame: pa.RecordBatch) -> tuple[list[tuple[str, ...]], Longs]:
    """Return the names of each table of a batch, and for each row the index of its table.

    A table has the name `db.table` and, if it has a schema, also `schema.table`.
    """
    columns = [frame.column(one) for one in ("db", "schema", "table")]
    code = np.zeros(frame.num_rows, np.int64)
    for column in columns:
        assert isinstance(column, pa.DictionaryArray)
        code = code * (len(column.dictionary) + 1)
        code += column.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    _, firsts, numbers = np.unique(code, return_index=True, return_inverse=True)
    found: list[tuple[str, ...]] = []
    for row in firsts.tolist():
        db, schema, table = (one[row].as_py() for one in columns)
        full = (f"{db}.{table}",) if schema is None else (f"{schema}.{table}", f"{db}.{table}")
        found.append(full)
    return found, numbers


def chosen(frame: pa.RecordBatch, include: Globs, exclude: Globs) -> Mask:
    """Return a mask of the rows whose tables are included, or all without a pattern, and not excluded."""
    names, numbers = tables(frame)
    good = [(not include or include.match(one)) and not exclude.match(one) for one in names]
    return np.array(good, np.bool_)[numbers]
