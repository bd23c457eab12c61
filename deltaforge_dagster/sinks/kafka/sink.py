"""The Kafka sink: each message becomes one record of its destination topic.

A record consists of the message key, the envelope as its value, and the event's headers; a replay
adds the header `df-replay` with the run's id. The key determines the partition, so that all changes
of a row are in one partition, in the order of the log. The sink never creates topics, but the
brokers may (`auto.create.topics.enable`).

Messages are sent in client chunks (`client`), each one only after the brokers have acknowledged
the one before it. So after any error each partition holds a prefix of its messages, without gaps.

To find a message that can never be delivered, because it is too large or its topic name is invalid,
the sink delivers everything before it. Brokers refuse whole record batches. After the first one
that is too large, all that follow are smaller (`settings.Batching`). If one is still refused, the
sink sends its messages again, each in a record batch of its own, until one of them is refused
alone. If none is, they are too large only together; after that happens a second time, the rest of
the `SinkBatch` is sent like this.

At least once: the producer is idempotent, so its own retries cause no duplicates, but a `SinkBatch`
that is sent again does. Exactly once: each `SinkBatch` is a transaction that also stores the sink's
position (`transactions`). A replay moves no position and is sent without transactions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal, cast

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
from deltaforge_dagster.sinks.connections import Use
from deltaforge_dagster.sinks.kafka.client import (
    Batching,
    Client,
    KafkaClientSettings,
    RefusedRecord,
)
from deltaforge_dagster.sinks.kafka.librdkafka import translated
from deltaforge_dagster.sinks.kafka.producer import text_ends
from deltaforge_dagster.sinks.kafka.transactions import Transactions

PIECE_ROWS = 20_000
PIECE_BYTES = 16 << 20
"""Limits of a client chunk: its messages are handed to librdkafka between two calls of the guard
and acknowledged together. It exceeds them by less than the messages of a change.
"""

_TOPIC_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,249}")
"""Kafka's rule for topic names (`org.apache.kafka.common.internals.Topic`)."""

_ADDRESS_SETTINGS = frozenset(["bootstrap.servers", "metadata.broker.list"])


