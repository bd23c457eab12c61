"""Both ends of a pipeline whose sink keeps its own position: databases to read, sinks to lose.

Each database has one table, `customers (id, name)`. Each sink takes its changes in one sequence,
and can be made to forget what it had, the way it really happens to such a server.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

import psycopg
import redis
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_lab.servers import mysql
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.conftest import Shop
from tests.fix_kafka import read_topic
from tests.pipeline.changes import eventually


class MysqlShop(Shop):
    """A shop whose database is MySQL's."""

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with mysql.connect(self.dsn) as connection, connection.cursor() as cursor:
            cursor.execute("BEGIN")
            for statement in statements:
                cursor.execute(statement)
            connection.commit()


def wait_for_readers(dsn: str) -> None:
    """Wait until nobody reads a slot of a PostgreSQL database: that ends a moment after its client."""
    query = "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND active"
    with psycopg.connect(dsn, autocommit=True) as connection:
        eventually(lambda: connection.execute(query).fetchone() is None)


class Database(Protocol):
    """A source with a table of customers.

    Attributes:
        holds_log: Whether it keeps its log for a pipeline whose state store is gone.
    """

    holds_log: bool

    @property
    def shop(self) -> Shop:
        """What runs statements."""
        ...

    def source(self, name: str) -> str:
        """Return the `source` of a pipeline file, as YAML in braces."""
        ...

    def forget(self) -> None:
        """Let the log begin now for whoever reads it again."""
        ...


class PostgresDatabase:
    """A shop in PostgreSQL, with a replication slot."""

    holds_log = True

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def source(self, name: str) -> str:
        """Return the pipeline's source."""
        return (
            f'{{type: postgres, config: {{id: {name}-source, dsn: "{self.shop.dsn}", '
            f"slot: {name}, publication: {name}, tables: [public.customers]}}}}"
        )

    def forget(self) -> None:
        """Move the slot to the log's end."""
        wait_for_readers(self.shop.dsn)
        with psycopg.connect(self.shop.dsn) as connection:
            connection.execute(
                "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn())"
                " FROM pg_replication_slots WHERE database = current_database()"
            )


class MysqlDatabase:
    """A shop in MySQL, where a new pipeline begins now."""

    holds_log = False

    def __init__(self, dsn: str) -> None:
        self.shop = MysqlShop(dsn, redis_uri="")
        self.shop.execute("CREATE TABLE customers (id bigint PRIMARY KEY, name text)")

    def source(self, name: str) -> str:
        """Return the pipeline's source."""
        table = f"{urlsplit(self.shop.dsn).path.strip('/')}.customers"
        config = f'{{id: {name}-source, dsn: "{self.shop.dsn}", tables: [{table}]}}'
        return f"{{type: mysql, config: {config}}}"

    def forget(self) -> None:
        """Do nothing: no server keeps its log for a pipeline that it does not know."""


