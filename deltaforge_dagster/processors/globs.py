"""Which rows of a batch are of tables that patterns name: `shop.*`, `*.orders`, `order_%`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.processors.text import Mask
from deltaforge_dagster.sources.kernel import Longs


def tables(frame: pa.RecordBatch) -> tuple[list[tuple[str, ...]], Longs]:
    """Return the names that each table of a batch goes by, and for each row which table it is.

    A table goes by `db.table` and, where there is a schema, by `schema.table`.
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
    """Say which rows are of tables that are included, all if there is no pattern, and not excluded."""
    names, numbers = tables(frame)
    good = [(not include or include.match(one)) and not exclude.match(one) for one in names]
    return np.array(good, np.bool_)[numbers]
