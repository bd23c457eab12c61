"""At every segment's end the replayed changes are a state that the source has committed."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.capturing import CapturingBench, Stage
from tests.sources.mysql.bench import MysqlBench
from tests.sources.postgres.bench import PostgresBench

ACCOUNTS = 40
EACH = 1000
TRANSFERS = 60
DONE = 1_000_000


@pytest.fixture(
    params=[
        pytest.param((PostgresBench, "postgres_dsn"), marks=pytest.mark.postgres, id="postgres"),
        pytest.param((MysqlBench, "mysql_dsn"), marks=pytest.mark.mysql, id="mysql"),
    ]
)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A pipeline that captures `orders` and `items`: accounts in two tables."""
    kind, dsn = request.param
    store = StateStore.open(f"sqlite:///{tmp_path / 'state.db'}")
    try:
        with kind(request.getfixturevalue(dsn)) as bench:
            yield Stage(bench, store, tmp_path / "journal", knows_tables=True)
    finally:
        store.close()


def move(bench: CapturingBench, seed: int) -> None:
    """Move money between accounts of both tables, in transactions of one to many changes."""
    chance = random.Random(seed)
    for number in range(TRANSFERS):
        statements = []
        for _ in range(chance.choice([1, 1, 2, 3, 150])):
            amount = chance.randrange(1, 50)
            for sign in ("-", "+"):
                table = chance.choice(["orders", "items"])
                account = chance.randrange(ACCOUNTS)
                statements.append(
                    f"UPDATE {table} SET v = CONCAT(CAST(v AS DECIMAL) {sign} {amount}, '')"
                    f" WHERE id = {account}"
                )
        if chance.random() < 0.2:
            table = chance.choice(["orders", "items"])
            statements.insert(0, f"INSERT INTO {table} VALUES ({1000 + number}, '0')")
        bench.execute(*statements)
    bench.execute(f"INSERT INTO orders VALUES ({DONE}, '0')")


def total(state: dict[tuple[str, int], int]) -> int:
    """Return what all accounts have together."""
    return sum(state.values())


def test_every_segment_ends_with_a_committed_state(stage: Stage) -> None:
    """Money is neither made nor lost at any segment's end, whatever transactions it was cut between."""
    accounts = ", ".join(f"({number}, '{EACH}')" for number in range(ACCOUNTS))
    stage.bench.execute(
        *(f"INSERT INTO {table} VALUES {accounts}" for table in ("orders", "items"))
    )
    stage.capture(lambda _: len(stage.rows()) == 2 * ACCOUNTS)  # waits for the compiler, too
    worker = threading.Thread(target=move, args=(stage.bench, 5))
    worker.start()
    stage.capture(
        lambda _: any(row["key"] == f'{{"id":{DONE}}}' for row in stage.newest()),
        SegmentLimits(min_ms=0, max_ms=100, max_events=50),
    )
    worker.join()

    state: dict[tuple[str, int], int] = {}
    segments = stage.store.segments.read("p")
    broken_inside = 0
    for segment in segments:
        rows: list[dict[str, Any]] = []
        for batch in stage.journal.batches(segment):
            rows += batch.to_pylist()
        assert rows[-1]["tx_end"]
        for row in rows:
            after = json.loads(row["after"])
            state[row["table"], after["id"]] = int(after["v"])
            broken_inside += total(state) != 2 * ACCOUNTS * EACH
        assert total(state) == 2 * ACCOUNTS * EACH, f"at the end of segment {segment.segment}"
    assert len(segments) > 3
    assert broken_inside > 100  # the workload would show a cut inside of a transaction
