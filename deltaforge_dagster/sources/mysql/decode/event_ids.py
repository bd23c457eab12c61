"""What names a change of MySQL for its event id: its GTID and its index in the transaction.

A tag belongs to the GTID. Without a GTID it is where the transaction begins: the file's name and the position in it. So ids
are the same on every server of a replication group, unless it works without GTIDs.
"""

# ruff: noqa: PLR0917 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
from deltaforge_dagster.sources.mysql.decode.layout import (
    ROW_INDEX,
    ROW_TX,
    TX_A,
    TX_B,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
)
from deltaforge_dagster.sources.rows.event_ids import mix_a, mix_b, write_event_id


@kernel
def write_event_ids(
    rows: Longs, first: int, last: int, txs: Longs, seed: npt.NDArray[np.uint64], out: Bytes
) -> None:
    """Write the ids of `rows[first:last]`, 36 bytes each, one after the other, from the start."""
    at = 0
    tx = -1
    tx_a, tx_b = seed[0], seed[1]
    for row in range(first, last):
        if rows[row, ROW_TX] != tx:
            tx = rows[row, ROW_TX]
            tx_a, tx_b = seed[0], seed[1]
            for column in (TX_A, TX_B, TX_NUMBER):
                number = np.uint64(txs[tx, column])
                tx_a, tx_b = mix_a(tx_a ^ number), mix_b(tx_b ^ number)
            if txs[tx, TX_TAG] != 0:
                number = np.uint64(txs[tx, TX_TAG])
                tx_a, tx_b = mix_a(tx_a ^ number), mix_b(tx_b ^ number)
        index = np.uint64(rows[row, ROW_INDEX])
        a, b = mix_a(tx_a ^ index), mix_b(tx_b ^ index)
        at = write_event_id(txs[tx, TX_TS_US], a, b, out, at)
