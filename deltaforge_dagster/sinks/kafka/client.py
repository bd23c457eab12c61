"""One librdkafka producer: its properties, and the outcome of its messages.

librdkafka works in its own threads: `produce` puts messages into a queue in memory, and the threads
collect, compress and send batches. They report outcomes while `poll` or `flush` runs. A `Client`
turns this into client chunks that are acknowledged as a whole or fail.

Properties have defaults, which `client_conf` overrides, or are fixed. Most of them preserve the
order of messages through failures:

- The producer is idempotent: it numbers its messages, and brokers accept each partition's numbers
  without gaps and only once. Retries are limited by time (`message.timeout.ms`), not by number.
- A message that a broker refuses permanently stops the producer before a later message of the same
  partition can pass it (`enable.gapless.guarantee`); in a transaction, it fails the transaction.
- A message is delivered or has timed out before its sender can have lost its lease.

Two more rules do so:

- A message that times out must not be overtaken by those behind it. So a chunk's own deadline ends
  earlier than `message.timeout.ms`, and the client then empties the queue at once.
- The client waits for messages that are on their way to a broker: they are acknowledged or time out
  soon. Afterwards the same producer continues, with a higher epoch: if a hanging broker still has
  the old bytes unread, it refuses them as soon as it has taken newer messages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import orjson
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from deltaforge_dagster.errors import DeltaforgeError, SinkUnavailable, SpecError
from deltaforge_dagster.sinks.base import SendGuard, Traffic
from deltaforge_dagster.sinks.kafka.librdkafka import (
    UNDELIVERABLE,
    error_of,
    is_auth,
    is_misunderstanding,
    translated,
)
from deltaforge_dagster.sinks.kafka.producer import Producer
from deltaforge_dagster.sinks.kafka.sink_type import IS_TRUE

_RECONNECT: Mapping[str, str] = {"reconnect.backoff.ms": "20"}
"""librdkafka waits half of this time before a new client's next connection: the first one, to any
broker, tells it which brokers there are. With its default that is 50 ms, and a transaction needs
several new connections.
"""

_DEFAULTS: Mapping[str, str] = {
    "acks": "all",
    "compression.type": "lz4",
    "enable.idempotence": "true",
    "linger.ms": "5",
    "log.connection.close": "false",
    "max.in.flight": "5",  # the most that an idempotent producer may have
    "message.max.bytes": "1000000000",  # the brokers' own limit counts, after compression
    **_RECONNECT,
    "request.timeout.ms": "30000",
    "retries": "2147483647",  # `message.timeout.ms` is the limit
    "retry.backoff.ms": "100",
    "socket.keepalive.enable": "true",
    "statistics.interval.ms": "5000",
}
_FIXED: Mapping[str, str] = {  # not overridable: client chunks limit the queue
    "queue.buffering.max.kbytes": "2147483647",
    "queue.buffering.max.messages": "1000000",
}
_ALONE: Mapping[str, str] = {"batch.num.messages": "1"}
_NOT_TRANSACTIONAL: Mapping[str, str] = {"enable.gapless.guarantee": "true"}
_TRANSACTIONAL: Mapping[str, str] = {
    "request.timeout.ms": "15000",
    "transaction.timeout.ms": "60000",
}
_COMPRESSION = ("compression.type", "compression.codec", "compression.codec.type")

_MESSAGE_TIMEOUT = {False: 60_000, True: 30_000}
"""Milliseconds; the key says whether the producer is transactional."""

_SLICE = 0.1
"""Seconds of one wait for the library, and thus the delay until a `close` is noticed."""

_MEAN_FILL = 0.9
"""How full record batches are on average.

None overflows if keys spread messages over partitions almost evenly.
"""

_GUARD_SECONDS = 2.0
"""Seconds between calls of the guard while brokers do not answer.

