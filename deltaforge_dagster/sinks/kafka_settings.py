"""How a producer of librdkafka is set, by default, by `client_conf`, and whatever that says.

Most of it is for order through failures:

- The producer is idempotent: it numbers its messages, and brokers take each partition's numbers
  without gaps and only once. Retries have no count, only a time (`message.timeout.ms`).
- A message that a broker refuses for good stops the producer before a later one of the same
  partition can pass it (`enable.gapless.guarantee`); in a transaction, it fails the transaction.
- A message is dead, delivered or not, before its sender may have lost its lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.base import Traffic

_DEFAULTS: Mapping[str, str] = {
    "acks": "all",
    "batch.size": str(1 << 20),
    "compression.type": "lz4",
    "enable.idempotence": "true",
    "linger.ms": "5",
    "log.connection.close": "false",
    "max.in.flight": "5",
    "message.max.bytes": "1000000000",  # the brokers' own limit counts, after compression
    "request.timeout.ms": "30000",
    "retries": "2147483647",
    "retry.backoff.ms": "100",
    "socket.keepalive.enable": "true",
    "statistics.interval.ms": "5000",
}
_OWN: Mapping[str, str] = {  # whatever `client_conf` says: a piece is what limits the queue
    "queue.buffering.max.kbytes": "2147483647",
    "queue.buffering.max.messages": "1000000",
}
_ALONE: Mapping[str, str] = {"batch.num.messages": "1"}
_PLAIN: Mapping[str, str] = {"enable.gapless.guarantee": "true"}
_TRANSACTIONAL: Mapping[str, str] = {
    "request.timeout.ms": "15000",
    "transaction.timeout.ms": "60000",
}
_MESSAGE_TIMEOUT = {False: 60_000, True: 30_000}
"""Milliseconds, without and with transactions."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach a cluster.

    Attributes:
        sink_id: Names the sink in messages.
        brokers: `host:port`, several with commas.
        client_conf: Properties of librdkafka that win over ours.
        send_timeout: Seconds a piece may take.
        lease_seconds: A message must be dead after so long: its sender may have lost its lease.
        traffic: Where the clients of a sink, one after another, count what they do.
    """

    sink_id: str
    brokers: str
    client_conf: Mapping[str, str]
    send_timeout: float
    lease_seconds: float
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def properties(self, transactional_id: str | None, *, alone: bool = False) -> dict[str, str]:
        """Return the properties of a producer; `alone` is each message in a batch of its own."""
        transactional = transactional_id is not None
        properties = {
            "bootstrap.servers": self.brokers,
            "client.id": f"deltaforge-{self.sink_id}",
            **_DEFAULTS,
            **(_TRANSACTIONAL if transactional else _PLAIN),
            **self.client_conf,
            **_OWN,
            **(_ALONE if alone else {}),
        }
        properties.pop("transactional.id", None)
        if transactional_id is not None:
            properties["transactional.id"] = transactional_id
        if properties["enable.idempotence"].lower() not in {"true", "t", "1"}:
            properties.pop("enable.gapless.guarantee", None)  # cannot be without
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
        """Return the properties of a client that only asks."""
        conf = {name: text for name, text in self.client_conf.items() if name != "transactional.id"}
        return {
            "bootstrap.servers": self.brokers,
            "client.id": f"deltaforge-{self.sink_id}",
            **conf,
        }

    def transaction_seconds(self, transactional_id: str) -> float:
        """Return how long a transaction may last."""
        name = "transaction.timeout.ms"
        return _number(self.sink_id, name, self.properties(transactional_id)[name]) / 1000


def _number(sink_id: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"sink {sink_id}: client_conf: {name} must be a whole number") from None
