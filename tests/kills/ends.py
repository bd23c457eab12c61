"""The two ends of a pipeline under test: what a database and a sink are to the harness."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Protocol, cast

import psycopg
import redis

from tests.e2e.deployment import eventually
from tests.kills.checker import Arrived
from tests.kills.workload import LEDGER, TABLE, Change, Connection


class Database(Protocol):
    """A source with the two tables of the workload."""

    def connect(self) -> Connection:
        """Return a connection for a writer."""
        ...

    def source(self, name: str) -> str:
        """Return the `source` of a pipeline file, as YAML in braces."""
        ...

    def confirmed(self) -> int | None:
        """Return the place before which the source has forgotten its log; None if it keeps none."""
        ...


class Destination(Protocol):
    """An empty sink of its own, and all that ever arrives in it."""

    def sink(self, *, exactly_once: bool) -> str:
        """Return a sink of a pipeline file, as YAML in braces; its id is `sink`."""
        ...

    def settle(self) -> None:
        """Wait until what dead senders left on its way has arrived, or never will."""
        ...

    def lengths(self) -> tuple[int, ...]:
        """Return how many messages each partition has."""
        ...

    def arrived(self) -> list[list[Arrived]]:
        """Return every message of every partition, in order."""
        ...


def parse(value: str | bytes) -> Arrived:
    """Return what a native event says."""
    event = json.loads(value)
    row = event["before"] if event["op"] == "d" else event["after"]
    return Arrived(Change(row["id"], row["version"], event["op"]), event["event_id"])


class PostgresConnection:
    """A writer's connection to PostgreSQL."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None

    def transaction(self, statements: Sequence[str]) -> None:
        """Run statements in one transaction, sent at once."""
        self._run("; ".join(["BEGIN", *statements, "COMMIT"]))

    def count(self, query: str) -> int:
        """Return a number."""
        row = self._run(query).fetchone()
        assert row is not None
        return int(row[0])

    def log_end(self) -> int:
        """Return the end of the write-ahead log."""
        return self.count("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statement: str) -> psycopg.Cursor[Any]:
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._dsn, autocommit=True, connect_timeout=5)
                # The test server's default would let the log's durable end lag behind a commit.
                self._connection.execute("SET synchronous_commit = on")
            return self._connection.execute(statement)
        except psycopg.OperationalError as error:
            self.close()
            raise ConnectionError(str(error)) from error


class PostgresDatabase:
    """A database of a PostgreSQL server.

    Attributes:
        dsn: Where it is.
        slot: Name of the replication slot that the pipeline uses.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.slot = f"kills_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(dsn) as connection:
            connection.execute(TABLE)
            connection.execute("ALTER TABLE items REPLICA IDENTITY FULL")
            connection.execute(LEDGER)

    def connect(self) -> PostgresConnection:
        """Return a connection for a writer."""
        return PostgresConnection(self.dsn)

    def source(self, name: str) -> str:
        """Return the pipeline's source."""
        return (
            f'{{type: postgres, config: {{id: {name}-source, dsn: "{self.dsn}", slot: {self.slot}, '
            f"publication: {self.slot}, tables: [public.items]}}}}"
        )

    def confirmed(self) -> int | None:
        """Return the slot's confirmed position; None while the server is not there."""
        try:
            with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                row = connection.execute(
                    "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots"
                    " WHERE slot_name = %s",
                    [self.slot],
                ).fetchone()
        except psycopg.OperationalError:
            return None
        return None if row is None else int(row[0])

    def drop_slot(self) -> None:
        """Let the server forget the pipeline."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active",
                [self.slot],
            )
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s",
                [self.slot],
            )


class RedisDestination:
    """One stream on a Redis server that nobody else uses."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.stream = "kills"
        self._client = redis.Redis.from_url(uri, client_name="reader")

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: redis, config: {{id: sink, uri: "{self.uri}", stream: {self.stream}, '
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def settle(self) -> None:
        """Wait until the server has closed every connection but ours."""
        eventually(
            lambda: {one["name"] for one in self._client.client_list()} == {"reader"},
            what="the end of the dead run's connections",
            every=0.02,
        )

    def lengths(self) -> tuple[int, ...]:
        """Return the length of the stream."""
        return (int(self._client.xlen(self.stream)),)

    def arrived(self) -> list[list[Arrived]]:
        """Return the stream's entries."""
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self.stream))
        return [[parse(fields[b"df-event"]) for _, fields in entries]]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
