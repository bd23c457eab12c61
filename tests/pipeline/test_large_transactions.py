"""Transactions larger than everything else: taken in parts, inside fixed memory and disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from deltaforge_dagster.journal.writer import ROW_GROUP_BYTES
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

GIB = 1 << 30


@dataclass(frozen=True)
class Ended:
    """What a run of its own process reported, and the most that its encoded files took."""

    report: dict[str, Any]
    seconds: float
    encoded_bytes: int


def run_alone(path: Path, spark: SparkAddress, row_group_bytes: int) -> Ended:
    """Run the pipeline of a file in a process of its own, watching its encoded files."""
    prepared = path.parent / "home" / "journal" / path.stem / "prepared"
    home = path.parent / "home"
    environment = {"DELTAFORGE_HOME": str(home), **spark.settings(home)}
    began = time.monotonic()
    most = 0
    with subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.lone_run", str(path), str(row_group_bytes)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while process.poll() is None:
                most = max(most, _size(prepared))
                time.sleep(0.1)
        finally:
            process.kill()
        assert process.stdout is not None
        output = process.stdout.read()
    seconds = time.monotonic() - began
    assert process.returncode == 0, output
    return Ended(json.loads(output.splitlines()[-1]), seconds, most)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.iterdir() if folder.exists() else ():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize(
    ("rows", "row_group_bytes"),
    [
        (200_000, 512 << 10),
        pytest.param(
            2_000_000, ROW_GROUP_BYTES, marks=[pytest.mark.soak("large"), pytest.mark.timeout(3600)]
        ),
    ],
)
def test_one_large_transaction(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, rows: int, row_group_bytes: int
) -> None:
    """Every row arrives once and in order; memory and encoded files stay far below the whole."""
    text = shop.pipeline("large", range_="{max_seconds: 3600}", run="{idle_seconds: 60}")
    path = tmp_path / "large.yaml"
    with opened_feed(shop, path, text, spark_server) as feed:
        shop.execute(
            f"INSERT INTO orders SELECT n, n % 1000, n / 100.0 FROM generate_series(1, {rows}) n"
        )

        ended = run_alone(path, spark_server, row_group_bytes)

        (segment,) = feed.store.segments.read("large")
        checkpoint = feed.store.checkpoints.read("large")["redis"]
    assert (ended.report["captured"], ended.report["delivered"]) == (rows, {"redis": rows})
    assert (segment.rows, checkpoint.complete) == (rows, True)
    count = messages_bytes = 0
    with redis.Redis.from_url(shop.redis_uri) as client:
        start: bytes | str = "-"
        while page := client.xrange("large.orders", start, count=20_000):
            for _, fields in page:
                count += 1
                event = fields[b"df-event"]
                messages_bytes += len(event)
                assert json.loads(event)["after"]["id"] == count
            start = b"(" + bytes(page[-1][0])
    assert count == rows
    print(  # noqa: T201 - figures of the long form
        f"\n{rows} rows: {ended.seconds:.0f} s, run's process {ended.report['max_rss'] >> 20} MiB, "
        f"encoded files {ended.encoded_bytes >> 20} MiB at most, messages "
        f"{messages_bytes >> 20} MiB, segment {segment.bytes >> 20} MiB"
    )
    assert ended.report["max_rss"] < GIB
    assert ended.encoded_bytes < messages_bytes * 0.8
