r"""Parses a NATS server's answers to blocks of messages, with a kernel.

A stream answers each message of a block once, in any order, on a subject that ends in the message's
number. `Answers` parses everything that arrives, wherever the received bytes are cut. It remembers
which messages were stored, which the stream already had, and the first one that was refused, with
the reason.
"""

# ruff: noqa: C901, PLR0912, PLR0917, PLR1714 - kernels are flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel

# What a server sends (docs.nats.io, "Client Protocol"); `;` stands for `\r\n`:
#
#   MSG <reply>.#n <sid> #size;<payload>;                   a stream's answer to message n:
#       {"stream":"S", "seq":17}                             stored as 17; also with "domain"
#       {"stream":"S", "seq":9,"duplicate": true}            the stream already had it, as 9
#       {"error":{"code":400,...},"stream":"S","seq":0}      refused
#   HMSG <reply>.#n <sid> #header #all;NATS/1.0 503;...      nobody listens to the message's subject
#   PING;   PONG;   +OK;   INFO {...};   -ERR '<text>';
#
#   MSG <reply>.r <sid> #size;<payload>;                    the answer to a request
#
# State that `_scan` keeps between calls: its offset in the buffer; the numbers of PINGs and PONGs;
# the index of the first message without an answer; the lowest refused number and the bounds of the
# reason; the bounds of an -ERR line and of the answer to a request (it stops after either); whether
# anything else has arrived; and the highest sequence.
_AT, _PINGS, _PONGS, _FIRST, _REFUSED, _TEXT, _TEXT_END = range(7)
_ERR, _ERR_END, _REPLY, _REPLY_END, _BROKEN, _SEQUENCE = range(7, 13)
_NOBODY = 1 << 62  # larger than the number of any message

STORED, DUPLICATE, _REFUSAL = 1, 2, 3


@kernel
def _number(buffer: Bytes, start: int, stop: int) -> int:
    """Parse a decimal number; return -1 for anything else."""
    number: int = 0 if 0 < stop - start < 19 else -1
    for index in range(start, stop):
        if number < 0 or buffer[index] < 48 or buffer[index] > 57:
            return -1
        number = number * 10 + int(buffer[index]) - 48
    return number


@kernel
def _word_end(buffer: Bytes, at: int, stop: int) -> int:
    while at < stop and buffer[at] != 32:
        at += 1
    return at


@kernel
def _sequence(buffer: Bytes, start: int, stop: int) -> int:
    """Return the number after `"seq":` (with or without a blank), or -1 if there is none."""
    for at in range(start, stop - 6):
        if (
            buffer[at] == 34
            and buffer[at + 1] == 115
            and buffer[at + 2] == 101
            and buffer[at + 3] == 113
            and buffer[at + 4] == 34
            and buffer[at + 5] == 58
        ):
            first = at + 6
            while first < stop and buffer[first] == 32:
                first += 1
            end = first
            while end < stop and 48 <= buffer[end] <= 57:
                end += 1
            return _number(buffer, first, end)
    return -1


@kernel
def _is_duplicate(buffer: Bytes, start: int, stop: int) -> bool:
    """Return whether the answer between these bounds contains `"dup`."""
    for at in range(start, stop - 4):
        if (
            buffer[at] == 34
            and buffer[at + 1] == 100
            and buffer[at + 2] == 117
            and buffer[at + 3] == 112
        ):
            return True
    return False


@kernel
def _record(
    buffer: Bytes,
    start: int,
    stop: int,
    number: int,
    base: int,
    answers: Bytes,
    sequences: Longs,
    state: Longs,
) -> None:
    """Record the answer to message `number`, which is between these bounds."""
    index = number - base
    if index < 0 or index >= len(answers) or answers[index] != 0:
        return  # the answer to a message that was sent before an error and is no longer tracked
    answers[index] = STORED
    while state[_FIRST] < len(answers) and answers[state[_FIRST]] != 0:
        state[_FIRST] += 1
    # {"e... is an error, {"s... a success, NATS/1.0... a status.
    refused = stop - start < 3 or buffer[start] != 123 or buffer[start + 2] == 101
    sequence = -1 if refused else _sequence(buffer, start, stop)
    sequences[index] = sequence
    if sequence < 0:
        answers[index] = _REFUSAL
        if number < state[_REFUSED]:
            state[_REFUSED], state[_TEXT], state[_TEXT_END] = number, start, stop
    elif _is_duplicate(buffer, start, stop):
        answers[index] = DUPLICATE
    elif sequence > state[_SEQUENCE]:
        state[_SEQUENCE] = sequence


@kernel
def _scan(
    buffer: Bytes,
    end: int,
    prefix: int,
    base: int,
    answers: Bytes,
    sequences: Longs,
    state: Longs,
) -> None:
    """Parse everything complete between `state[_AT]` and `end`.

    `prefix` is the length of a reply subject before its number, `base` the number of the message to
    which the first elements of `answers` and `sequences` belong.
    """
    at = state[_AT]
    while state[_BROKEN] == 0 and state[_ERR_END] == 0 and state[_REPLY_END] == 0:
        line = at
        while line < end and buffer[line] != 10:
            line += 1
        if line == end:
            break
        stop = line - 1
        kind = buffer[at]
        if kind == 77 or kind == 72:  # M and H
            subject = _word_end(buffer, at, stop) + 1
            subject_end = _word_end(buffer, subject, stop)
            size_at = stop
            while size_at > subject_end and buffer[size_at - 1] != 32:
                size_at -= 1
            size = _number(buffer, size_at, stop)
            if size < 0 or subject + prefix >= subject_end:
                state[_BROKEN] = 1
                break
            first, last = line + 1, line + 1 + size
            if last + 2 > end:
                break
            if buffer[subject + prefix] == 114:  # r
                state[_REPLY], state[_REPLY_END] = first, last
            else:
                number = _number(buffer, subject + prefix, subject_end)
                _record(buffer, first, last, number, base, answers, sequences, state)
            at = last + 2
            continue
        if kind == 80 and buffer[at + 1] == 73:  # PI
            state[_PINGS] += 1
        elif kind == 80:
            state[_PONGS] += 1
        elif kind == 45:  # -
            state[_ERR], state[_ERR_END] = at, stop
        elif kind != 43 and kind != 73:  # +OK, INFO
            state[_BROKEN] = 1
        at = line + 1
    state[_AT] = at


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """Number of the first message that was refused, and the server's answer: JSON or a status."""

    number: int
    text: str


