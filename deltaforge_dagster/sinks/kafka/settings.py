"""Properties of a librdkafka producer: defaults, overrides by `client_conf`, and fixed properties.

Most of them preserve the order of messages through failures:

- The producer is idempotent: it numbers its messages, and brokers accept each partition's numbers
  without gaps and only once. Retries are limited by time (`message.timeout.ms`), not by number.
- A message that a broker refuses permanently stops the producer before a later message of the same
  partition can pass it (`enable.gapless.guarantee`); in a transaction, it fails the transaction.
- A message is delivered or has timed out before its sender can have lost its lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.base import Traffic
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
    "max.in.flight": "5",
    "message.max.bytes": "1000000000",  # the brokers' own limit counts, after compression
    **_RECONNECT,
    "request.timeout.ms": "30000",
    "retries": "2147483647",
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


_MESSAGE_TIMEOUT = {False: 60_000, True: 30_000}
"""Milliseconds; the key says whether the producer is transactional."""


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
