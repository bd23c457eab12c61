"""Kafka: each message becomes one record of the topic its row names.

A record has the message key, the envelope as its value, the event's headers as headers, and
`df-replay` with the run's id in a replay. Which partition it goes to follows from the key, so that
all changes of a row stand in one partition, in the order of the log. Topics are never made here,
but the brokers may make them (`auto.create.topics.enable`).

Messages leave in pieces (`kafka_client`), the next one only after the brokers have acknowledged
the one before. So after any error each partition holds a beginning of what goes there, and nothing
after a gap.

A message that can never be delivered, too large or with an impossible topic, is found by delivering
everything before it. Brokers refuse whole batches: what was refused goes once more, each message in
a batch of its own, until one is refused alone.

At least once: the producer is idempotent, so its own retries repeat nothing; a batch that is sent
again does. Exactly once: each batch is a transaction that holds the sink's position, too
(`kafka_transactions`). A replay, which moves no position, is sent without transactions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionMoved,
    SinkRejected,
    SpecError,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import (
    SendGuard,
    SinkBatch,
    SinkPosition,
    Traffic,
    whole_ordinals,
)
from deltaforge_dagster.sinks.kafka_client import Client, Refusal, text_ends
from deltaforge_dagster.sinks.kafka_errors import translated
from deltaforge_dagster.sinks.kafka_settings import Settings
from deltaforge_dagster.sinks.kafka_transactions import Transactions
from deltaforge_dagster.sinks.use import Use

PIECE_ROWS = 20_000
PIECE_BYTES = 16 << 20
"""Up to both, unless a single message is larger, messages are handed over between two looks at the
guard, and acknowledged together."""

_TOPIC_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,249}")
"""Kafka's rule (`org.apache.kafka.common.internals.Topic`)."""

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
        self._use = Use(sink_id, self._drop)

    @property
    def exactly_once(self) -> bool:
        """Whether there is a transactional id."""
        return self._transactional_id is not None

    @property
    def traffic(self) -> Traffic:
        """What the library does by itself."""
        return self._settings.traffic

    @property
    def commits(self) -> bool:
        """Whether a batch is a transaction."""
        return self.exactly_once

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
        with self._use.held():
            self._use.closed.clear()
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
        with self._use.held():
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
            Undeliverable: A message can never be delivered. Everything before its ordinal is
                acknowledged; what comes after it may have arrived, but not with an origin.
            SinkRejected: Refused for another lasting reason.
            PositionMoved: Another sender has taken over.
        """
        with self._use.held():
            stop, undeliverable = self._impossible_topic(batch)
            send = self._acknowledged if batch.origin is None else self._committed
            start, alone = 0, False
            while start < stop:
                try:
                    for place in send(batch, start, stop, guard, alone=alone):
                        start = place
                except _Refused as refused:
                    if alone:
                        stop, undeliverable = refused.row, refused.error
                    alone = True
                    if batch.origin is not None:
                        self._take_over_again(guard, alone=start < stop)
            if alone and batch.origin is not None:
                self._take_over_again(guard, alone=False)
            if undeliverable is not None:
                raise undeliverable
            return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """End the connection, also under a thread that is sending: its `send` then fails."""
        self._use.end(self._interrupt)

    def _interrupt(self) -> None:
        for client in self._clients():
            client.stopped.set()

    def _impossible_topic(self, batch: SinkBatch) -> tuple[int, Undeliverable | None]:
        """Return the first row whose topic cannot exist, with the reason; else where rows end."""
        topics = batch.messages.column("destination")
        names = cast("list[str]", topics.unique().to_pylist())  # in the order of their first rows
        name = next((one for one in names if not _TOPIC_NAME.fullmatch(one)), None)
        if name is None:
            return len(topics), None
        first = _first_of_change(batch.messages, pc.index(topics, name).as_py())
        ordinal = cast("int", batch.messages.column("ordinal")[first].as_py())
        return first, Undeliverable(
            f"sink {self._settings.sink_id}: {name!r} cannot be the name of a topic (1 to 249 "
            "letters, digits, `.`, `_` and `-`; not `.` or `..`): the message of segment "
            f"{batch.segment}, ordinal {ordinal}",
            ordinal,
            "routing",
        )

    def _acknowledged(
        self, batch: SinkBatch, start: int, stop: int, guard: SendGuard, *, alone: bool
    ) -> Iterator[int]:
        """Send the batch's rows from `start` to `stop`; yield up to where they are acknowledged."""
        client = self._connected(alone=alone)
        while start < stop:
            start = self._send_piece(client, batch, start, stop, guard)
            yield start

    def _committed(
        self, batch: SinkBatch, start: int, stop: int, guard: SendGuard, *, alone: bool
    ) -> Iterator[int]:
        """Do the same in transactions; yield up to where they are committed."""
        transactions = self._transacting()
        transactions.take_over()
        assert transactions.client.alone == alone
        try:
            while start < stop:
                transactions.begin(cast("str", batch.messages.column("destination")[start].as_py()))
                start = self._send_piece(transactions.client, batch, start, stop, guard)
                if start == stop or transactions.due:
                    guard()
                    transactions.commit(batch.position_at(start - 1))
                    yield start
        except BaseException:
            transactions.abort()
            raise

    def _send_piece(
        self, client: Client, batch: SinkBatch, start: int, stop: int, guard: SendGuard
    ) -> int:
        """Send rows of a batch from `start` on, `stop` at most, and return where they end."""
        end = _end_of_piece(batch.messages, start, stop)
        piece = batch.messages.slice(start, end - start)
        for topic in cast("list[str]", piece.column("destination").unique().to_pylist()):
            client.check_topic(topic)
        guard()  # as late as can be: the answer about a topic may have taken long
        client.raise_when_stopped()
        refusals = client.send(piece, batch.replay, guard)
        if refusals:
            raise _Refused.of(refusals, client.where, batch, start, piece)
        return end

    def _connected(self, *, alone: bool = False) -> Client:
        """Return a client that can send without transactions; makes one when there is none."""
        self._use.raise_when_closed()
        client = self._client
        if client is None or not client.usable or (client.alone != alone and not client.timed_out):
            self._client = client = Client(self._settings, alone=alone)
        client.stopped.clear()
        self._use.raise_when_closed()  # `close` may have come before there was a client to stop
        return client

    def _transacting(self) -> Transactions:
        """Return what sends in transactions, unless it failed: then the position must be read."""
        self._use.raise_when_closed()
        if self._transactions is not None and self._transactions.client.spent:
            raise PositionMoved(
                f"{self._transactions.client.where}: a transaction has failed; what has arrived "
                "must be read before anything more is sent"
            )
        return self._renewed()

    def _take_over_again(self, guard: SendGuard, *, alone: bool) -> None:
        """Go on with another producer after a refusal; nobody else may have sent meanwhile."""
        assert self._transactions is not None
        assert self._transactional_id is not None
        held = self._transactions.newest
        guard()  # or this would end a sender that has taken our place
        self._transactions = Transactions(self._settings, self._transactional_id, alone=alone)
        self._use.raise_when_closed()
        self._transactions.take_over()
        if self._transactions.newest != held:
            self._transactions.client.spent = True
            raise PositionMoved(
                f"{self._transactions.client.where}: another sender with the same pipeline and "
                "sink name was at work on this cluster"
            )

    def _renewed(self) -> Transactions:
        """Return what can send in transactions; makes it when there is none."""
        self._use.raise_when_closed()
        assert self._transactional_id is not None
        if self._transactions is None or self._transactions.client.spent:
            self._transactions = Transactions(self._settings, self._transactional_id)
        self._use.raise_when_closed()
        return self._transactions

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


