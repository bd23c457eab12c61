"""Sinks that pipelines deliver to, each for one campaign alone."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import psycopg
import redis
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.http import HttpServer
from deltaforge_lab.servers.kafka import KafkaServer
from tests.fix_kafka import read_topic
from tests.fix_nats import Admin
from tests.kills.ends import MESSAGE_STEPS, TABLE_STEPS, wait_until_still


class RedisDestination:
    """One stream on a Redis server that nobody else uses."""

    steps = MESSAGE_STEPS

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.stream = "kills"
        self._client = redis.Redis.from_url(uri, client_name="reader", socket_timeout=None)

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: redis, config: {{id: sink, uri: "{self.uri}", stream: {self.stream}, '
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def settle(self) -> None:
        """Wait until the server has read what it was sent: from loopback, it is a moment."""
        wait_until_still(self.lengths, seconds=0.3)

    def lengths(self) -> tuple[int, ...]:
        """Return the length of the stream."""
        return (int(self._client.xlen(self.stream)),)

    def values(self) -> list[list[str | bytes]]:
        """Return the stream's entries."""
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self.stream))
        return [[fields[b"df-event"] for _, fields in entries]]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class NatsDestination:
    """A stream of its own, which forgets ids at once: what is sent twice shows."""

    steps = MESSAGE_STEPS

    def __init__(self, url: str) -> None:
        self._url = url
        self.stream = f"kills_{uuid.uuid4().hex[:12]}"
        with Admin(url) as admin:
            admin.make(self.stream, f"{self.stream}.>", duplicate_window=100_000_000)

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: nats, config: {{id: sink, url: "{self._url}", stream: {self.stream}, '
            f'subject: "{self.stream}.${{source.table}}", '
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def settle(self) -> None:
        """Wait until the server has handled what it was sent."""
        wait_until_still(self.lengths, seconds=0.3)

    def lengths(self) -> tuple[int, ...]:
        """Return the length of the stream."""
        with Admin(self._url) as admin:
            return (int(admin.state(self.stream)["messages"]),)

    def values(self) -> list[list[str | bytes]]:
        """Return the stream's messages."""
        with Admin(self._url) as admin:
            return [[one.value for one in admin.read(self.stream)]]

    def close(self) -> None:
        """Remove the stream."""
        with Admin(self._url) as admin:
            admin.delete(self.stream)


class HttpDestination:
    """A server of its own, which records every request that arrives."""

    steps = MESSAGE_STEPS

    def __init__(self, server: HttpServer) -> None:
        self._server = server

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        assert not exactly_once
        return f'{{type: http, config: {{id: sink, url: "{self._server.url}"}}}}'

    def settle(self) -> None:
        """Wait until the server has read what it was sent."""
        wait_until_still(self.lengths, seconds=0.3)

    def lengths(self) -> tuple[int, ...]:
        """Return the number of requests."""
        return (len(self._server.received),)

    def values(self) -> list[list[str | bytes]]:
        """Return the bodies of all requests, whatever became of them."""
        return [[one.body for one in self._server.received]]


class KafkaDestination:
    """A topic of three partitions; for one that shall be compacted, deletes come with tombstones."""

    PARTITIONS = 3
    steps = MESSAGE_STEPS

    def __init__(self, server: KafkaServer, *, compacted: bool = False) -> None:
        self._compacted = compacted
        self.topic = f"kills_{uuid.uuid4().hex[:12]}"
        server.create_topic(self.topic, self.PARTITIONS)
        self._brokers = server.brokers
        self._consumer = Consumer({"bootstrap.servers": server.brokers, "group.id": self.topic})

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        more = ", tombstones: true, key_updates: delete_insert" if self._compacted else ""
        return (
            f'{{type: kafka, config: {{id: sink, brokers: "{self._brokers}", topic: {self.topic}, '
            f"exactly_once: {str(exactly_once).lower()}{more}}}}}"
        )

    def settle(self) -> None:
        """Wait until the broker has handled what it was sent."""
        wait_until_still(self.lengths, seconds=0.5)

    def lengths(self) -> tuple[int, ...]:
        """Return the end of each partition; with transactions their markers count, too."""
        ends = []
        for number in range(self.PARTITIONS):
            partition = TopicPartition(self.topic, number)
            ends.append(self._end(partition))
        return tuple(ends)

    def _end(self, partition: TopicPartition) -> int:
        while True:
            try:
                _, end = self._consumer.get_watermark_offsets(partition, timeout=120)
            except KafkaException as error:  # what the client knows is older than the topic
                if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:
                    raise
                self._consumer.list_topics(self.topic, timeout=120)
                continue
            return int(end)

    def values(self) -> list[list[str | bytes]]:
        """Return what a consumer with `read_committed` gets.

        Of a compacted topic without the tombstones: each delete has one, right behind it.
        """
        found: list[list[str | bytes]] = [[] for _ in range(self.PARTITIONS)]
        due: dict[int, bytes | None] = {}
        for record in read_topic(self._brokers, self.topic):
            if record.partition in due:
                assert (record.key, record.value) == (due.pop(record.partition), None)
                continue
            assert record.value is not None, "a tombstone without its delete"
            found[record.partition].append(record.value)
            if self._compacted and json.loads(record.value)["op"] == "d":
                due[record.partition] = record.key
        assert not due, "a delete without its tombstone"
        return found

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()


class PostgresDestination:
    """A table of every change, in a database of its own."""

    steps = TABLE_STEPS

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection = psycopg.connect(dsn, autocommit=True)

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        assert exactly_once
        return (
            f'{{type: postgres, config: {{id: sink, dsn: "{self._dsn}", table: items, '
            "mode: changelog, commit_seconds: 0.2}}"
        )

    def settle(self) -> None:
        """Wait until the server has handled what it was sent."""
        wait_until_still(self.lengths, seconds=0.3)

    def lengths(self) -> tuple[int, ...]:
        """Return the number of the table's rows."""
        made = self._rows("SELECT 1 FROM pg_tables WHERE tablename = 'items'")
        return (self._rows("SELECT count(*) FROM items")[0][0] if made else 0,)

    def values(self) -> list[list[str | bytes]]:
        """Return the table's rows."""
        order = "ORDER BY df_position, df_ordinal"
        return _as_events(self._rows(f"SELECT id, version, df_op, df_event_id FROM items {order}"))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query).fetchall()


class ClickhouseDestination:
    """A table of every change, in a database of its own."""

    steps = TABLE_STEPS

    def __init__(self, server: ClickhouseServer, database: str) -> None:
        self._server = server
        self._database = database

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        assert exactly_once
        return (
            f"{{type: clickhouse, config: {{id: sink, url: {self._server.url}, "
            f"password: {self._server.password}, database: {self._database}, table: items, "
            "mode: changelog, commit_seconds: 0.2}}"
        )

    def settle(self) -> None:
        """Wait until the server has handled what it was sent."""
        wait_until_still(self.lengths, seconds=0.3)

    def lengths(self) -> tuple[int, ...]:
        """Return the number of the table's rows."""
        of_table = f"database = '{self._database}' AND table = 'items'"
        return (int(self._rows(f"SELECT sum(rows) FROM system.parts WHERE active AND {of_table}")[0][0]),)  # fmt: skip

    def values(self) -> list[list[str | bytes]]:
        """Return the table's rows."""
        columns = "id, version, _op, _event_id"
        return _as_events(
            self._rows(f"SELECT {columns} FROM {self._database}.items ORDER BY _version")
        )

    def _rows(self, query: str) -> list[list[Any]]:
        settings = " SETTINGS output_format_json_quote_64bit_integers = 0"
        answer = self._server.query(query + settings, "JSONCompactEachRow")
        return [json.loads(line) for line in answer.splitlines()]


class ObjectsDestination:
    """Object files of JSON lines in a folder, which never change once they have their names."""

    steps = TABLE_STEPS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[Path, list[str | bytes]] = {}

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        assert exactly_once
        return (
            f"{{type: s3, config: {{id: sink, bucket: {self._folder}, local: true, format: jsonl, "
            "compression: none, folder: items, file_roll: {max_age_secs: 0.2}}}"
        )

    def settle(self) -> None:
        """Wait for nothing: no other process writes for a run."""

    def lengths(self) -> tuple[int, ...]:
        """Return the number of lines in all files."""
        return (len(self.values()[0]),)

    def values(self) -> list[list[str | bytes]]:
        """Return the lines of all files, which are in order by their names."""
        for path in self._folder.rglob("*.jsonl"):
            if path not in self._lines:
                self._lines[path] = list(path.read_bytes().splitlines())
        return [[line for path in sorted(self._lines) for line in self._lines[path]]]


def _as_events(rows: Iterable[Any]) -> list[list[str | bytes]]:
    return [
        [
            json.dumps(
                {
                    "op": op,
                    "before" if op == "d" else "after": {"id": key, "version": version},
                    "event_id": event_id,
                }
            )
            for key, version, op, event_id in rows
        ]
    ]
