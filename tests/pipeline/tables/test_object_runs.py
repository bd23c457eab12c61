"""A pipeline from PostgreSQL to object files, with a real Spark: each change is in one object that can be seen."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import pytest

from deltaforge_dagster.state.records import CheckpointRow
from tests.e2e.conftest import Shop, shop
from tests.fix_objects import Bucket
from tests.fix_spark import SparkAddress
from tests.kills.campaign import lease_seconds
from tests.pipeline.live import Feed
from tests.pipeline.tables.runs import STEPS, change, run_to, table_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.s3]


class Objects:
    """A feed whose only sink writes objects.

    Attributes:
        feed: The pipeline.
        folder: Where the objects are.
    """

    def __init__(self, feed: Feed, folder: Path) -> None:
        self.feed = feed
        self.folder = folder

    def rows(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        """Return columns of all Parquet objects of a table, in the order of their names."""
        files = f"{self.folder}/cdc/table={table}/*/*/*/*.parquet"
        query = f"SELECT {columns} FROM read_parquet('{files}', union_by_name=true, filename=true)"
        with duckdb.connect() as connection:
            return connection.execute(f"{query} ORDER BY filename, file_row_number").fetchall()

    def paths(self) -> list[str]:
        """Return the paths of all objects."""
        files = (one for one in self.folder.rglob("*") if one.is_file())
        return sorted(one.relative_to(self.folder).as_posix() for one in files)

    @property
    def checkpoint(self) -> CheckpointRow:
        """The checkpoint of the sink."""
        return self.feed.store.checkpoints.read(self.feed.name)["files"]


MakeObjects = Callable[..., Objects]


@pytest.fixture
def make_objects(
    shop: Shop, spark_server: SparkAddress, bucket: Bucket, tmp_path: Path
) -> Iterator[MakeObjects]:
    """Make a feed of the shop into a bucket."""
    with ExitStack() as stack:

        def make(more: str = "", lease_seconds: int = 20) -> Objects:
            options = {"id": "files", "prefix": "cdc", **bucket.options}
            config = json.dumps(options)[1:-1]
            sink = f"    - {{type: s3, config: {{{config}{more}}}}}\n"
            opened = table_feed(
                shop, tmp_path / "feed.yaml", sink, spark_server, lease_seconds=lease_seconds
            )
            feed = stack.enter_context(opened)
            return Objects(feed, bucket.folder)

        yield make


def expected(numbers: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return operation, id and name of these changes of customers."""
    return [row for number in numbers for row in (("c", number, "x"), ("u", number, "y"))]


def test_a_kill_between_the_objects_and_the_checkpoint(make_objects: MakeObjects) -> None:
    """The successor repeats the commit: each change is in one object, in order, with its type."""
    objects = make_objects(lease_seconds=lease_seconds())
    change(objects.feed, 1)
    run_to(objects.feed, "table-committed", "first")
    assert len(objects.paths()) == 1
    change(objects.feed, 2)
    run_to(objects.feed, "", "last")

    assert objects.rows("customers", "op, after_id, after_name") == expected([1, 2])
    orders = objects.rows("orders", "op, after_id, CAST(after_total AS VARCHAR), source_table")
    assert orders == [("c", 1, "1.50", "orders"), ("c", 2, "1.50", "orders")]
    assert len(objects.paths()) == 4


@pytest.mark.soak("faults")
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_each_step(make_objects: MakeObjects, step: str) -> None:
    """Each change is in one object, in order."""
    objects = make_objects(lease_seconds=lease_seconds())
    for number in (1, 2):
        change(objects.feed, number)
        run_to(objects.feed, step, f"run-{number}")
    run_to(objects.feed, "", "last")
    assert objects.rows("customers", "op, after_id, after_name") == expected([1, 2])
    assert objects.rows("orders", "op, after_id") == [("c", 1), ("c", 2)]


@pytest.mark.soak("faults")
def test_a_checkpoint_that_is_set_back(make_objects: MakeObjects) -> None:
    """What is in objects stays in one, although later commits cover other segments than before."""
    objects = make_objects()
    for number in (1, 2, 3):
        change(objects.feed, number)
        objects.feed.catch_up()
    before = objects.paths()
    objects.feed.store.checkpoints.reset(objects.feed.name, "files", 0)
    change(objects.feed, 4)
    outcome = objects.feed.catch_up()
    assert (outcome.sink_errors, outcome.behind) == ({}, {})
    assert objects.rows("customers", "op, after_id, after_name") == expected([1, 2, 3, 4])
    assert set(before) < set(objects.paths())


@pytest.mark.soak("faults")
def test_lines_and_a_schema_change(make_objects: MakeObjects) -> None:
    """A line is a native event, whatever its table version is."""
    objects = make_objects(", format: jsonl, folder: '${source.table}'")
    change(objects.feed, 1)
    objects.feed.shop.execute("ALTER TABLE customers ADD note text", "DELETE FROM customers")
    objects.feed.catch_up()
    found = []
    for path in objects.paths():
        assert path.endswith(".jsonl.gz")
        if path.startswith("cdc/customers/"):
            text = gzip.decompress((objects.folder / path).read_bytes()).decode()
            found += [json.loads(line) for line in text.splitlines()]
    assert [(one["op"], one["source"]["table"]) for one in found] == [
        ("c", "customers"),
        ("u", "customers"),
        ("d", "customers"),
    ]
    assert found[0]["after"] == {"id": 1, "name": "x"}
