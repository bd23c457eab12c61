"""A disk that is full: what stops says so, nothing half is left, and everything goes on afterwards."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import event

from deltaforge_dagster.errors import StoreUnavailable
from deltaforge_dagster.pipeline.encode.files import SLICES, reported, write_partition
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import opened_feed

__all__ = ["shop"]

ROWS = 60_000
LIMIT = 8 << 20
"""Below the segment's size, since event ids do not compress; above that of anything else written."""


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Limit the size of any file that this process writes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size < 0 else size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.redis
def test_a_full_journal(
    shop: Shop,
    spark_server: SparkAddress,
    tmp_path: Path,
    file_size_limit: Callable[[int], None],
) -> None:
    """The run names disk and file, and captures nothing half; with room again every row arrives, once."""
    text = shop.pipeline("full", tables="[public.customers]", run="{idle_seconds: 1}")
    with opened_feed(shop, tmp_path / "full.yaml", text, spark_server) as feed:
        shop.execute(
            "INSERT INTO customers SELECT n, md5(n::text) || md5((-n)::text) || md5((n * 7)::text)"
            f" FROM generate_series(1, {ROWS}) n"
        )
        before = feed.store.pipelines.get("full")
        file_size_limit(LIMIT)
        outcome = feed.catch_up()
        file_size_limit(-1)

        assert outcome.reason == "capture failed"
        assert outcome.capture_error is not None
        assert "no space left for the journal file" in outcome.capture_error
        after = feed.store.pipelines.get("full")
        assert before is not None
        assert after is not None
        assert after.captured_position == before.captured_position
        assert list(tmp_path.rglob("*.parquet")) == []

        assert feed.catch_up().capture_error is None
        arrived = [
            json.loads(one["df-event"])["after"]["id"] for one in feed.delivered("customers")
        ]
        assert arrived == list(range(1, ROWS + 1))


def test_a_full_disk_of_prepared_messages(
    tmp_path: Path, file_size_limit: Callable[[int], None]
) -> None:
    """A task reports it as what it is, to be tried again: its failure would say nothing."""
    numbers = pa.array(range(50_000), pa.int64())
    batch = pa.RecordBatch.from_arrays([numbers, numbers], ["segment", "ordinal"])
    file_size_limit(100 << 10)
    report = pa.Table.from_batches(list(write_partition(str(tmp_path), "run.job", [batch])), SLICES)
    file_size_limit(-1)

    with pytest.raises(StoreUnavailable, match="no space left for the journal file"):
        reported(report)


def test_a_full_state_store(sqlite_store: StateStore) -> None:
    """A write says that the disk is full and leaves nothing; with room again it goes through."""
    limits = [0]

    @event.listens_for(sqlite_store.database._engine, "begin")
    def limit(connection: object) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {limits[-1] or 1 << 30}")  # type: ignore[attr-defined]

    values = Kv(sqlite_store.database, "shop")
    limits.append(1)  # SQLite takes it for as many pages as there are
    with pytest.raises(StoreUnavailable, match=r"state\.db: database or disk is full; free space"):
        values.put("key", bytes(100_000))
    assert values.get("key") is None

    limits.append(0)
    values.put("key", b"value")
    assert values.get("key") == b"value"
