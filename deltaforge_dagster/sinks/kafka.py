"""Kafka: each message becomes one record of the topic its row names.

A record has the message key, the envelope as its value, the event's headers as headers, and
`df-replay` with the run's id in a replay. Which partition it goes to follows from the key, so that
all changes of a row stand in one partition, in the order of the log. Topics are never made here,
but the brokers may make them (`auto.create.topics.enable`).

Messages leave in pieces (`kafka_client`), the next one only after the brokers have acknowledged
the one before. So after any error each partition holds a beginning of what goes there, and nothing
after a gap.

At least once: the producer is idempotent, so its own retries repeat nothing; a batch that is sent
again does. Exactly once: each batch is a transaction that holds the sink's position, too
(`kafka_transactions`). A replay, which moves no position, is sent without transactions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
    SpecError,
)
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sinks.kafka_client import Client, Refusal, Settings, text_ends
from deltaforge_dagster.sinks.kafka_errors import translated
from deltaforge_dagster.sinks.kafka_transactions import Transactions

PIECE_ROWS = 20_000
PIECE_BYTES = 16 << 20
"""Up to both, unless a single message is larger, messages are handed over between two looks at the
guard, and acknowledged together."""

_WHERE = frozenset(["bootstrap.servers", "metadata.broker.list"])


class KafkaSink:
    """Sends to the topics of one Kafka cluster.

    Args:
        sink_id: Names the sink in messages.
        brokers: `host:port`, several with commas.
        client_conf: Properties of librdkafka that win over the sink's own.
        send_timeout: Seconds in which the brokers must acknowledge what was handed to them.
        lease_seconds: How long a run that stalls now keeps its lease at least; what it has not
            sent by then is dead.
        transactional_id: Name of the sink's transactions and of its position, for delivery exactly
            once.
    """

    def __init__(
        self,
        sink_id: str,
        brokers: str,
        client_conf: Mapping[str, str] | None = None,
        *,
        send_timeout: float = 30.0,
        lease_seconds: float = 25.0,
        transactional_id: str | None = None,
    ) -> None:
        self._settings = Settings(sink_id, brokers, client_conf or {}, send_timeout, lease_seconds)
        self._transactional_id = transactional_id
        self._client: Client | None = None
        self._transactions: Transactions | None = None
        self._use = threading.RLock()  # held while connecting and sending
        self._closed = threading.Event()
        self._closed.set()

    @property
    def exactly_once(self) -> bool:
        """Whether there is a transactional id."""
        return self._transactional_id is not None

    def check(self) -> None:
        """Let the library read `client_conf`; no broker is connected to.

        Raises:
            SpecError: It has a property that there is not, or an impossible value. Files that it
                names may be on another machine and are not looked for.
        """
        conf = {
            name: text for name, text in self._settings.client_conf.items() if name not in _WHERE
        }
        try:
            client = Client(
                replace(self._settings, brokers="", client_conf=conf), self._transactional_id
            )
        except SpecError as error:
            if ".location" not in str(error):
                raise
        else:
            client.discard()

    def open(self) -> None:
        """Wait for an answer of a broker; may be called again after `close`.

        Raises:
            SinkUnavailable: No broker answers.
            AuthFailed: User, password or certificate refused.
            SpecError: `client_conf` has a property that there is not, or an impossible value.
        """
        with self._used():
            self._closed.clear()
            client = self._renewed().client if self.exactly_once else self._connected()
            client.connect()

    def position(self) -> SinkPosition | None:
        """Return the position that the cluster holds; None when it holds or keeps none.

        Ends every other sender with the same transactional id.

        Raises:
            SinkUnavailable: No broker answers.
            PermissionMissing: An ACL is missing.
            SinkRejected: Something else stands in its place.
        """
        if not self.exactly_once:
            return None
        with self._used():
            transactions = self._renewed()
            transactions.take_over()
            return transactions.position()

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Append the batch's messages to their topics and return the last ordinal.

        With an origin the batch is one transaction; several, if it takes very long.

        Raises:
            SinkUnavailable: Not acknowledged in time, a topic does not exist, closed.
            AuthFailed: The brokers want other credentials by now.
            PermissionMissing: An ACL is missing.
            SinkRejected: A message is too large, or refused for another lasting reason.
            PositionMoved: Another sender has taken over.
        """
        with self._used():
            if batch.origin is None:
                client = self._connected()
                for piece in _pieces(batch.messages):
                    self._send(client, batch, piece, guard)
            else:
                self._send_exactly_once(self._transacting(), batch, guard)
            return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """End the connection, also under a thread that is sending: its `send` then fails."""
        self._closed.set()
        for client in self._clients():
            client.stopped.set()
        if self._use.acquire(timeout=1):  # else the thread will see it soon
            try:
                self._drop()
            finally:
                self._use.release()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._use:
            try:
                yield
            finally:
                if self._closed.is_set():
                    self._drop()

    def _send(
        self, client: Client, batch: SinkBatch, piece: pa.RecordBatch, guard: SendGuard
    ) -> None:
        for topic in cast("list[str]", piece.column("destination").unique().to_pylist()):
            client.check_topic(topic)
        guard()  # as late as can be: the answer about a topic may have taken long
        client.raise_when_stopped()
        refusal = client.send(piece, batch.replay, guard)
        if refusal is not None:
            raise _refused(client, refusal, batch.segment, piece)

    def _send_exactly_once(
        self, transactions: Transactions, batch: SinkBatch, guard: SendGuard
    ) -> None:
        transactions.take_over()
        sent = 0
        try:
            for piece in _pieces(batch.messages):
                transactions.begin(cast("str", piece.column("destination")[0].as_py()))
                self._send(transactions.client, batch, piece, guard)
                sent += piece.num_rows
                if sent == batch.messages.num_rows or transactions.due:
                    guard()
                    transactions.commit(batch.position_at(sent - 1))
        except BaseException:
            transactions.abort()
            raise

    def _connected(self) -> Client:
        """Return a client that can send without transactions; makes one when there is none."""
        self._raise_when_closed()
        if self._client is None or not self._client.usable:
            self._client = Client(self._settings)
        self._client.stopped.clear()
        self._raise_when_closed()  # `close` may have come before there was a client to stop
        return self._client

    def _transacting(self) -> Transactions:
        """Return what sends in transactions, unless it failed: then the position must be read."""
        self._raise_when_closed()
        if self._transactions is not None and self._transactions.client.spent:
            raise PositionMoved(
                f"{self._transactions.client.where}: a transaction has failed; what has arrived "
                "must be read before anything more is sent"
            )
        return self._renewed()

    def _renewed(self) -> Transactions:
        """Return what can send in transactions; makes it when there is none."""
        self._raise_when_closed()
        assert self._transactional_id is not None
        if self._transactions is None or self._transactions.client.spent:
            self._transactions = Transactions(self._settings, self._transactional_id)
        self._raise_when_closed()
        return self._transactions

    def _raise_when_closed(self) -> None:
        if self._closed.is_set():
            raise SinkUnavailable(f"sink {self._settings.sink_id}: closed")

    def _clients(self) -> list[Client]:
        transactions = self._transactions
        return [one for one in (self._client, transactions and transactions.client) if one]

    def _drop(self) -> None:
        transactions, self._transactions = self._transactions, None
        if transactions is not None:
            transactions.client.discard()
        # After a timeout the same producer must go on (see `kafka_client`), it only rests now.
        if self._client is not None and not (self._client.usable and self._client.timed_out):
            self._client.discard()
            self._client = None


