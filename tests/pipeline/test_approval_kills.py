"""Runs that are killed while tables wait for approval, or while they are released."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.approving import LOG


def run(folder: Path, *failpoints: str) -> None:
    """Let runs work that are killed at these steps, then one that has everything."""
    command = [sys.executable, "-m", "tests.pipeline.approving", str(folder), *failpoints, "-"]
    subprocess.run(command, check=True)


def rows(store: StateStore, folder: Path) -> list[dict[str, Any]]:
    """Return the journal's rows, in order."""
    journal = Journal(f"file://{folder}/journal")
    found: list[dict[str, Any]] = []
    for segment in store.segments.read("p"):
        journal.verify(segment)
        for batch in journal.batches(segment):
            found += batch.to_pylist()
    return found


def of(found: list[dict[str, Any]], table: str) -> list[int]:
    """Return the ids of a table's rows."""
    return [row["pos"] for row in found if row["table"] == table]


def expected(table: str) -> list[int]:
    """Return the ids that the log has of a table."""
    return [one for transaction in LOG for one, name, _ in transaction if name == table]


def test_killed_runs_lose_nothing_and_keep_the_order(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """Killed with held files written, their rows written, and twice while what waited comes.

    Each table's rows come once and in the log's order; the committed position stays before what waits.
    """
    store = sqlite_store
    store.pipelines.register("p", "hash", ["s"])
    store.pipelines.set_start("p", LsnPosition(0).to_json())

    run(tmp_path, "parked-file-written", "parked-row-written")
    found = rows(store, tmp_path)
    assert of(found, "items") == [2, 5, 7, 10]
    assert of(found, "orders") == [1, 3]
    holds = {hold.subject: hold for hold in store.holds.read("p")}
    assert {name: hold.events for name, hold in holds.items()} == {
        "public.orders": 7,
        "public.items": 2,
    }
    assert holds["public.orders"].since_position == LsnPosition(2).to_json()

    for table, waited in (("public.orders", 7), ("public.items", 2)):
        assert store.holds.approve_table("p", table) == waited
        with pytest.raises(NotAllowed, match="waits for approval"):
            store.holds.approve_table("p", table)
    run(tmp_path, "segment-file-written", "segment-row-written")

    found = rows(store, tmp_path)
    for table in ("orders", "items"):
        assert of(found, table) == expected(table)
    assert all(hold.state == "journaled" for hold in store.holds.read("p"))
    # Each transaction ends once in what came of it at a time.
    ends = {row["pos"] for row in found if row["tx_end"]}
    assert ends == {2, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15}
