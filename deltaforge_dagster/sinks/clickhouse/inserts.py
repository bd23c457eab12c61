"""Sends rows to a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from deltaforge_dagster.sinks.clickhouse.client import quoted
from deltaforge_dagster.sinks.clickhouse.rows import arrow_stream
from deltaforge_dagster.sinks.clickhouse.target import ClickhouseTarget

_NO_DEDUPLICATION = {"insert_deduplicate": "0"}
"""Settings of INSERTs without a token: rows that are sent twice are inserted twice.

They may have been deleted in between.
"""


@dataclass(frozen=True, slots=True)
class Inserts:
    """The INSERTs of a commit to one table.

    Args:
        target: The table.
    """

    target: ClickhouseTarget

    def insert(self, name: str, rows: pa.Table, token: str | None = None) -> None:
        """Insert rows.

        Args:
            name: The table's name as it is written in queries.
            rows: The rows.
            token: Deduplication token: an INSERT with one that the table remembers adds nothing.
                None for none.
        """
        columns = ", ".join(map(quoted, rows.schema.names))
        query = f"INSERT INTO {name} ({columns}) FORMAT ArrowStream"
        self.send(query, rows, None if token is None else {"insert_deduplication_token": token})

    def send(self, query: str, rows: pa.Table, settings: Mapping[str, str] | None = None) -> None:
        """Send an INSERT with its rows.

        If the server still executes an INSERT into the same table that a killed run has sent, that
        one is ended first (`replace_running_query`).
        """
        target = self.target
        target.guard()
        table = ".".join(target.table.destination)
        only = {
            "query_id": f"deltaforge/{target.owner.name}/{table}",
            "replace_running_query": "1",
        }
        target.client.execute(
            target.label, query, {**(settings or _NO_DEDUPLICATION), **only}, arrow_stream(rows)
        )

    def execute(self, query: str) -> None:
        """Execute an `INSERT ... SELECT`, or another statement without data."""
        self.target.guard()
        self.target.client.execute(self.target.label, query, _NO_DEDUPLICATION)
