"""A PostgreSQL database to read from: tables, slot, publication and the sources over them."""

from __future__ import annotations

import secrets
import time
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import conninfo, sql

from deltaforge_dagster.config.engine import PostgresOptions, ValueOptions
from deltaforge_dagster.sources.postgres.config import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.postgres.source import PostgresSource
from deltaforge_dagster.testing.sources import Bench

PIPELINE = "orders"


class PostgresBench(Bench):
    """The tables `orders` and `items`, which are captured, and `other`, which is not.

    Args:
        dsn: An empty database, as superuser.
    """

    holds_log = True
    has_transactions = True

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.slot = f"s_{secrets.token_hex(6)}"
        self.connection = psycopg.connect(dsn, autocommit=True)
        self._sources: list[PostgresSource] = []
        for table in ("orders", "items", "other"):
            self.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for source in self._sources:
            source.close()
        self.drop_slot()
        self.connection.close()

    def config(self, **changed: Any) -> PostgresSourceConfig:
        """Return the source's configuration, with some fields changed."""
        fields = {
            "id": "orders-db",
            "dsn": self.dsn,
            "slot": self.slot,
            "publication": "p",
            "tables": ("public.orders", "public.items"),
        }
        return PostgresSourceConfig(**{**fields, **changed})

    def source(self, **changed: Any) -> PostgresSource:
        """Return a new source, closed when the bench ends.

        `options` are `engine.postgres`, `values` are `engine.values`.
        """
        options = changed.pop("options", PostgresOptions())
        values = changed.pop("values", ValueOptions())
        source = PostgresSource(self.config(**changed), PIPELINE, values, options)
        self._sources.append(source)
        return source

    def with_options(self, options: str) -> str:
        """Return the DSN with session options."""
        return conninfo.make_conninfo(self.dsn, options=options)

    def execute(self, *statements: str) -> None:
        """Run the statements in one transaction, and see to it that it is durable."""
        with self.connection.transaction():
            self.connection.execute("SET LOCAL synchronous_commit = on")
            for statement in statements:
                self.connection.execute(statement)

    def value(self, query: str, *parameters: object) -> Any:
        """Return the first column of the first row."""
        row = self.connection.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def reader(self) -> int | None:
        """Return the process that reads the slot."""
        pid: int | None = self.value(
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return pid

    def reader_waits_for(self, event: str) -> bool:
        """Say whether the process that reads the slot waits for this, as `pg_stat_activity` has it."""
        waits = "SELECT wait_event = %s FROM pg_stat_activity WHERE pid = %s"
        return bool(self.value(waits, event, self.reader()))

    def wait_for_readers(self) -> None:
        """Wait until nobody reads the slot: a walsender ends a moment after its client."""
        deadline = time.monotonic() + 60
        while self.reader() is not None and time.monotonic() < deadline:
            time.sleep(0.05)

    def cut(self) -> None:
        """End the walsender."""
        self.execute(f"SELECT pg_terminate_backend({self.reader()})")

    def forget(self) -> None:
        """Recreate the slot: the earlier log is no longer held."""
        self.drop_slot()
        self.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)

    def confirmed(self) -> LsnPosition:
        """Return the slot's confirmed position."""
        lsn = self.value(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
            self.slot,
        )
        return LsnPosition(parse_lsn(lsn))

    def drop_slot(self) -> None:
        """Drop the slot, if there is one, once nobody reads it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.connection.execute(
                    sql.SQL(
                        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                        " WHERE slot_name = {}"
                    ).format(self.slot)
                )
            except psycopg.errors.ObjectInUse:
                time.sleep(0.05)
            else:
                return
