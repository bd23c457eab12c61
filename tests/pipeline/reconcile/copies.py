"""A table of PostgreSQL or MySQL, and its copies in the tables of sinks, which tests damage and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from deltaforge_dagster.pipeline.reconcile.compare import CompareOptions, TableComparison
from deltaforge_dagster.pipeline.reconcile.reports import TableReport
from deltaforge_dagster.resources.run_context import build_run_context
from tests.e2e.conftest import Shop
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Feed

PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {{type: {type}, config: {{id: shop, dsn: "{dsn}", {more}tables: ["{schema}.{table}"]}}}}
  sinks:
{sinks}
  engine: {{run: {{idle_seconds: 600, lease_seconds: 20, renew_seconds: 0.5}}}}
"""


SINKS = """\
    - {{type: postgres, config: {{id: copy, dsn: "{copy}", table: "${{source.table}}", commit_seconds: 0.1}}}}
    - {{type: postgres, config: {{id: past, dsn: "{copy}", table: past, mode: history, commit_seconds: 0.1}}}}
"""


@dataclass
class Copied:
    """A table and its copies: the current rows in `copy`, their versions in `past`, or those in other sinks.

    Attributes:
        feed: The pipeline.
        dsn: The database of the copies.
    """

    feed: Feed
    dsn: str

    def damage(self, *statements: str) -> None:
        """Execute statements in the database of the copies."""
        with psycopg.connect(self.dsn) as connection:
            for statement in statements:
                connection.execute(statement)

    def deliver(self, *statements: str) -> None:
        """Execute statements at the source, if there are any, and deliver what they change."""
        if statements:
            self.feed.shop.execute(*statements)
        outcome = self.feed.catch_up()
        assert (outcome.sink_errors, outcome.behind) == ({}, {})

    def compare(self, **options: Any) -> dict[str, TableReport]:
        """Return the report of each sink."""
        feed = self.feed
        source = feed.opened.source_builder(feed.loaded)()
        try:
            comparison = TableComparison(
                feed.loaded,
                feed.store,
                feed.opened.journal,
                source,
                build_run_context(feed.opened, feed.loaded).replay_sessions,
                CompareOptions(**options),
            )
            return {report.sink: report for report in comparison.execute()}
        finally:
            source.close()


MakeCopied = Callable[..., Copied]


@dataclass(frozen=True)
class DatabaseShop(MysqlShop):
    """A shop whose statements need not name their database.

    Attributes:
        database: The database.
    """

    database: str = ""

    def execute(self, *statements: str) -> None:
        """Execute statements in one transaction, in the database."""
        super().execute(f"USE {self.database}", *statements)


def goods(shop: Shop) -> None:
    """Make a table with columns that damage can hit."""
    instant = "timestamp(6)" if isinstance(shop, MysqlShop) else "timestamptz"
    shop.execute(
        f"CREATE TABLE goods (id int PRIMARY KEY, name varchar(50), note varchar(200), first int, last int,"
        f" price decimal(20,10), weight double precision, at {instant} NULL)"
    )


def rows(first: int, last: int) -> str:
    """Return the statement that inserts goods."""
    values = (
        f"({n}, 'name {n}', 'a note of {n} that is long', {n}, {n + 1}, {n}.0123456789, {n}.1, '2024-05-0{n % 9 + 1} 12:00:00')"
        for n in range(first, last + 1)
    )
    return f"INSERT INTO goods VALUES {', '.join(values)}"


def shown(report: TableReport) -> dict[int, tuple[str, list[str]]]:
    """Return what is wrong with each key, and the columns that differ."""
    return {int(row.key["id"] or 0): (row.kind, list(row.columns)) for row in report.shown}
