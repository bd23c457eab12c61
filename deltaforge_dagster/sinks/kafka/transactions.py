"""Kafka transactions of one sink, which store messages and the sink's own position atomically.

The position is kept where consumers keep theirs: as the metadata of a committed offset ("Kafka
protocol guide", `TxnOffsetCommit`). The consumer group is named after the transactional id, and the
offset belongs to partition 0 of the first topic that the transaction writes. Nobody consumes in
that group, so the offset's number can serve as a counter of transactions: the highest number among
all topics marks the newest position. Brokers delete it after `offsets.retention.minutes` (7 days)
without a transaction, and together with its topic.

Taking over (`init_transactions`, KIP-98) fences another producer with the same transactional id:
its open transaction is aborted, one that is being committed is completed, and everything that it
sends later is refused. The position is read only afterwards. It therefore tells definitively what
has arrived, even after a commit whose outcome was not received.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import zlib
from collections.abc import Callable

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from deltaforge_dagster.errors import SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.sinks.kafka.client import Batching, Client, KafkaClientSettings
from deltaforge_dagster.sinks.kafka.librdkafka import LOGGER, error_of, translated

_SLICE = 0.5  # a call waits no longer, so that `close` need not wait for it
_PAUSE = 0.05
_ASK_SECONDS = 5.0
_ABORT_SECONDS = 10.0
_HANG_SECONDS = 12.0
"""Seconds after which a call is given up that should take at most half a second, or ten."""

_PLAIN_TEXT = 2_000
"""Length up to which a position is stored as readable text. Brokers accept 4,096 bytes
(`offset.metadata.max.bytes`); longer positions, of sources with many GTIDs, are compressed."""

_TRANSIENT = frozenset(
    [
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._TRANSPORT,  # noqa: SLF001
    ]
)
"""Errors of brokers that have just started or taken over from others; they pass by themselves."""

_NOT_OURS = frozenset([KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART])
"""Errors of topics that the user may not see or that were just deleted: they hold no position."""

_TIMEOUT_DIVISOR = 4
"""A transaction is due for its commit after its timeout divided by this number."""


class Transactions:
    """The transactional producer of a sink, and the position stored with its transactions.

    Args:
        settings: Cluster and properties.
        name: Transactional id, and name of the group that holds the position.
        batching: See `Client`.

    Attributes:
        client: The producer; it can send after `take_over`.
    """

    def __init__(self, settings: KafkaClientSettings, name: str, batching: Batching) -> None:
        self.client = Client(settings, name, batching)
        self._settings = settings
        self._name = name
        self._seconds = settings.send_timeout
        self._transaction_seconds = settings.transaction_seconds(name)
        self._newest: TopicPartition | None = None
        self._count = 0
        self._taken_over = False
        self._hangs = False
        self._topic: str | None = None
        self._begun_at = 0.0

    def take_over(self) -> None:
        """Fence every other producer with the same transactional id, then read the position.

        Only the first call has an effect.

        Raises:
            SinkUnavailable: No broker answers in time.
            PermissionMissing: An ACL is missing.
        """
        if self._taken_over:
            return
        try:
            self._repeat(self.client.producer.init_transactions)
            self._newest = self._read()
        except BaseException:
            self.client.spent = True  # `init_transactions` cannot be called a second time
            raise
        self._count = self._newest.offset if self._newest else 0
        self._taken_over = True

    @property
    def newest(self) -> tuple[int, str] | None:
        """Number and text of the position last read or stored."""
        newest = self._newest
        return None if newest is None else (newest.offset, newest.metadata or "")

    def position(self) -> SinkPosition | None:
        """Return the position last read or stored.

        Raises:
            SinkRejected: Something else is stored in its place.
        """
        newest = self._newest
        if newest is None:
            return None
        try:
            return SinkPosition.from_json(_unpacked(newest.metadata or ""))
        except SinkRejected as error:
            raise SinkRejected(
                f"{self.client.where}: offset of group {self._name!r} for topic {newest.topic!r}: "
                f"{error}; if nothing else needs it, delete it (kafka-consumer-groups "
                "--delete-offsets): the checkpoint counts then"
            ) from None

    def begin(self, topic: str) -> None:
        """Begin a transaction whose first message goes to `topic`, unless one is already open."""
        if self._topic is None:
            self._call(self.client.producer.begin_transaction)
            self._topic = topic
            self._begun_at = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the open transaction has lasted long enough that it should be committed."""
        return time.monotonic() - self._begun_at > self._transaction_seconds / _TIMEOUT_DIVISOR

    def commit(self, position: SinkPosition) -> None:
        """Commit the transaction together with `position`.

        Raises:
            SinkUnavailable: The outcome is unknown; the next `take_over` will tell.
            PositionMoved: Another sender has taken over, and the transaction is aborted.
            SinkRejected: The brokers do not accept a position of this size.
        """
        assert self._topic is not None
        text = _packed(position.to_json())
        stored = TopicPartition(self._topic, 0, self._count + 1, text)
        producer = self.client.producer
        try:
            self._repeat(
                lambda seconds: producer.send_offset_to_transaction(
                    stored.topic, stored.offset, text, self._name, seconds
                )
            )
        except SinkRejected as error:
            raise SinkRejected(
                f"{error}: the position of the pipeline is {len(text)} bytes long; "
                "raise the brokers' offset.metadata.max.bytes"
            ) from None
        self._repeat(producer.commit_transaction)
        self._settings.traffic.commits += 1
        self._newest, self._count, self._topic = stored, stored.offset, None

    def abort(self) -> None:
        """Abort the transaction, if a broker answers; a new producer is needed afterwards."""
        self.client.spent = True
        self._settings.traffic.aborts += self._topic is not None
        if self._topic is not None and not self._hangs:
            stopped = self.client.stopped.is_set()
            with contextlib.suppress(KafkaException):
                self.client.producer.abort_transaction(_SLICE if stopped else _ABORT_SECONDS)

    def _read(self) -> TopicPartition | None:
        """Return the offset of the group that holds the newest position; None if there is none."""
        # librdkafka's admin interface could list the group's offsets in one call, but it was
        # observed to crash the process while the group's coordinator was still loading.
        # It is librdkafka #5040.
        properties = {"group.id": self._name, "isolation.level": "read_committed"}
        consumer = Consumer({**self._settings.connection(), **properties}, logger=LOGGER)
        offsets: list[TopicPartition] = []

        def ask(_: float) -> None:
            topics = consumer.list_topics(timeout=_ASK_SECONDS).topics
            partitions = [TopicPartition(topic, 0) for topic in topics]
            offsets[:] = consumer.committed(partitions, timeout=_ASK_SECONDS)

        try:
            self._repeat(ask)
        finally:
            if not self._hangs:
                consumer.close()
        for offset in offsets:
            if offset.error is not None and offset.error.code() not in _NOT_OURS:
                raise translated(f"{self.client.where}: group {self._name!r}", offset.error)
        stored = [offset for offset in offsets if offset.error is None and offset.offset >= 0]
        return max(stored, key=lambda offset: offset.offset, default=None)

    def _repeat(self, call: Callable[[float], object]) -> None:
        """Repeat a call until it succeeds, fails for good, runs out of time, or is stopped."""
        deadline = time.monotonic() + self._seconds
        while True:
            self.client.raise_when_stopped()
            try:
                self._call_in_time(call)
            except KafkaException as exception:
                error = error_of(exception)
                self.client.serve()
                passing = error.retriable() or error.code() in _TRANSIENT
                if not passing or error.txn_requires_abort() or time.monotonic() > deadline:
                    raise self.client.failure(error) from None
                self.client.stopped.wait(_PAUSE)
            else:
                return

    def _call_in_time(self, call: Callable[[float], object]) -> None:
        """Run a call in a thread; if it does not return, give it up together with the producer.

        librdkafka promises to return in time, but `send_offsets_to_transaction` was observed to
        wait forever when it was repeated after broken connections.
        """
        failure: list[Exception] = []

        def run() -> None:
            try:
                call(_SLICE)
            except Exception as error:  # noqa: BLE001 - raised below
                failure.append(error)

        thread = threading.Thread(target=run, name="kafka transaction", daemon=True)
        thread.start()
        deadline = time.monotonic() + _HANG_SECONDS
        thread.join(_SLICE)
        while thread.is_alive():
            if self.client.stopped.is_set() or time.monotonic() > deadline:
                self._hangs = self.client.spent = True
                self.client.raise_when_stopped()
                raise SinkUnavailable(f"{self.client.where}: the transaction hangs")
            thread.join(_PAUSE)
        if failure:
            raise failure[0]

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except KafkaException as exception:
            self.client.serve()
            raise self.client.failure(error_of(exception)) from None


def _packed(text: str) -> str:
    if len(text) <= _PLAIN_TEXT:
        return text
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _unpacked(text: str) -> str:
    if text.startswith("{"):
        return text
    try:
        return zlib.decompress(base64.b64decode(text, validate=True)).decode()
    except (ValueError, zlib.error):
        return text
