"""One connection's delivery: blocks on their way, chains, and what breaks them.

The rules are those of `nats`. A task is one batch; how far it has come outlives the session.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pyarrow.compute as pc

from deltaforge_dagster.errors import (
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch
from deltaforge_dagster.sinks.nats_answers import DUPLICATE, STORED
from deltaforge_dagster.sinks.nats_errors import (
    NOBODY_LISTENS,
    WRONG_MESSAGE,
    WRONG_SEQUENCE,
    ApiError,
    api_error,
    refusal,
)
from deltaforge_dagster.sinks.nats_link import Link
from deltaforge_dagster.sinks.nats_pack import MAX_BLOCK_ROWS, MAX_SUBJECT, Block, Keeping, Packer
from deltaforge_dagster.sinks.nats_stream import Held, Reader, Stream, fits

_ON_THE_WAY = 2
"""Blocks that are sent and not yet acknowledged, at most."""

_STRICT_BEGINNINGS = 3
"""Times that a chain's first message must find the stream as it is known; where others publish all the
time it never would."""

_SHRINK = 4
_KNOWN_SUBJECTS = 100_000
_WILDCARD_VERSION = (2, 11)
"""Servers that know `Nats-Expected-Last-Subject-Sequence-Subject`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sink's sessions have in common.

    Attributes:
        suffix: Ends the ids of the sink's messages.
        pattern: Every subject the sink sends to fits it.
        stream: The stream that takes them; None for core NATS.
        exactly_once: Whether the sink keeps its position.
        batch_timeout: Seconds for one block, from its first byte to its acknowledgement.
    """

    suffix: str
    pattern: str
    stream: str | None
    exactly_once: bool
    batch_timeout: float


@dataclass(slots=True)
class Pass:
    """How far a sink has sent, to know which messages a stream may rightly have already.

    A stream drops a message that it has already, which is right when the sink did not hear of it the
    first time. It is wrong when the message stands before others that were stored since then: after a
    reset or a restored source position the log is sent anew, and dropping its newest part, which
    the stream remembers, would leave older values behind newer ones. Such a message is stored again,
    under another id.

    Attributes:
        sent: Segment and ordinal of the last message that was sent.
        acknowledged: The same of the last one acknowledged.
        fresh: Nothing was stored yet, so that what a run before this one has sent may be there.
        anew: It has begun anew with what is sent next.
        again: Ends the ids of messages that are stored again; empty as long as none was.
    """

    sent: tuple[int, int] = (-1, -1)
    acknowledged: tuple[int, int] = (-1, -1)
    fresh: bool = True
    anew: bool = False
    again: str = ""

    def begin(self, batch: SinkBatch) -> None:
        """Take note that a batch is to be sent; one from before the last one begins anew."""
        ordinal = cast("int", batch.messages.column("ordinal")[0].as_py())
        if (batch.segment, ordinal) <= self.acknowledged:
            self.sent = self.acknowledged = (batch.segment, ordinal - 1)
            self.fresh = False
            self.anew = True


@dataclass(slots=True)
class Task:
    """A batch on its way.

    Attributes:
        batch: The batch.
        passing: The pass it belongs to.
        row: The first one that is not known to have arrived.
        uncertain: Messages from there on may have arrived.
    """

    batch: SinkBatch
    passing: Pass
    row: int = 0
    uncertain: bool = False

    @property
    def done(self) -> bool:
        """Whether everything has arrived."""
        return self.row >= self.batch.messages.num_rows

    def ordinal(self, row: int) -> int:
        """Return the ordinal of a row."""
        return cast("int", self.batch.messages.column("ordinal")[row].as_py())


class Session:
    """A connection on which a sink sends.

    Args:
        link: Connected.
        terms: What holds for all sessions of the sink.

    Attributes:
        link: The connection.
        held: What the stream holds of the sink; read by `read_held`.
    """

    def __init__(self, link: Link, terms: Terms) -> None:
        self.link = link
        self.held = Held(0, 0)
        self._terms = terms
        self._stream: Stream | None = None
        self._known: set[str] = set()  # subjects that are the stream's
        self._chain: str | None = (
            None  # id of the last message that was sent, and stored if all are
        )
        self._expected: int | None = None  # the stream's last sequence, before the first chain
        self._alone = False  # the next block goes alone, and the one after it waits for its answer
        self._most = MAX_BLOCK_ROWS

    def begin(self) -> None:
        """Look at the stream.

        Raises:
            SinkRejected: There is none, or it does not fit the sink.
            SinkUnavailable: The server does not answer.
        """
        if self._terms.stream is None:
            return
        stream = self._stream = self._read_stream()
        self._expected = stream.last_sequence
        where = f"{self.link.where}: stream {stream.name!r}"
        takes = stream.takes if self._terms.exactly_once else stream.takes_some
        if not takes(self._terms.pattern):
            raise SinkRejected(
                f"{where} does not take {self._terms.pattern!r}, only {', '.join(stream.subjects)}; "
                f"add it: nats stream edit {stream.name} --subjects=..."
            )
        for setting, wanted in (("no_ack", "acknowledges nothing"), ("sealed", "is sealed")):
            if stream.config.get(setting):
                raise SinkRejected(
                    f"{where} {wanted} ({setting}: true); change that, or use another"
                )
        if self._terms.exactly_once:
            self._check_exactly_once(where, stream)

    def read_held(self) -> None:
        """Read what the stream holds of the sink.

        Raises:
            SinkUnavailable: The server does not answer.
        """
        self.held = self._reader().held()
        self._break_chain()

    def deliver(self, task: Task, guard: SendGuard) -> None:
        """Send what is left of a task.

        Raises:
            SinkUnavailable: Connection lost, timeout, or refused for now; `task` says how far it came.
            Undeliverable: One message cannot be sent; what is before its change has arrived.
            SinkRejected: The stream or the server refuses for a lasting reason.
            PositionMoved: The stream does not hold what this sender left there.
        """
        packer = self._packer(task)
        stop, failure = self._sendable(packer, task)
        if self._stream is None:
            self._send_plainly(packer, task, stop, guard)
        else:
            self._check_subjects(task, stop)
            self._skip_partial(packer, task)
            try:
                self._send_chained(packer, task, stop, guard)
            finally:
                task.uncertain = self.link.sending
        if failure is not None:
            raise failure

    def _packer(self, task: Task) -> Packer:
        replay = task.batch.replay
        suffix = self._terms.suffix if replay is None else f"{self._terms.suffix}|replay|{replay}"
        reply = None if self._stream is None else self.link.inbox
        return Packer(task.batch.messages, suffix + task.passing.again, reply)

    def _send_plainly(self, packer: Packer, task: Task, stop: int, guard: SendGuard) -> None:
        while task.row < stop:
            block = packer.pack(task.row, stop, 0, {}, self._marks(task))
            guard()
            deadline = time.monotonic() + self._terms.batch_timeout
            self.link.transmit(block.data, deadline)
            self.link.flush(deadline)
            task.row = block.stop

    def _send_chained(self, packer: Packer, task: Task, stop: int, guard: SendGuard) -> None:
        answers = self.link.answers
        waiting: deque[tuple[Block, float]] = deque()
        row = task.row
        known = task.passing.sent
        breaks = 0
        if task.passing.anew:
            self._break_chain()
            task.passing.anew = False
        while task.row < stop:
            if row < stop and len(waiting) < (1 if self._alone else _ON_THE_WAY):
                block = self._packed(packer, task, row, stop, strictly=breaks < _STRICT_BEGINNINGS)
                self._ask(guard)
                deadline = time.monotonic() + self._terms.batch_timeout
                self.link.send_block(block, deadline, answered=True)
                waiting.append((block, deadline))
                self._chain = packer.message_id(block.stop - 1)
                row = block.stop
                task.passing.sent = max(known, (task.batch.segment, task.ordinal(row - 1)))
                continue
            block, deadline = waiting[0]
            self.link.await_answers(block.number + block.rows, deadline)
            again = self._row_to_store_again(task, block, known)
            if answers.refusal is None and again is None:
                waiting.popleft()
                self._alone = False
                self._stored(task, block.stop)
                answers.forget(block.number + block.rows)
                self._most = min(2 * self._most, MAX_BLOCK_ROWS)
                breaks = 0
                continue
            self.link.await_answers(answers.next_number, waiting[-1][1])
            row, refusal = block.stop, answers.refusal
            if refusal is not None:
                row = refusal.number - block.number + block.start
            if again is not None:
                row = min(again, row)
            breaks = 1 if row > task.row else breaks + 1
            self._stored(task, row)
            waiting.clear()
            answers.forget(answers.next_number)
            answers.forget_refusal()
            self._break_chain()
            if again == row:
                task.passing.again = f"|again|{secrets.token_hex(4)}"
                packer = self._packer(task)
            elif refusal is not None:
                self._go_on_after(api_error(refusal.text), task)

    def _row_to_store_again(self, task: Task, block: Block, known: tuple[int, int]) -> int | None:
        """Return the first row of a block that the stream dropped, and should not have; see `Pass`."""
        outcomes = self.link.answers.outcomes(block.number, block.rows)
        stored = np.flatnonzero(outcomes == STORED)
        first = int(stored[0]) if len(stored) else block.rows
        exactly = self._terms.exactly_once and task.batch.origin is not None
        found = None
        for place in np.flatnonzero(outcomes == DUPLICATE).tolist():
            row = block.start + place
            unheard = (task.batch.segment, task.ordinal(row)) <= known
            if exactly or not (unheard or (task.passing.fresh and place < first)):
                found = row
                break
        if len(stored):
            task.passing.fresh = False
        return found

    def _break_chain(self) -> None:
        """Begin a new chain with what is sent next."""
        self._chain = None
        self._expected = self.link.answers.sequence or self._expected

    def _ask(self, guard: SendGuard) -> None:
        """Ask the guard; when it refuses, still hear what became of what is on its way."""
        try:
            guard()
        except BaseException:
            answers = self.link.answers
            with contextlib.suppress(SinkUnavailable):
                self.link.await_answers(
                    answers.next_number, time.monotonic() + self._terms.batch_timeout
                )
            self._break_chain()
            raise

    def _stored(self, task: Task, row: int) -> None:
        """Take note that everything before that row has been stored."""
        if row == task.row:
            return
        task.row = row
        sequence = max(self.held.sequence, self.link.answers.sequence)
        live = self.held.live if task.batch.origin is None else sequence
        self.held = Held(sequence, live)

    def _packed(self, packer: Packer, task: Task, row: int, stop: int, *, strictly: bool) -> Block:
        first: dict[str, str] = {}
        before = "-1"
        if self._chain is not None:
            first["Nats-Expected-Last-Msg-Id"] = self._chain
        elif self._terms.exactly_once:
            before = f"-@{self.held.live}"
            first["Nats-Expected-Last-Subject-Sequence"] = str(self.held.sequence)
            if _is_wild(self._terms.pattern):
                first["Nats-Expected-Last-Subject-Sequence-Subject"] = self._terms.pattern
        elif self._expected is not None and strictly:
            first["Nats-Expected-Last-Sequence"] = str(self._expected)
        # A first message that can be refused goes alone: others behind it could be dropped as
        # duplicates, and one after these still find its place.
        self._alone = self._chain is None and len(first) > 0
        keeping = self._keeping(task, before)
        redrive = task.batch.origin is not None and task.batch.origin.redrive is not None
        return packer.pack(
            row,
            stop,
            self.link.answers.next_number,
            first,
            self._marks(task),
            keeping,
            max_rows=1 if redrive or self._alone else self._most,
        )

    def _keeping(self, task: Task, before: str) -> Keeping | None:
        batch = task.batch
        if batch.origin is None or not self._terms.exactly_once:
            return None
        last = batch.messages.num_rows - 1
        ends = batch.origin.redrive is None and task.ordinal(last) == batch.origin.rows - 1
        return Keeping(lambda row: batch.position_at(row).to_json(), last if ends else None, before)

    def _marks(self, task: Task) -> dict[str, str]:
        marks = {}
        if task.batch.replay is not None:
            marks["df-replay"] = task.batch.replay
        if self._terms.exactly_once and task.batch.origin is None:
            marks["df-position"] = f"@{self.held.live}"
        return marks

    def _go_on_after(self, error: ApiError, task: Task) -> None:
        """Prepare to begin a chain at `task.row`, which was refused; raise where that is no use."""
        assert self._stream is not None
        where = f"{self.link.where}: stream {self._stream.name!r}"
        if error.code == WRONG_MESSAGE or error.code in WRONG_SEQUENCE:
            self._most = max(1, self._most // _SHRINK)
            if self._terms.exactly_once:
                now = self._reader().held()
                if task.batch.origin is None:
                    self.held = now
                elif now.problem is not None or now.live != self.held.live:
                    raise PositionMoved(
                        f"{where} does not hold what this run left there: another sender is at "
                        "work, or the server has lost data"
                    )
                else:
                    self.held = replace(self.held, sequence=now.sequence)
            elif error.sequence is not None:
                self._expected = error.sequence
            return
        subject = task.batch.messages.column("destination")[task.row].as_py()
        if error.code == NOBODY_LISTENS:
            self._stream = self._read_stream()
            if not self._stream.takes(subject):
                raise _not_taken(where, subject, self._stream)
            raise SinkUnavailable(f"{where}: nobody listens to subject {subject!r} for now")
        if error.too_large:
            ordinal = task.ordinal(task.row)
            raise Undeliverable(
                f"{where}: the message of segment {task.batch.segment}, ordinal {ordinal} is "
                "larger than the stream takes; raise its max_msg_size",
                ordinal,
                "too_large",
            )
        raise refusal(where, error)

    def _sendable(self, packer: Packer, task: Task) -> tuple[int, Undeliverable | None]:
        """Return where the messages end that can be sent, and why not all of them can."""
        batch = task.batch
        limit = self.link.max_payload
        largest = None if self._stream is None else self._stream.max_message
        if largest is not None:
            limit = min(limit, largest)
        if batch.origin is not None and self._terms.exactly_once:
            limit -= len(batch.position_at(batch.messages.num_rows - 1).to_json())
        problem = packer.problem(limit)
        if problem is None:
            return batch.messages.num_rows, None
        ordinal = task.ordinal(problem.row)
        stop = int(np.searchsorted(batch.messages.column("ordinal").to_numpy(), ordinal))
        what = f"{self.link.where}: the message of segment {batch.segment}, ordinal {ordinal}"
        if problem.kind == "too large":
            return stop, Undeliverable(
                f"{what} is larger than {limit} bytes with its headers; raise the server's "
                "max_payload or the stream's max_msg_size, or leave out what makes it so large",
                ordinal,
                "too_large",
            )
        if problem.kind == "line break":
            text = f"{what} has a key with a line break or a zero byte, which no header can carry"
            return stop, Undeliverable(text, ordinal, "serialization")
        text = (
            f"{what} has no valid subject: it must not be empty or longer than {MAX_SUBJECT} bytes, "
            "nor have blanks, `*`, `>` or empty parts between dots"
        )
        return stop, Undeliverable(text, ordinal, "routing")

    def _check_subjects(self, task: Task, stop: int) -> None:
        """Refuse a subject that is not the stream's, before anything is sent."""
        assert self._stream is not None
        messages = task.batch.messages.slice(task.row, stop - task.row)
        subjects = cast("set[str]", set(messages.column("destination").unique().to_pylist()))
        fresh = subjects - self._known
        for subject in fresh:
            if not self._stream.takes(subject):
                self._stream = self._read_stream()
            if not self._stream.takes(subject):
                where = f"{self.link.where}: stream {self._stream.name!r}"
                raise _not_taken(where, subject, self._stream)
            if self._terms.exactly_once and not fits(self._terms.pattern, subject):
                row = task.row + pc.index(messages.column("destination"), subject).as_py()
                raise Undeliverable(
                    f"{self.link.where}: subject {subject!r} is not one of {self._terms.pattern!r}, "
                    "where the sink keeps its position (exactly_once)",
                    task.ordinal(row),
                    "routing",
                )
        self._known = subjects if len(self._known) > _KNOWN_SUBJECTS else self._known | fresh

    def _skip_partial(self, packer: Packer, task: Task) -> None:
        """Pass over messages of the first change that arrived before its others did not."""
        partial = self.held.partial
        if partial is None or task.batch.origin is None or task.row > 0:
            return
        row = 0
        while row < task.batch.messages.num_rows and task.ordinal(row) == task.ordinal(0):
            row += 1
            if f"{partial}|".startswith(f"{packer.message_id(row - 1)}|"):
                task.row = row
                return

    def _check_exactly_once(self, where: str, stream: Stream) -> None:
        config = stream.config
        if config.get("retention", "limits") != "limits":
            raise SinkRejected(
                f"{where} drops what was consumed (retention: {config['retention']}), and with it "
                "the sink's position; exactly_once needs retention limits"
            )
        if int(config.get("max_msgs_per_subject", -1)) > 0:
            raise SinkRejected(
                f"{where} keeps only some messages of each subject (max_msgs_per_subject), so that "
                "the sink's position can vanish; exactly_once needs a stream without that limit"
            )
        if config.get("subject_transform"):
            raise SinkRejected(f"{where} renames subjects, which exactly_once cannot follow")
        version = str(self.link.info.get("version", "0")).split(".")
        if _is_wild(self._terms.pattern) and (int(version[0]), int(version[1])) < _WILDCARD_VERSION:
            raise SinkRejected(
                f"{self.link.where} is NATS {self.link.info.get('version')}: exactly_once with a "
                "template needs 2.11 or newer"
            )

    def _read_stream(self) -> Stream:
        assert self._terms.stream is not None
        return Stream.read(self.link, self._terms.stream, self._terms.batch_timeout)

    def _reader(self) -> Reader:
        assert self._stream is not None
        terms = self._terms
        return Reader(
            self.link, self._stream.name, terms.pattern, terms.suffix, terms.batch_timeout
        )


def _is_wild(pattern: str) -> bool:
    return not {"*", ">"}.isdisjoint(pattern.split("."))


def _not_taken(where: str, subject: str, stream: Stream) -> SinkRejected:
    return SinkRejected(
        f"{where} does not take subject {subject!r}, only {', '.join(stream.subjects)}; add it: "
        f"nats stream edit {stream.name} --subjects=..."
    )
