"""What names a change of PostgreSQL for its event id: commit LSN, xid, index in the transaction."""

# ruff: noqa: PLR0917 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
from deltaforge_dagster.sources.postgres.decode.layout import (
    ROW_INDEX,
    ROW_TX,
    TX_FINAL_LSN,
    TX_ID_US,
    TX_XID,
)
from deltaforge_dagster.sources.rows.event_ids import mix_a, mix_b, write_event_id


@kernel
def write_event_ids(
    rows: Longs, first: int, last: int, txs: Longs, seed: npt.NDArray[np.uint64], out: Bytes
) -> None:
    """Write the ids of `rows[first:last]`, 36 bytes each, one after the other, from the start."""
    at = 0
    for row in range(first, last):
        tx = rows[row, ROW_TX]
        a, b = seed[0], seed[1]
        lsn, xid = np.uint64(txs[tx, TX_FINAL_LSN]), np.uint64(txs[tx, TX_XID])
        index = np.uint64(rows[row, ROW_INDEX])
        a = mix_a(mix_a(mix_a(a ^ lsn) ^ xid) ^ index)
        b = mix_b(mix_b(mix_b(b ^ lsn) ^ xid) ^ index)
        at = write_event_id(txs[tx, TX_ID_US], a, b, out, at)