class Sink(Protocol):
    """A sink of its own for one pipeline; its id is `sink`.

    Attributes:
        where: What an error calls the place of its position.
    """

    where: str

    def sink(self, *, exactly_once: bool) -> str:
        """Return a sink of a pipeline file, as YAML in braces."""
        ...

    def arrived(self) -> list[int]:
        """Return the ids of the customers that it holds, in order."""
        ...

    def position(self) -> SinkPosition | None:
        """Return the position that it keeps."""
        ...

    def store_position(self, text: str) -> None:
        """Put something in place of the position."""
        ...

    def forget_position(self) -> None:
        """Lose the position, and nothing else."""
        ...

    def empty(self) -> None:
        """Lose everything, the position too."""
        ...

    def keep(self) -> None:
        """Make a copy of what there is."""
        ...

    def restore(self) -> None:
        """Crash, and come back with what the copy has."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class RedisStream:
    """A stream of a Redis server that keeps its data in a dump only."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self._server = server
        self._stream = name
        self._key = f"deltaforge:position:{name}:sink"
        self.where = f"key '{self._key}'"
        self._client = redis.Redis.from_url(server.uri)
        self._copy = b""

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: redis, config: {{id: sink, uri: "{self._server.uri}", '
            f"stream: {self._stream}, exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def arrived(self) -> list[int]:
        """Return the ids in the stream."""
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self._stream))
        return ids(fields[b"df-event"] for _, fields in entries)

    def position(self) -> SinkPosition | None:
        """Return what the key holds."""
        held = self._client.get(self._key)
        return SinkPosition.from_json(cast("bytes", held)) if held else None

    def store_position(self, text: str) -> None:
        """Set the key."""
        self._client.set(self._key, text)

    def forget_position(self) -> None:
        """Delete the key."""
        self._client.delete(self._key)

    def empty(self) -> None:
        """Flush the database."""
        self._client.flushdb()

    def keep(self) -> None:
        """Copy a dump."""
        self._client.save()
        self._copy = self._dump().read_bytes()

    def restore(self) -> None:
        """Start the server with the copied dump."""
        dump = self._dump()
        self._server.stop(immediate=True)
        dump.write_bytes(self._copy)
        self._server.restart()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _dump(self) -> Path:
        return Path(str(self._client.config_get("dir")["dir"])) / "dump.rdb"


class KafkaTopic:
    """A topic with one partition, and the group that keeps the sink's position.

    Args:
        server: The broker.
        name: Of topic and pipeline.
        data: Where the broker's files are, if it may be stopped and set back.
    """

    def __init__(self, server: KafkaServer, name: str, data: Path | None = None) -> None:
        self._server = server
        self._topic = name
        self._group = f"deltaforge-{name}:sink"
        self.where = f"group '{self._group}' for topic '{name}'"
        self._data = data
        server.create_topic(name)

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: kafka, config: {{id: sink, brokers: "{self._server.brokers}", '
            f"topic: {self._topic}, exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def arrived(self) -> list[int]:
        """Return the ids that a consumer with `read_committed` gets."""
        records = read_topic(self._server.brokers, self._topic)
        return ids(record.value or b"" for record in records)

    def position(self) -> SinkPosition | None:
        """Return what the group's offset holds."""
        with self._consumer() as consumer:
            held = self._offset(consumer)
        return SinkPosition.from_json(held.metadata or "") if held.offset >= 0 else None

    def store_position(self, text: str) -> None:
        """Commit an offset with another metadata."""
        with self._consumer() as consumer:
            place = TopicPartition(self._topic, 0, max(self._offset(consumer).offset, 0), text)
            consumer.commit(offsets=[place], asynchronous=False)

    def forget_position(self) -> None:
        """Delete the group, as brokers do when its offsets are old."""
        admin = self._admin()  # the request ends with its client
        admin.delete_consumer_groups([self._group])[self._group].result(30)

    def empty(self) -> None:
        """Delete the topic and recreate it."""
        admin = self._admin()
        admin.delete_topics([self._topic])[self._topic].result(30)
        self._server.create_topic(self._topic)

    def keep(self) -> None:
        """Copy the stopped broker's files."""
        assert self._data
        self._server.stop()
        shutil.copytree(self._data, self._data.with_name("copy"))
        self._server.restart()

    def restore(self) -> None:
        """Start the broker with the copied files."""
        assert self._data
        self._server.stop(immediate=True)
        shutil.rmtree(self._data)
        shutil.copytree(self._data.with_name("copy"), self._data)
        self._server.restart()

    def close(self) -> None:
        """Every connection is closed after its use."""

    def _consumer(self) -> contextlib.closing[Consumer]:
        properties = {"bootstrap.servers": self._server.brokers, "group.id": self._group}
        return contextlib.closing(Consumer(properties))

    def _offset(self, consumer: Consumer) -> TopicPartition:
        (held,) = consumer.committed([TopicPartition(self._topic, 0)], timeout=30)
        return held

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self._server.brokers})


def ids(events: Iterable[str | bytes]) -> list[int]:
    """Return the customers of events."""
    return [json.loads(one)["after"]["id"] for one in events]