class Answers:
    """Parses what the server sends: receive into `space()`, then call `received(n)`.

    Args:
        prefix: Length of a reply subject before its number.

    Attributes:
        refusal: The first refusal since `forget_refusal`, or None.
        error: Text of an `-ERR` line, after which nothing more is parsed, or None.
        reply: The answer to a request, or None. Nothing more is parsed until `take_reply` is
            called.
    """

    def __init__(self, prefix: int) -> None:
        self._buffer = np.empty(1 << 18, np.uint8)
        self._state = np.zeros(13, np.int64)
        self._prefix = prefix
        self._answers = np.zeros(0, np.uint8)
        self._sequences = np.zeros(0, np.int64)
        self._base = 1
        self._end = 0
        self.refusal: RefusedMessage | None = None
        self.error: str | None = None
        self.reply: bytes | None = None
        self.forget_refusal()

    @property
    def next_number(self) -> int:
        """Number of the next message to be sent."""
        return self._base + len(self._answers)

    @property
    def first_missing(self) -> int:
        """Number of the first message without an answer; all messages before it were answered."""
        return self._base + int(self._state[_FIRST])

    @property
    def sequence(self) -> int:
        """The highest stream sequence that a message was stored with; 0 if none was stored yet."""
        return int(self._state[_SEQUENCE])

    @property
    def pongs(self) -> int:
        """Number of PONGs received."""
        return int(self._state[_PONGS])

    def expect(self, messages: int) -> None:
        """Expect answers to this many more messages."""
        self._answers = np.concatenate([self._answers, np.zeros(messages, np.uint8)])
        self._sequences = np.concatenate([self._sequences, np.zeros(messages, np.int64)])

    def outcomes(self, number: int, messages: int) -> Bytes:
        """Return the outcomes of the messages: `STORED`, `DUPLICATE`, or another value."""
        first = number - self._base
        return self._answers[first : first + messages]

    def sequences(self, number: int, messages: int) -> Longs:
        """Return the stream sequence that each answer names, -1 for a refusal.

        For a duplicate, it is the sequence of the message that the stream already had.
        """
        first = number - self._base
        return self._sequences[first : first + messages]

    def forget(self, number: int) -> None:
        """Discard the outcomes of the messages before `number`, all of which were answered."""
        passed = number - self._base
        self._answers = self._answers[passed:]
        self._sequences = self._sequences[passed:]
        self._state[_FIRST] -= passed
        self._base = number

    def forget_refusal(self) -> None:
        """Discard the refusal, so that the next one is recorded."""
        self._state[_REFUSED] = _NOBODY
        self.refusal = None

    def take_pings(self) -> int:
        """Return the number of PINGs since the last call; each must be answered with a PONG."""
        pings = int(self._state[_PINGS])
        self._state[_PINGS] = 0
        return pings

    def take_reply(self) -> bytes | None:
        """Return and clear the answer to a request, or return None; continue parsing after it."""
        reply, self.reply = self.reply, None
        if reply is not None:
            self._state[_REPLY_END] = 0
            self._inspect()
        return reply

    def space(self) -> memoryview:
        """Return the free part of the buffer, at least 64 KiB."""
        if len(self._buffer) - self._end < 1 << 16:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        return self._buffer.data[self._end :]

    def received(self, size: int) -> None:
        """Parse `size` more bytes.

        Raises:
            SinkUnavailable: The bytes do not follow the protocol; the connection is unusable.
        """
        self._end += size
        self._inspect()

    def _inspect(self) -> None:
        state = self._state
        refused = int(state[_REFUSED])
        _scan(
            self._buffer,
            self._end,
            self._prefix,
            self._base,
            self._answers,
            self._sequences,
            state,
        )
        if state[_REFUSED] != refused:
            self.refusal = RefusedMessage(
                int(state[_REFUSED]), self._text(_TEXT, _TEXT_END).decode()
            )
        if state[_ERR_END] and self.error is None:
            self.error = self._text(_ERR, _ERR_END).decode("utf-8", "replace")
        if state[_REPLY_END] and self.reply is None:
            self.reply = self._text(_REPLY, _REPLY_END)
        if state[_BROKEN]:
            raise SinkUnavailable("the server sent something that is no answer")
        at = int(state[_AT])
        left = self._end - at
        self._buffer[:left] = self._buffer[at : self._end].copy()
        self._end, state[_AT] = left, 0

    def _text(self, start: int, end: int) -> bytes:
        return self._buffer[self._state[start] : self._state[end]].tobytes()


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    answers = Answers(2)
    answers.expect(1)
    text = b'MSG _.1 1 24\r\n{"stream":"S", "seq":17}\r\n'
    answers.space()[: len(text)] = text
    answers.received(len(text))