def _refused(
    client: Client, refusal: Refusal, segment: int, piece: pa.RecordBatch
) -> DeltaforgeError:
    row = _row_of(refusal, piece)
    topic = piece.column("destination")[row].as_py()
    ordinal = piece.column("ordinal")[row].as_py()
    error = translated(f"{client.where}: topic {topic!r}", refusal.error)
    if not isinstance(error, SinkRejected):
        return error
    size = len(piece.column("value")[row].as_py().encode())
    return SinkRejected(
        f"{error}: the message of segment {segment}, ordinal {ordinal}, {size} bytes; raise "
        "the topic's max.message.bytes, or leave out what makes it so large"
        if "TOO_LARGE" in refusal.error.name()
        else f"{error}: the message of segment {segment}, ordinal {ordinal}"
    )


def _pieces(messages: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield consecutive slices within `PIECE_ROWS` and `PIECE_BYTES`."""
    ends = text_ends(messages.column("value"))
    start = 0
    while start < messages.num_rows:
        most = int(np.searchsorted(ends, int(ends[start]) + PIECE_BYTES, side="right")) - 1
        stop = min(max(most, start + 1), start + PIECE_ROWS)
        yield messages.slice(start, stop - start)
        start = stop


def _row_of(refusal: Refusal, piece: pa.RecordBatch) -> int:
    """Return the row of the refused message; the largest one when the client refused it itself."""
    values = piece.column("value")
    if refusal.topic:
        found = pc.index(values.cast(pa.binary()), refusal.value).as_py()
        if found >= 0:
            return int(found)
    return int(np.argmax(np.diff(text_ends(values))))
