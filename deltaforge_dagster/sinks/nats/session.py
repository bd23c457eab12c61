"""Delivery over one NATS connection: sends blocks, chains messages, and repairs broken chains.

`sink` describes the rules. The progress of a batch outlives the session (`publish`, which also says
beforehand which messages can be sent at all).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import pyarrow.compute as pc

from deltaforge_dagster.errors import PositionMoved, SinkUnavailable, Undeliverable
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.nats.answers import DUPLICATE, STORED
from deltaforge_dagster.sinks.nats.link import (
    NOBODY_LISTENS,
    WRONG_MESSAGE,
    WRONG_SEQUENCE,
    ApiError,
    NatsLink,
    api_error,
    refusal,
)
from deltaforge_dagster.sinks.nats.pack import (
    MAX_BLOCK_ROWS,
    PackedMessages,
    Packer,
    PositionHeader,
)
from deltaforge_dagster.sinks.nats.publish import (
    Publish,
    PublishLimits,
    check_stream,
    not_taken,
    sendable,
)
from deltaforge_dagster.sinks.nats.stream import Reader, Stream, StreamTail, fits, is_wild

_MAX_UNACKNOWLEDGED = 2
"""Maximum number of blocks that are sent and not yet acknowledged."""

_STRICT_ATTEMPTS = 3
"""Number of attempts, without progress, in which a chain's first message requires the stream's last
sequence to be the known one; if others publish all the time, that would never succeed."""

_ANSWER_INTERVAL = 100
"""Of so many messages one is answered, in a chain in which everything was stored so far.