The guard was last called before the first message of the chunk, and the lease lasts for a while
from then.
"""

_TOPIC_SECONDS = 5.0
"""How long a topic may be unknown, because brokers take a moment to create it."""

_NO_TOPIC = frozenset([KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE])

_NO_ANSWER = frozenset([KafkaError._TIMED_OUT, KafkaError._TRANSPORT])  # noqa: SLF001

_DEADLINE = 0.8
"""Fraction of `message.timeout.ms` after which the client itself gives up a chunk."""

_CONSEQUENCES = frozenset(
    [
        KafkaError._FATAL,  # noqa: SLF001
        KafkaError._GAPLESS_GUARANTEE,  # noqa: SLF001
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
        KafkaError._PURGE_QUEUE,  # noqa: SLF001
        KafkaError._STATE,  # noqa: SLF001
    ]
)
"""Codes of errors that are only consequences of another error."""


class Batching(Enum):
    """How large record batches are; the value is their size in bytes before compression.

    Fewer and larger ones need a fifth less of the brokers' processor time. Brokers limit the size
    after compression, to 1 MiB by default.
    """

    LARGE = 2 << 20
    """Brokers accept them if compression halves them.

    It does so with all but random or compressed data.
    """
    USUAL = 1 << 20
    """Brokers accept them without any compression."""
    ALONE = 0
    """A batch holds one message, so a refusal concerns that one."""


@dataclass(frozen=True, slots=True)
class KafkaClientSettings:
    """How to reach a cluster.

    Attributes:
        sink_id: Name of the sink in messages.
        brokers: `host:port`, several separated by commas.
        client_conf: Properties of librdkafka, which override the defaults.
        send_timeout: Seconds that a client chunk may take.
        lease_seconds: Time after which a message must have timed out, because its sender may have
            lost its lease by then.
        traffic: Counts shared by the successive clients of a sink.
    """

    sink_id: str
    brokers: str
    client_conf: Mapping[str, str]
    send_timeout: float
    lease_seconds: float
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def batching(self) -> Batching:
        """How large record batches are until one is refused."""
        conf = self.client_conf
        compressed = all(conf.get(name, "").lower() != "none" for name in _COMPRESSION)
        return Batching.LARGE if compressed and "batch.size" not in conf else Batching.USUAL

    def properties(
        self, transactional_id: str | None, batching: Batching = Batching.USUAL
    ) -> dict[str, str]:
        """Return the properties of a producer."""
        transactional = transactional_id is not None
        properties = {
            "bootstrap.servers": self.brokers,
            "client.id": f"deltaforge-{self.sink_id}",
            **_DEFAULTS,
            "batch.size": str(batching.value or Batching.USUAL.value),
            **(_TRANSACTIONAL if transactional else _NOT_TRANSACTIONAL),
            **self.client_conf,
            **_FIXED,
            **(_ALONE if batching is Batching.ALONE else {}),
        }
        properties.pop("transactional.id", None)
        if transactional_id is not None:
            properties["transactional.id"] = transactional_id
        if properties["enable.idempotence"].lower() not in IS_TRUE:
            properties.pop("enable.gapless.guarantee", None)  # requires idempotence
        # The second name is an alias of the first.
        limits = [self.lease_seconds * 1000]
        for name in ("message.timeout.ms", "delivery.timeout.ms", "transaction.timeout.ms"):
            if name in properties:
                limits.append(_number(self.sink_id, name, properties[name]) or limits[0])
        if not set(properties) & {"message.timeout.ms", "delivery.timeout.ms"}:
            limits.append(_MESSAGE_TIMEOUT[transactional])
        properties.pop("delivery.timeout.ms", None)
        properties["message.timeout.ms"] = str(int(min(limits)))
        return properties

    def connection(self) -> dict[str, str | int | float | bool]:
        """Return the properties of a client that only queries the cluster."""
        conf = {name: text for name, text in self.client_conf.items() if name != "transactional.id"}
        return {
            "bootstrap.servers": self.brokers,
            "client.id": f"deltaforge-{self.sink_id}",
            **_RECONNECT,
            **conf,
        }

    def transaction_seconds(self, transactional_id: str) -> float:
        """Return how many seconds a transaction may last."""
        name = "transaction.timeout.ms"
        return _number(self.sink_id, name, self.properties(transactional_id)[name]) / 1000


def _number(sink_id: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"sink {sink_id}: client_conf: {name} must be a whole number") from None


class Client:
    """A producer. Used by one thread, except for `stopped` and `discard`.

    Args:
        settings: Cluster and properties.
        transactional_id: Makes it a transactional producer.
        batching: How large record batches are.

    Raises:
        SpecError: A property in `client_conf` is unknown or has an invalid value.

    Attributes:
        producer: The producer of librdkafka.
        where: Prefix of messages about this client.
        batching: As given.
        stopped: Set to end every wait.
        timed_out: A message timed out on its way; it could overtake the messages of a new producer.
        spent: The producer cannot send any more.
    """

    def __init__(
        self,
        settings: KafkaClientSettings,
        transactional_id: str | None = None,
        batching: Batching = Batching.USUAL,
    ) -> None:
        properties = settings.properties(transactional_id, batching)
        self.batching = batching
        self._batch_bytes = int(properties["batch.size"])
        self.where = f"sink {settings.sink_id}: kafka at {settings.brokers}"
        self.stopped = threading.Event()
        message_timeout = int(properties["message.timeout.ms"]) / 1000
        self._seconds = min(settings.send_timeout, message_timeout * _DEADLINE)
        self._settle_seconds = message_timeout + 5
        self._connect_seconds = settings.send_timeout
        self._transactional = transactional_id is not None
        self._trouble: KafkaError | None = None
        self._refusals: list[RefusedRecord] = []
        self._fatal: KafkaError | None = None
        self._traffic = settings.traffic
        self._retries = 0
        self._partitions: dict[str, int] = {}
        self.spent = False
        self.timed_out = False
        try:
            self.producer = Producer(
                properties,
                on_refusal=self._on_refusal,
                on_error=self._on_error,
                on_statistics=self._on_statistics,
            )
        except KafkaException as error:
            raise SpecError(
                f"sink {settings.sink_id}: client_conf: "
                f"{_without_values(error_of(error).str(), settings.client_conf)}"
            ) from None

    @property
    def usable(self) -> bool:
        """Whether the client can continue: no fatal error, no message queued or on its way."""
        self.serve()  # `len` also counts events that have not been polled
        return not self.spent and not len(self.producer)

    def connect(self) -> None:
        """Wait until a broker answers; return at once if one has answered before.

        Raises:
            SinkUnavailable: No broker answers in time.
            AuthFailed: A broker refused the credentials, or its certificate was refused.
        """
        if self._transactional:
            # A transactional producer may connect only after a second, unless it needs a broker.
            with contextlib.suppress(KafkaException):
                self.producer.ask(None, _SLICE)
        deadline = time.monotonic() + self._connect_seconds
        while time.monotonic() < deadline:
            self.raise_when_stopped()
            if self.producer.cluster_id(_SLICE):
                return
            self.serve()
            if self._trouble is not None and is_auth(self._trouble):
                break
        raise self._unreachable(f"no answer within {self._connect_seconds:g} s")

    def check_topic(self, topic: str) -> None:
        """Check that a topic exists, before the first message to it.

        Raises:
            SinkUnavailable: The topic does not exist, or no broker answers.
            PermissionMissing: The user may not describe the topic.
            SinkRejected: The topic's name is invalid.
        """
        if topic in self._partitions:
            return
        where = f"{self.where}: topic {topic!r}"
        begun = time.monotonic()
        while (error := self._topic_error(topic)) is not None:
            self.raise_when_stopped()
            waited = time.monotonic() - begun
            if error.code() == KafkaError._TIMED_OUT:  # noqa: SLF001
                if waited > self._seconds:
                    raise self._unreachable(f"no answer about topic {topic!r}")
            elif error.code() not in _NO_TOPIC:
                raise translated(where, error)
            elif waited > _TOPIC_SECONDS:
                raise SinkUnavailable(
                    f"{where} does not exist and the brokers do not make it: create it, or set "
                    "auto.create.topics.enable on the brokers"
                )
            self.stopped.wait(_SLICE)

    def room(self, topic: str) -> int:
        """Return the bytes of a client chunk: about one record batch for each partition of a topic.

        librdkafka has one request for each partition on its way. While further messages wait for
        the answer, librdkafka's thread does not sleep, which took half of its processor time.
        """
        self.check_topic(topic)
        return int(max(self._partitions[topic], 1) * self._batch_bytes * _MEAN_FILL)

    def _topic_error(self, topic: str) -> KafkaError | None:
        try:
            error, partitions = self.producer.ask(topic, 5 * _SLICE)
        except KafkaException as exception:
            self.serve()
            error = error_of(exception)
            if error.code() in _NO_ANSWER and not (self._trouble and is_auth(self._trouble)):
                return KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001
            raise self.failure(error) from None
        if error is None:
            self._partitions[topic] = partitions
        return error

    def send(
        self, pieces: Sequence[pa.RecordBatch], replay: str | None, guard: SendGuard
    ) -> list[RefusedRecord]:
        """Send a client chunk (columns of `sinks.base.MESSAGES`) and wait until it is acknowledged.

        If that fails, none of its messages remain in the queue or, as far as the client can know,
        on their way.

        Returns:
            Messages that brokers refused permanently, the most specific refusals first; empty if
            the
            brokers accepted all messages.

        Raises:
            SinkUnavailable: Not acknowledged in time, or stopped.
            Exception: What `guard` raised.
        """
        self._refusals.clear()
        self._trouble = None
        try:
            row = 0
            for piece in pieces:
                self.producer.produce(piece, replay, first_row=row)
                row += len(piece)
                if self._refusals:
                    break
            in_time = self._wait(guard)
        except BaseException:
            self.producer.purge()
            self.spent = True
            raise
        if in_time and not self._refusals and self._fatal is None:
            return []
        self._settle()
        if in_time:
            reasons = self._reasons()
            if reasons[0].error.code() != KafkaError._MSG_TIMED_OUT:  # noqa: SLF001
                self.spent = True
                return reasons
        raise self._unreachable(f"not acknowledged within {self._seconds:g} s")

    def serve(self) -> None:
        """Process the outcomes and errors that have been reported since the last call."""
        self.producer.poll(0)

    def failure(self, error: KafkaError) -> DeltaforgeError:
        """Return the error to raise for one that a call returned, or the fatal one behind it."""
        if self._fatal is not None and error.code() in _CONSEQUENCES:
            return translated(self.where, self._fatal)
        if error.code() in _NO_ANSWER:
            return self._unreachable(error.str())
        return translated(self.where, error)

    def _reasons(self) -> list[RefusedRecord]:
        """Return the refusals that are not consequences of others, those about messages first."""
        refusals = [
            refusal for refusal in self._refusals if refusal.error.code() not in _CONSEQUENCES
        ]
        if not refusals and self._fatal is not None:
            return [RefusedRecord(self._fatal, None)]
        return sorted(refusals or self._refusals[:1], key=lambda refusal: refusal.cause is None)

    def _wait(self, guard: SendGuard) -> bool:
        """Wait for all acknowledgements or the first refusal; return False if time runs out."""
        begun = asked = time.monotonic()
        while self.producer.flush(_SLICE) and not self._refusals and self._fatal is None:
            self.raise_when_stopped()
            now = time.monotonic()
            if now - begun > self._seconds:
                return False
            if now - asked > _GUARD_SECONDS:
                guard()
                asked = now
        return True

    def raise_when_stopped(self) -> None:
        """Raise `SinkUnavailable` once `stopped` is set."""
        if self.stopped.is_set():
            raise SinkUnavailable(f"{self.where}: closed")

    def discard(self) -> None:
        """Drop all messages that have not left yet; may be called from any thread."""
        self.stopped.set()
        if len(self.producer):
            self.producer.purge(blocking=False)

    def _settle(self) -> None:
        """Empty the queue and wait for messages that are on their way."""
        self._partitions.clear()
        self.producer.purge(in_flight=False)
        deadline = time.monotonic() + self._settle_seconds
        while self.producer.flush(_SLICE):
            if self.stopped.is_set() or time.monotonic() > deadline:
                self.producer.purge()
                break
            if self.spent:  # messages behind a refused one have come back to the queue
                self.producer.purge(in_flight=False)
        self.serve()

    def _unreachable(self, text: str) -> DeltaforgeError:
        if self._trouble is None:
            return SinkUnavailable(f"{self.where}: {text}")
        if is_auth(self._trouble):
            return translated(self.where, self._trouble)
        if self._trouble.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001
            return SinkUnavailable(
                f"{self.where}: {text}; if the brokers are up, check security.protocol in "
                "client_conf: they close connections that they do not understand"
            )
        text = f"{self.where}: {text} ({self._trouble.str()})"
        if is_misunderstanding(self._trouble):
            text += "; check security.protocol in client_conf"
        return SinkUnavailable(text)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.spent = True
            if self._fatal is None or self._fatal.code() in _CONSEQUENCES:
                self._fatal = error
        # "All brokers down" is less specific than the error before it.
        elif self._trouble is None or error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001
            self._trouble = error

    def _on_statistics(self, text: str) -> None:
        statistics = orjson.loads(text)
        self._traffic.waiting, self._traffic.waiting_bytes = (
            statistics["msg_cnt"],
            statistics["msg_size"],
        )
        retries = sum(broker["txretries"] for broker in statistics["brokers"].values())
        self._traffic.retries += retries - self._retries
        self._retries = retries

    def _on_refusal(self, error: KafkaError, row: int) -> None:
        self.timed_out |= error.code() == KafkaError._MSG_TIMED_OUT  # noqa: SLF001
        self._refusals.append(RefusedRecord(error, row))


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A message that did not arrive, and why.

    `row` is its row in its client chunk, None if unknown.
    """

    error: KafkaError
    row: int | None

    @property
    def cause(self) -> str | None:
        """Cause of `errors.Undeliverable` if the message itself is at fault, else None."""
        return UNDELIVERABLE.get(self.error.code())


def _without_values(text: str, client_conf: Mapping[str, str]) -> str:
    for value in client_conf.values():
        text = text.replace(f'"{value}"', "its value")
    return text
