"""Pipelines of the shop whose sinks keep tables, and runs of them that are killed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deltaforge_dagster.pipeline.failpoints import VARIABLE
from tests.e2e.conftest import Shop
from tests.fix_spark import SparkAddress
from tests.kills.child import start
from tests.pipeline.live import Feed, opened_feed

CHANGES: tuple[tuple[str, ...], ...] = (
    (
        "INSERT INTO customers SELECT n, 'c' || n FROM generate_series(1, 200) n",
        "INSERT INTO orders VALUES (1, 1, 10.50), (2, 2, 0.10)",
    ),
    (
        "UPDATE customers SET name = 'changed' WHERE id % 3 = 0",
        "DELETE FROM customers WHERE id % 5 = 0",
        "UPDATE orders SET id = 3, total = total + 1 WHERE id = 2",
    ),
    ("TRUNCATE orders", "INSERT INTO orders VALUES (1, 9, 99999999.99), (7, NULL, NULL)"),
    ("UPDATE customers SET name = NULL WHERE id = 1", "DELETE FROM orders WHERE id = 7"),
)
"""Transactions: inserts, updates, a changed key, deletes and a truncate."""

STEPS = ("table-commit-planned", "table-commit-staged", "table-committed", "table-commit-complete")
"""Where a run can be killed: before, between and after the tables of a commit."""


def table_feed(
    shop: Shop,
    path: Path,
    sinks: str,
    spark_server: SparkAddress,
    *,
    lease_seconds: int = 20,
    **options: Any,
) -> AbstractContextManager[Feed]:
    """Open a feed of the shop without its Redis sink.

    Args:
        shop: The source.
        path: Where the pipeline file is written.
        sinks: The sinks, lines of YAML.
        spark_server: Where Spark is.
        lease_seconds: How long the lease of a run lasts.
        options: More of `Shop.pipeline`.
    """
    run = f"{{idle_seconds: 4, lease_seconds: {lease_seconds}, renew_seconds: 0.5}}"
    text = shop.pipeline("feed", more_sinks=sinks, range_="{max_seconds: 600}", run=run, **options)
    lines = text.splitlines(keepends=True)
    text = "".join(line for line in lines if "type: redis" not in line)
    return opened_feed(shop, path, text, spark_server)


def run_to(feed: Feed, step: str, run_id: str) -> None:
    """Execute a run that is killed at a step, or ends if that is empty."""
    environment = {
        "DELTAFORGE_HOME": str(feed.path.parent / "home"),
        "DELTAFORGE_PIPELINES": str(feed.path.parent),
        "PATH": os.environ["PATH"],
        VARIABLE: step,
    }
    run = start(feed.path, environment, run_id, until_caught_up=True)
    run.join(120)
    assert run.exitcode == (-9 if step else 0), step


def change(feed: Feed, number: int) -> None:
    """Insert and update customer `number`, and insert an order."""
    feed.shop.execute(
        f"INSERT INTO customers VALUES ({number}, 'x')",
        f"UPDATE customers SET name = 'y' WHERE id = {number}",
        f"INSERT INTO orders VALUES ({number}, 1, 1.50)",
    )


def killed_at_each(feed: Feed, steps: Sequence[str]) -> None:
    """Kill a run at each step, after the `change` of the step's number from 1 on; then let one end."""
    for number, step in enumerate(steps, start=1):
        change(feed, number)
        run_to(feed, step, f"run-{number}")
    run_to(feed, "", "last")
