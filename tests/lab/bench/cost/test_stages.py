"""Tests of dividing the cost of a run into stages."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.bench.cost.stages import STAGES, StoreClock, stage_seconds
from deltaforge_lab.bench.cost.threads import ThreadUsage

_BURN = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) SELECT sum(i) FROM n"


def test_everything_that_a_run_used_is_in_one_stage() -> None:
    """The store's part is taken out of its threads; what is in no known thread is `other`."""
    threads = [
        ThreadUsage(1, "capture bench", 2.0),
        ThreadUsage(2, "journal-encode_0", 0.5),
        ThreadUsage(3, "journal-hash_0", 0.25),
        ThreadUsage(4, "deliver bench sink", 1.0),
        ThreadUsage(5, "rdk:broker1", 1.5),
        ThreadUsage(6, "encode bench_0", 0.125),
        ThreadUsage(7, "MainThread", 0.5),
    ]

    stages = stage_seconds(threads, {1: 0.5, 4: 0.25, 7: 0.125}, run=8.0, spark=4.0)

    assert stages == {
        "capture": 1.5,
        "journal": 0.75,
        "encode": 4.125,
        "send": 2.25,
        "store": 0.875,
        "other": 2.5,  # the rest of MainThread, and what no reading has seen
    }
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == 12.0


def test_transactions_of_the_store_are_counted_by_thread(tmp_path: Path) -> None:
    """What a thread uses with a connection counts, but not what it does otherwise, or after the end."""
    store = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    spent: dict[str, float] = {}

    def work() -> None:
        began = time.thread_time()
        with store.database.read() as connection:
            connection.execute(text(_BURN))
        spent["store"] = time.thread_time() - began
        while time.thread_time() < began + 2 * spent["store"]:
            pass

    with StoreClock() as clock:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    store.now()
    store.close()

    assert clock.seconds == {thread.native_id: pytest.approx(spent["store"], rel=0.2)}