class _Refused(Exception):  # noqa: N818 - tells what happened, within this module
    """Brokers refused a message, or a batch that has it.

    Attributes:
        row: Of the batch, where the change begins that the message belongs to.
        error: What to tell if the message was refused alone.
    """

    def __init__(self, row: int, error: Undeliverable) -> None:
        super().__init__(str(error))
        self.row = row
        self.error = error

    @classmethod
    def of(
        cls,
        refusals: Sequence[Refusal],
        where: str,
        batch: SinkBatch,
        start: int,
        piece: pa.RecordBatch,
    ) -> Self:
        """Return the first message among those refused for what it is.

        Raises:
            DeltaforgeError: Something else is the reason.
        """
        found = [(_row_of(one, piece), one) for one in refusals if one.cause is not None]
        if not found:
            raise _other_reason(refusals, where, batch.segment, piece)
        row, refusal = min(found, key=itemgetter(0))
        topic, ordinal, size = _named(piece, row)
        assert refusal.cause is not None
        error = Undeliverable(
            f"{where}: topic {topic!r}: {refusal.error.str()} ({refusal.error.name()}): the "
            f"message of segment {batch.segment}, ordinal {ordinal}, {size} bytes"
            f"{_ADVICE.get(refusal.cause, '')}",
            ordinal,
            refusal.cause,
        )
        return cls(_first_of_change(batch.messages, start + row), error)


_ADVICE = {
    "too_large": "; raise the topic's max.message.bytes, or leave out what makes it so large",
}


def _other_reason(
    refusals: Sequence[Refusal], where: str, segment: int, piece: pa.RecordBatch
) -> DeltaforgeError:
    refusal = refusals[0]
    topic, ordinal, _ = _named(piece, _row_of(refusal, piece))
    error = translated(f"{where}: topic {topic!r}", refusal.error)
    if isinstance(error, SinkRejected):
        return SinkRejected(f"{error}: the message of segment {segment}, ordinal {ordinal}")
    return error


def _first_of_change(messages: pa.RecordBatch, row: int) -> int:
    """Return the first row of the change that a row belongs to."""
    ordinals = messages.column("ordinal").to_numpy()
    return int(np.searchsorted(ordinals, ordinals[row]))


def _named(piece: pa.RecordBatch, row: int) -> tuple[str, int, int]:
    """Return topic, ordinal and size of a message."""
    value = piece.column("value")[row].as_py() or ""
    topic, ordinal = (piece.column(name)[row].as_py() for name in ("destination", "ordinal"))
    return topic, ordinal, len(value.encode())


def _end_of_piece(messages: pa.RecordBatch, start: int, stop: int) -> int:
    """Return where a piece ends that begins at `start`: within `PIECE_ROWS` and `PIECE_BYTES`."""
    ends = text_ends(messages.column("value"))
    most = int(np.searchsorted(ends, int(ends[start]) + PIECE_BYTES, side="right")) - 1
    return min(whole_ordinals(messages, start, min(max(most, start + 1), start + PIECE_ROWS)), stop)


def _row_of(refusal: Refusal, piece: pa.RecordBatch) -> int:
    """Return the row of the refused message; the largest one when the client refused it itself."""
    values = piece.column("value")
    if refusal.topic:
        refused = (
            values.is_null()
            if refusal.value is None
            else pc.equal(values.cast(pa.binary()), pa.scalar(refusal.value, pa.binary()))
        )
        found = pc.index(refused, True).as_py()
        if found >= 0:
            return int(found)
    return int(np.argmax(np.diff(text_ends(values))))