class KafkaSink:
    """Sends to the topics of one Kafka cluster.

    Args:
        sink_id: Name of the sink in messages.
        brokers: `host:port`, several separated by commas.
        client_conf: Properties of librdkafka, which override the sink's defaults.
        send_timeout: Seconds in which the brokers must acknowledge a client chunk.
        lease_seconds: Minimum time for which a run that stalls now keeps its lease; messages that
            have not left by then are dropped.
        transactional_id: Name of the sink's transactions and of the group that holds its position,
            for exactly-once delivery.
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
        self._settings = KafkaClientSettings(
            sink_id, brokers, client_conf or {}, send_timeout, lease_seconds
        )
        self._transactional_id = transactional_id
        self._batching = self._settings.batching
        self._client: Client | None = None
        self._transactions: Transactions | None = None
        self._use = Use(sink_id, self._drop)

    @property
    def exactly_once(self) -> bool:
        """Whether there is a transactional id."""
        return self._transactional_id is not None

    @property
    def traffic(self) -> Traffic:
        """The traffic counts of librdkafka."""
        return self._settings.traffic

    @property
    def takes_parts(self) -> bool:
        """Whether each batch is a transaction, which takes long to commit."""
        return self.exactly_once

    def check(self) -> None:
        """Let librdkafka validate `client_conf`, without connecting to a broker.

        Raises:
            SpecError: A property is unknown or has an invalid value. Properties that name files
                (`.location`) are not reported, because the files may exist only on other machines.
        """
        conf = {
            name: text
            for name, text in self._settings.client_conf.items()
            if name not in _ADDRESS_SETTINGS
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
        """Wait until a broker answers; may be called again after `close`.

        Raises:
            SinkUnavailable: No broker answers.
            AuthFailed: User, password or certificate refused.
            SpecError: A property in `client_conf` is unknown or has an invalid value.
        """
        with self._use.exclusive():
            self._use.closed.clear()
            client = (
                self._usable_transactions().client
                if self.exactly_once
                else self._connected(self._batching)
            )
            client.connect()

    def position(self) -> SinkPosition | None:
        """Return the position stored in the cluster; None if none is stored or the sink keeps none.

        Fences every other producer with the same transactional id.

        Raises:
            SinkUnavailable: No broker answers.
            PermissionMissing: An ACL is missing.
            SinkRejected: Something else is stored in its place.
        """
        if not self.exactly_once:
            return None
        with self._use.exclusive():
            transactions = self._usable_transactions()
            transactions.take_over()
            return transactions.position()

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Append the batch's messages to their topics and return the last ordinal.

        A batch with an origin is one transaction, or several if it takes very long.

        Raises:
            SinkUnavailable: Not acknowledged in time, a topic does not exist, or the sink is
                closed.
            AuthFailed: The brokers no longer accept the credentials.
            PermissionMissing: An ACL is missing.
            Undeliverable: A message can never be delivered. Everything before its ordinal is
                acknowledged. Messages after it may have arrived, unless the batch has an origin.
            SinkRejected: Refused for another permanent reason.
            PositionMoved: Another sender has taken over.
        """
        with self._use.exclusive():
            rows = _BatchRows(batch)
            stop, undeliverable = self._first_invalid_topic(rows)
            send = self._acknowledged if batch.origin is None else self._committed
            start, suspects = 0, range(0)
            # Batching of the current transactional producer; None if it cannot send any more.
            ready: Batching | None = self._batching
            while start < stop:
                alone = start in suspects
                end = suspects.start if start < suspects.start else suspects.stop if alone else stop
                batching = Batching.ALONE if alone else self._batching
                if batch.origin is not None and ready is not batching:
                    self._take_over_again(guard, batching)
                ready = batching
                try:
                    for reached in send(rows, start, min(end, stop), guard, batching):
                        start = reached
                except _Refused as refused:
                    ready = None
                    if batching is Batching.LARGE and refused.error.cause == "too_large":
                        self._batching = Batching.USUAL
                    elif alone:
                        stop, undeliverable = refused.rows.start, refused.error
                    else:
                        suspects = range(refused.rows.start, stop) if suspects else refused.rows
            if batch.origin is not None and ready is not self._batching:
                self._take_over_again(guard, self._batching)
            if undeliverable is not None:
                raise undeliverable
            return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """Close the connection; a `send` that is running in another thread fails."""
        self._use.end(self._interrupt)

    def _interrupt(self) -> None:
        for client in self._clients():
            client.stopped.set()

    def _first_invalid_topic(self, rows: _BatchRows) -> tuple[int, Undeliverable | None]:
        """Return the first row of the first change with an invalid topic name, and its error.

        If all names are valid, return the number of rows and None.
        """
        before = 0
        for part in rows.parts:
            for name in _topics(part.messages):
                if not _TOPIC_NAME.fullmatch(name):
                    row = before + pc.index(part.messages.column("destination"), name).as_py()
                    return rows.change_of(row).start, self._topic_error(part, row - before, name)
            before += len(part.messages)
        return before, None

    def _topic_error(self, batch: SinkBatch, row: int, name: str) -> Undeliverable:
        ordinal = cast("int", batch.messages.column("ordinal")[row].as_py())
        return Undeliverable(
            f"sink {self._settings.sink_id}: {name!r} cannot be the name of a topic (1 to 249 "
            "letters, digits, `.`, `_` and `-`; not `.` or `..`): the message of segment "
            f"{batch.segment}, ordinal {ordinal}",
            ordinal,
            "routing",
        )

    def _acknowledged(
        self, rows: _BatchRows, start: int, stop: int, guard: SendGuard, batching: Batching
    ) -> Iterator[int]:
        """Send the rows `start` to `stop`; after each chunk, yield the end of acknowledged rows."""
        client = self._connected(batching)
        while start < stop:
            start = self._send_piece(client, rows, start, stop, guard)
            yield start

    def _committed(
        self, rows: _BatchRows, start: int, stop: int, guard: SendGuard, batching: Batching
    ) -> Iterator[int]:
        """Like `_acknowledged`, but in transactions; yield the end of the committed rows."""
        transactions = self._live_transactions()
        transactions.take_over()
        assert transactions.client.batching is batching
        try:
            while start < stop:
                transactions.begin(rows.topic(start))
                start = self._send_piece(transactions.client, rows, start, stop, guard)
                if start == stop or transactions.due:
                    guard()
                    transactions.commit(rows.position_after(start))
                    yield start
        except BaseException:
            transactions.abort()
            raise

    def _send_piece(
        self, client: Client, rows: _BatchRows, start: int, stop: int, guard: SendGuard
    ) -> int:
        """Send one client chunk of rows from `start`, at most up to `stop`; return its end."""
        pieces = rows.pieces(start, stop, client.room(rows.topic(start)))
        for topic in {name for piece in pieces for name in _topics(piece)}:
            client.check_topic(topic)
        guard()  # as late as possible: the answer about a topic may have taken long
        client.raise_when_stopped()
        refusals = client.send(pieces, rows.replay, guard)
        if refusals:
            raise _refused(refusals, client.where, rows, start)
        return start + sum(map(len, pieces))

    def _connected(self, batching: Batching) -> Client:
        """Return a client that sends without transactions; create one if there is none."""
        self._use.raise_when_closed()
        client = self._client
        other = client is not None and client.batching is not batching
        if client is None or not client.usable or (other and not client.timed_out):
            self._client = client = Client(self._settings, batching=batching)
        client.stopped.clear()
        # `close` may have been called before there was a client to stop.
        self._use.raise_when_closed()
        return client

    def _live_transactions(self) -> Transactions:
        """Return the transactional producer; raise `PositionMoved` if it failed.

        After a failure, the position must be read before anything more is sent.
        """
        self._use.raise_when_closed()
        if self._transactions is not None and self._transactions.client.spent:
            raise PositionMoved(
                f"{self._transactions.client.where}: a transaction has failed; what has arrived "
                "must be read before anything more is sent"
            )
        return self._usable_transactions()

    def _take_over_again(self, guard: SendGuard, batching: Batching) -> None:
        """Continue with a new producer after a refusal, if nobody else has sent meanwhile."""
        assert self._transactions is not None
        assert self._transactional_id is not None
        before = self._transactions.newest
        guard()  # without it, this would fence a sender that has taken our place
        self._transactions = Transactions(self._settings, self._transactional_id, batching)
        self._use.raise_when_closed()
        self._transactions.take_over()
        if self._transactions.newest != before:
            self._transactions.client.spent = True
            raise PositionMoved(
                f"{self._transactions.client.where}: another sender with the same pipeline and "
                "sink name was at work on this cluster"
            )

    def _usable_transactions(self) -> Transactions:
        """Return a transactional producer that can send; create one if there is none."""
        self._use.raise_when_closed()
        assert self._transactional_id is not None
        if self._transactions is None or self._transactions.client.spent:
            self._transactions = Transactions(
                self._settings, self._transactional_id, self._batching
            )
        self._use.raise_when_closed()
        return self._transactions

    def _clients(self) -> list[Client]:
        transactions = self._transactions
        return [client for client in (self._client, transactions and transactions.client) if client]

    def _drop(self) -> None:
        transactions, self._transactions = self._transactions, None
        if transactions is not None:
            transactions.client.discard()
        # After a timeout the same producer must continue (see `client`), so it is kept.
        if self._client is not None and not (self._client.usable and self._client.timed_out):
            self._client.discard()
            self._client = None