An answer costs the server about a fourth of what it needs for a message.
"""

# A refused block is sent again in blocks a quarter as large, of which less must be repeated if one
# of them is refused as well.
_SHRINK = 4
_MOST_SUBJECTS = 100_000  # checked ones that are remembered; after that, those of one block


class _PossibleDuplicates(NamedTuple):
    """Which messages may be duplicates, because an earlier attempt may have stored them.

    Messages are named by segment and ordinal, as `Publish.place` returns them.

    Attributes:
        sent: All messages up to this one were sent before.
        unanswered: Messages up to this one may be duplicates, too, if the stream has them after the
            sequence `behind`.
        behind: That sequence.
    """

    sent: tuple[int, int]
    unanswered: tuple[int, int] = (-1, -1)
    behind: int = 0


class Session:
    """A connection on which a sink sends.

    Args:
        link: The connection, already connected.
        limits: What all sessions of the sink may publish.

    Attributes:
        link: The connection.
        tail: The sink's last messages in the stream; read by `read_tail`, updated by `deliver`.
    """

    def __init__(self, link: NatsLink, limits: PublishLimits) -> None:
        self.link = link
        self.tail = StreamTail(0, 0)
        self._limits = limits
        self._stream: Stream | None = None
        self._subjects: set[str] = set()  # subjects that the stream captures
        # Id of the last message sent, which is the stream's last one if all messages were stored.
        self._chain: str | None = None
        self._expected: int | None = None  # the stream's last sequence, as far as known
        # The block is a single message, whose answer the next block awaits.
        self._single_message = False
        self._all_stored = False  # every message of the chain's last answered block
        self._unresolved = False  # it is unknown how many messages of a block are stored
        self._max_rows = MAX_BLOCK_ROWS

    def begin(self) -> None:
        """Read the stream's configuration and check it; do nothing without a stream.

        Raises:
            SinkRejected: The stream does not exist or is unsuitable for the sink.
            SinkUnavailable: The server does not answer.
        """
        if self._limits.stream is None:
            return
        stream = self._stream = self._read_stream()
        self._expected = stream.last_sequence
        check_stream(self.link, stream, self._limits)

    def read_tail(self) -> None:
        """Read which messages of the sink are the last in the stream, into `tail`.

        Raises:
            SinkUnavailable: The server does not answer.
        """
        self.tail = self._reader().tail()
        self._break_chain()

    def deliver(self, publish: Publish, guard: SendGuard) -> None:
        """Send the remaining messages of a task.

        Raises:
            SinkUnavailable: Connection lost, timeout, or refused for now; `publish` holds the
                progress.
            Undeliverable: One message cannot be sent; all messages before its change have arrived.
            SinkRejected: The stream or the server refuses for a permanent reason.
            PositionMoved: The stream does not hold what this sender left there.
        """
        packer = self._packer(publish)
        stop, failure = sendable(self.link, self._stream, self._limits, packer, publish)
        if self._stream is None:
            self._send_plainly(packer, publish, stop, guard)
        else:
            self._check_subjects(publish, stop)
            self._skip_partial(packer, publish)
            self._unresolved = False
            try:
                self._send_chained(packer, publish, stop, guard)
            finally:
                publish.uncertain = self.link.sending or self._unresolved
        if failure is not None:
            raise failure

    def _packer(self, publish: Publish) -> Packer:
        replay = publish.batch.replay
        suffix = self._limits.suffix if replay is None else f"{self._limits.suffix}|replay|{replay}"
        reply = None if self._stream is None else self.link.inbox
        return Packer(publish.batch.messages, suffix + publish.attempt.again, reply)

    def _send_plainly(self, packer: Packer, publish: Publish, stop: int, guard: SendGuard) -> None:
        while publish.row < stop:
            block = packer.pack(publish.row, stop, 0, first={}, marks=self._marks(publish))
            guard()
            deadline = time.monotonic() + self._limits.batch_timeout
            self.link.transmit(block.data, deadline)
            self.link.flush(deadline)
            publish.row = block.stop

    def _send_chained(self, packer: Packer, publish: Publish, stop: int, guard: SendGuard) -> None:
        answers = self.link.answers
        waiting: deque[tuple[PackedMessages, float]] = deque()
        row = publish.row
        duplicates = _PossibleDuplicates(publish.attempt.sent)
        breaks = 0
        if publish.attempt.restarted:
            self._break_chain()
            publish.attempt.restarted = False
        while publish.row < stop:
            most = 1 if self._single_message else _MAX_UNACKNOWLEDGED
            if row < stop and len(waiting) < most and answers.refusal is None:
                strictly = breaks < _STRICT_ATTEMPTS
                block = self._packed(packer, publish, row, stop, duplicates, strictly=strictly)
                self._call_guard(guard)
                deadline = time.monotonic() + self._limits.batch_timeout
                self.link.send_block(block, deadline)
                waiting.append((block, deadline))
                self._chain = packer.message_id(block.stop - 1)
                row = block.stop
                publish.attempt.sent = max(duplicates.sent, publish.place(row - 1))
                continue
            block, deadline = waiting[0]
            self.link.await_answers(block.number + block.answers, deadline)
            bad = self._first_bad(publish, block, duplicates)
            if bad is None:
                waiting.popleft()
                self._record_whole(publish, block)
                breaks = 0
                continue
            self.link.await_answers(answers.next_number, waiting[-1][1])
            refusal, rows = answers.refusal, block.rows_of(bad)
            dropped = answers.outcomes(block.number, block.answers)[bad] == DUPLICATE
            breaks = 1 if rows.start > publish.row else breaks + 1
            behind = self._record_stored_part(packer, publish, block, rows)
            row = publish.row
            waiting.clear()
            if len(rows) > 1:  # they are sent again, each with an answer, to find the bad one
                duplicates = _PossibleDuplicates(duplicates.sent, publish.place(rows[-1]), behind)
                self._max_rows = max(1, self._max_rows // _SHRINK)
            elif dropped:
                publish.attempt.again = f"|again|{secrets.token_hex(4)}"
                packer = self._packer(publish)
            elif refusal is not None:
                self._prepare_retry(api_error(refusal.text), publish)

    def _record_whole(self, publish: Publish, block: PackedMessages) -> None:
        """Record that a block is stored as a whole."""
        answers = self.link.answers
        outcomes = answers.outcomes(block.number, block.answers)
        self._single_message, self._all_stored = False, bool((outcomes == STORED).all())
        self._max_rows = min(2 * self._max_rows, MAX_BLOCK_ROWS)
        self._stored(publish, block, block.stop)
        answers.forget(block.number + block.answers)

    def _first_bad(
        self, publish: Publish, block: PackedMessages, duplicates: _PossibleDuplicates
    ) -> int | None:
        """Return the index of the first bad answer to a block, None if all are good.

        An answer is bad if it is a refusal, or if it says that the stream already had the message,
        but the stream should have stored it again (`PublishAttempt`).
        """
        outcomes = self.link.answers.outcomes(block.number, block.answers)
        sequences = self.link.answers.sequences(block.number, block.answers)
        stored = np.flatnonzero(outcomes == STORED)
        first = int(stored[0]) if len(stored) else block.answers
        bad = None
        for answer in np.flatnonzero(outcomes != STORED).tolist():
            location = publish.place(block.rows_of(answer)[-1])
            unheard = location <= duplicates.sent or (
                location <= duplicates.unanswered and sequences[answer] > duplicates.behind
            )
            fresh = publish.attempt.fresh and answer < first
            right = not self._keeps_positions(publish) and (unheard or fresh)
            if outcomes[answer] != DUPLICATE or not right:
                bad = answer
                break
        if len(stored):
            publish.attempt.fresh = False
        return bad

    def _record_stored_part(
        self, packer: Packer, publish: Publish, block: PackedMessages, rows: range
    ) -> int:
        """Record what is stored of a block with a bad answer, and break the chain.

        Args:
            packer: Packs the messages of the batch.
            publish: The batch and how far it has come; moved to the first row to send again.
            block: The block.
            rows: The rows that the block's first bad answer covers.

        Returns:
            The stream's sequence of the message before these rows.
        """
        try:
            self._stored(publish, block, rows.start)
            before = self.tail.sequence
            if len(rows) > 1:
                self._stored(publish, block, self._first_missing(packer, publish, rows))
        finally:
            self.link.answers.forget(self.link.answers.next_number)
            self.link.answers.forget_refusal()
            self._break_chain()
        return before

    def _first_missing(self, packer: Packer, publish: Publish, rows: range) -> int:
        """Return the row to send next, of rows that share one bad answer.

        The answer does not say how many of them are stored. Those that are directly follow the row
        before them in the stream. Exactly once, the sink reads how many they are. At least once, it
        sends all of the rows again; one of them may be a duplicate if the stream has it after the
        row before them.

        Raises:
            PositionMoved: The stream does not hold what this sender left there.
            SinkUnavailable: The server does not answer.
        """
        if not self._keeps_positions(publish):
            return rows.start
        self._unresolved = True
        current = self._reader().tail()
        missing = rows.start + current.live - self.tail.live
        if current.problem is not None or missing not in rows:
            raise self._position_moved()
        if missing > rows.start and not _is_at(current, packer, publish, missing - 1):
            raise self._position_moved()
        self._unresolved = False
        return missing

    def _break_chain(self) -> None:
        """Let the next message begin a new chain."""
        self._chain = None
        self._all_stored = False
        self._expected = self.link.answers.sequence or self._expected

    def _call_guard(self, guard: SendGuard) -> None:
        """Call the guard; if it refuses, wait for the answers to the messages on their way."""
        try:
            guard()
        except BaseException:
            answers = self.link.answers
            with contextlib.suppress(SinkUnavailable):
                self.link.await_answers(
                    answers.next_number, time.monotonic() + self._limits.batch_timeout
                )
            self._break_chain()
            raise

    def _stored(self, publish: Publish, block: PackedMessages, row: int) -> None:
        """Record that the stream has stored everything before this row of a block.

        Messages behind the row may be stored, too, if a connection that was lost before delivers
        the row itself late. They do not count in `tail`, which is what this sink left in the
        stream.
        """
        if row == publish.row:
            return
        publish.row = row
        heard, last = block.answers_before(row), self.tail.sequence
        if heard:
            last = int(self.link.answers.sequences(block.number, heard).max())
        unheard = row - block.rows_of(heard).start if row < block.stop else 0
        sequence = max(self.tail.sequence, last + unheard)
        live = self.tail.live if publish.batch.origin is None else sequence
        self.tail = StreamTail(sequence, live)

    def _packed(
        self,
        packer: Packer,
        publish: Publish,
        row: int,
        stop: int,
        duplicates: _PossibleDuplicates,
        *,
        strictly: bool,
    ) -> PackedMessages:
        first: dict[str, str] = {}
        before = "-1"
        if self._chain is not None:
            first["Nats-Expected-Last-Msg-Id"] = self._chain
        elif self._limits.exactly_once:
            before = f"-@{self.tail.live}"
            first["Nats-Expected-Last-Subject-Sequence"] = str(self.tail.sequence)
            if is_wild(self._limits.pattern):
                first["Nats-Expected-Last-Subject-Sequence-Subject"] = self._limits.pattern
        elif self._expected is not None and strictly:
            first["Nats-Expected-Last-Sequence"] = str(self._expected)
        # A first message with a condition is sent alone. If it were refused, messages behind it
        # could be dropped as duplicates, and the message after those would still fit into the
        # chain.
        self._single_message = self._chain is None and len(first) > 0
        # Duplicates would pass the condition of the chain: where there may be any, each message is
        # answered.
        sparsely = self._all_stored and publish.place(row) > max(
            duplicates.sent, duplicates.unanswered
        )
        keeping = self._position_header(publish, before)
        redrive = publish.batch.origin is not None and publish.batch.origin.redrive is not None
        return packer.pack(
            row,
            stop,
            self.link.answers.next_number,
            first=first,
            marks=self._marks(publish),
            keeping=keeping,
            every=_ANSWER_INTERVAL if sparsely else 1,
            max_rows=1 if redrive or self._single_message else self._max_rows,
        )

    def _position_header(self, publish: Publish, before: str) -> PositionHeader | None:
        batch = publish.batch
        if batch.origin is None or not self._limits.exactly_once:
            return None
        last = batch.messages.num_rows - 1
        ends = batch.origin.redrive is None and publish.ordinal(last) == batch.origin.rows - 1
        return PositionHeader(
            lambda row: batch.position_at(row).to_json(), last if ends else None, before
        )

    def _marks(self, publish: Publish) -> dict[str, str]:
        marks = {}
        if publish.batch.replay is not None:
            marks["df-replay"] = publish.batch.replay
        if self._limits.exactly_once and publish.batch.origin is None:
            marks["df-position"] = f"@{self.tail.live}"
        return marks

    def _prepare_retry(self, error: ApiError, publish: Publish) -> None:
        """Let a new chain begin at the refused `publish.row`; raise if that cannot help."""
        assert self._stream is not None
        where = f"{self.link.where}: stream {self._stream.name!r}"
        if error.code == WRONG_MESSAGE or error.code in WRONG_SEQUENCE:
            self._max_rows = max(1, self._max_rows // _SHRINK)
            if self._limits.exactly_once:
                current = self._reader().tail()
                if publish.batch.origin is None:
                    self.tail = current
                elif current.problem is not None or current.live != self.tail.live:
                    raise self._position_moved()
                else:
                    self.tail = replace(self.tail, sequence=current.sequence)
            elif error.sequence is not None:
                self._expected = error.sequence
            return
        subject = publish.batch.messages.column("destination")[publish.row].as_py()
        if error.code == NOBODY_LISTENS:
            self._stream = self._read_stream()
            if not self._stream.takes(subject):
                raise not_taken(where, subject, self._stream)
            raise SinkUnavailable(f"{where}: nobody listens to subject {subject!r} for now")
        if error.too_large:
            ordinal = publish.ordinal(publish.row)
            raise Undeliverable(
                f"{where}: the message of segment {publish.batch.segment}, ordinal {ordinal} is "
                "larger than the stream takes; raise its max_msg_size",
                ordinal,
                "too_large",
            )
        raise refusal(where, error)

    def _position_moved(self) -> PositionMoved:
        assert self._stream is not None
        return PositionMoved(
            f"{self.link.where}: stream {self._stream.name!r} does not hold what this run left "
            "there: another sender is at work, or the server has lost data"
        )

    def _keeps_positions(self, publish: Publish) -> bool:
        return self._limits.exactly_once and publish.batch.origin is not None

    def _check_subjects(self, publish: Publish, stop: int) -> None:
        """Check, before anything is sent, that the stream captures all subjects."""
        assert self._stream is not None
        messages = publish.batch.messages.slice(publish.row, stop - publish.row)
        subjects = cast("set[str]", set(messages.column("destination").unique().to_pylist()))
        fresh = subjects - self._subjects
        for subject in fresh:
            if not self._stream.takes(subject):
                self._stream = self._read_stream()
            if not self._stream.takes(subject):
                where = f"{self.link.where}: stream {self._stream.name!r}"
                raise not_taken(where, subject, self._stream)
            if self._limits.exactly_once and not fits(self._limits.pattern, subject):
                row = publish.row + pc.index(messages.column("destination"), subject).as_py()
                raise Undeliverable(
                    f"{self.link.where}: subject {subject!r} is not one of "
                    f"{self._limits.pattern!r}, where the sink keeps its position (exactly_once)",
                    publish.ordinal(row),
                    "routing",
                )
        self._subjects = (
            subjects if len(self._subjects) > _MOST_SUBJECTS else self._subjects | fresh
        )

    def _skip_partial(self, packer: Packer, publish: Publish) -> None:
        """Skip messages of the first change that have arrived, if only some of them have."""
        partial = self.tail.partial
        if partial is None or publish.batch.origin is None or publish.row > 0:
            return
        row = 0
        while row < publish.batch.messages.num_rows and publish.ordinal(row) == publish.ordinal(0):
            row += 1
            if _is_id(partial, packer, row - 1):
                publish.row = row
                return

    def _read_stream(self) -> Stream:
        assert self._limits.stream is not None
        return Stream.read(self.link, self._limits.stream, self._limits.batch_timeout)

    def _reader(self) -> Reader:
        assert self._stream is not None
        limits = self._limits
        return Reader(
            self.link, self._stream.name, limits.pattern, limits.suffix, limits.batch_timeout
        )


def _is_id(text: str, packer: Packer, row: int) -> bool:
    """Return whether a message's id is that of a row, also if it was stored again under another."""
    return f"{text}|".startswith(f"{packer.message_id(row)}|")


def _is_at(tail: StreamTail, packer: Packer, publish: Publish, row: int) -> bool:
    """Return whether a row is the last one of the sink that the stream holds."""
    if tail.partial is not None:
        return _is_id(tail.partial, packer, row)
    sent, stored = publish.batch.position_at(row), tail.position
    return stored is not None and (sent.segment_id, sent.ordinal, sent.event_id) == (
        stored.segment_id,
        stored.ordinal,
        stored.event_id,
    )
