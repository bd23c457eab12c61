from __future__ import annotations

import uuid

import numpy as np

from deltaforge_dagster.sources.postgres.decode.layout import (
    ROW_INDEX,
    ROW_TX,
    ROW_WIDTH,
    TX_FINAL_LSN,
    TX_ID_US,
    TX_WIDTH,
    TX_XID,
)
from deltaforge_dagster.sources.postgres.decode.rows import write_event_ids
from deltaforge_dagster.sources.rows.event_ids import ID_SIZE, id_seed


def write_ids(source_id: str, txs: list[tuple[int, int, int]], rows: int) -> list[str]:
    """Return ids of `rows` changes in each transaction (xid, commit LSN, commit time in us)."""
    lines = np.zeros((rows * len(txs), ROW_WIDTH), np.int64)
    lines[:, ROW_TX] = np.repeat(np.arange(len(txs)), rows)
    lines[:, ROW_INDEX] = np.tile(np.arange(rows), len(txs))
    table = np.zeros((len(txs), TX_WIDTH), np.int64)
    table[:, [TX_XID, TX_FINAL_LSN, TX_ID_US]] = txs
    out = np.zeros(len(lines) * ID_SIZE, np.uint8)
    with np.errstate(over="ignore"):
        write_event_ids(lines, 0, len(lines), table, id_seed(source_id), out)
    text = out.tobytes().decode()
    return [text[at : at + ID_SIZE] for at in range(0, len(text), ID_SIZE)]


def test_ids_are_uuids_of_version_7() -> None:
    """An id is a version 7 UUID in canonical form, whose time is that of the commit."""
    for text in write_ids("s", [(7, 1050, 1_700_000_000_123_456)], 50):
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert parsed.int >> 80 == 1_700_000_000_123


def test_ids_are_what_they_were() -> None:
    """The ids of a change never change, from release to release: replays depend on it."""
    assert write_ids("orders-db", [(731, 0x16B_6C50, 1_700_000_000_000_000)], 2) == [
        "018bcfe5-6800-73c4-9720-f7529997c27b",
        "018bcfe5-6800-764b-b8ef-ab24f0db3d9a",
    ]


def test_ids_differ() -> None:
    """Neighbouring changes, transactions, positions and sources have different ids."""
    txs = [(xid, lsn, 0) for xid in range(20) for lsn in range(20)]
    ids = [text for source in ("a", "b") for text in write_ids(source, txs, 100)]

    assert len(set(ids)) == 2 * 20 * 20 * 100
    low = {uuid.UUID(text).int & (1 << 62) - 1 for text in ids}
    assert len(low) == len(ids)