class _BatchRows:
    """The messages of a `SinkBatch`, numbered from 0 through all of its parts.

    Attributes:
        parts: A batch for each part.
        replay: As in the batch.
    """

    def __init__(self, batch: SinkBatch) -> None:
        self.parts = [replace(batch, messages=messages, earlier=()) for messages in batch.parts]
        self.replay = batch.replay
        self._ends = np.cumsum([len(part.messages) for part in self.parts])
        sizes = [np.diff(text_ends(part.messages.column("value"))) for part in self.parts]
        self._bytes = np.concatenate([[0], *sizes]).cumsum()  # of all values before each row

    def place(self, row: int) -> tuple[SinkBatch, int]:
        """Return the part that contains a row, and the row's number in that part."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        part = self.parts[number]
        return part, row - int(self._ends[number]) + len(part.messages)

    def topic(self, row: int) -> str:
        """Return the topic of a row."""
        part, index = self.place(row)
        return cast("str", part.messages.column("destination")[index].as_py())

    def position_after(self, stop: int) -> SinkPosition:
        """Return the position to store with everything before a row."""
        part, index = self.place(stop - 1)
        return part.position_at(index)

    def change_of(self, row: int) -> range:
        """Return the rows of the change that a row belongs to."""
        part, index = self.place(row)
        ordinals = part.messages.column("ordinal").to_numpy()
        ends = [np.searchsorted(ordinals, ordinals[index], side=side) for side in _SIDES]
        return range(*(int(end) + row - index for end in ends))

    def pieces(self, start: int, stop: int, most: int) -> list[pa.RecordBatch]:
        """Return the rows of a client chunk that begins at `start` and goes at most up to `stop`.

        Args:
            start: The first row.
            stop: The row behind the last one.
            most: Maximum bytes of a client chunk; the chunks up to `stop` become equally large.
        """
        slices: list[pa.RecordBatch] = []
        left = int(self._bytes[stop] - self._bytes[start])
        rows, size = PIECE_ROWS, left // -(-left // min(most, PIECE_BYTES)) if left else 1
        while start < stop and rows > 0 and size > 0:
            part, first = self.place(start)
            fitting = int(np.searchsorted(self._bytes, self._bytes[start] + size, side="right")) - 1
            count = min(max(fitting - start, 1), rows, len(part.messages) - first)
            end = whole_ordinals(part.messages, first, first + count)
            end = min(end, first + stop - start)
            slices.append(part.messages.slice(first, end - first))
            count = end - first
            rows, size = rows - count, size - int(self._bytes[start + count] - self._bytes[start])
            start += count
            if end < len(part.messages):
                break
        return slices


_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


class _Refused(Exception):  # noqa: N818 - tells what happened, within this module
    """Brokers refused messages, or record batches that contain them.

    Attributes:
        rows: The rows of the `SinkBatch` from the first refused change to the last one.
        error: The error to raise if the first refused message was refused alone.
    """

    def __init__(self, rows: range, error: Undeliverable) -> None:
        super().__init__(str(error))
        self.rows = rows
        self.error = error


_ADVICE = {
    "too_large": "; raise the topic's max.message.bytes, or leave out what makes it so large",
}


def _refused(
    refusals: Sequence[RefusedRecord], where: str, rows: _BatchRows, start: int
) -> DeltaforgeError | _Refused:
    """Return the error for messages of a client chunk that begins at `start`."""
    faults = sorted(
        (
            (start + record.row, record.cause, record.error)
            for record in refusals
            if record.cause is not None and record.row is not None
        ),
        key=itemgetter(0),  # errors have no order
    )
    if not faults:
        return _other_error(refusals[0], where, rows, start)
    row, cause, refusal = faults[0]
    topic, segment, ordinal, size = _message_facts(rows, row)
    error = Undeliverable(
        f"{where}: topic {topic!r}: {refusal.str()} ({refusal.name()}): the message of segment "
        f"{segment}, ordinal {ordinal}, {size} bytes{_ADVICE.get(cause, '')}",
        ordinal,
        cause,
    )
    return _Refused(range(rows.change_of(row).start, rows.change_of(faults[-1][0]).stop), error)


def _other_error(
    refusal: RefusedRecord, where: str, rows: _BatchRows, start: int
) -> DeltaforgeError:
    if refusal.row is None:
        return translated(where, refusal.error)
    topic, segment, ordinal, _ = _message_facts(rows, start + refusal.row)
    error = translated(f"{where}: topic {topic!r}", refusal.error)
    if isinstance(error, SinkRejected):
        return SinkRejected(f"{error}: the message of segment {segment}, ordinal {ordinal}")
    return error


def _message_facts(rows: _BatchRows, row: int) -> tuple[str, int, int, int]:
    """Return a message's topic, segment, ordinal, and value size in bytes."""
    part, index = rows.place(row)
    start, end = text_ends(part.messages.column("value"))[index : index + 2].tolist()
    ordinal = cast("int", part.messages.column("ordinal")[index].as_py())
    return rows.topic(row), part.segment, ordinal, end - start


def _topics(messages: pa.RecordBatch) -> list[str]:
    """Return the topics of messages, in the order of their first rows."""
    return cast("list[str]", messages.column("destination").unique().to_pylist())
