"""Parses a Redis server's reply to one block (`resp`) into a verdict, with a Numba kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel

# The server's reply to a block of n commands (XADDs and SET); `;` stands for `\r\n`, as in `resp`:
#
#   +OK; (+QUEUED;) x n       one status line per command, or an error line -CODE text;
#   *n; ($#;<id>; | +OK;) x n EXEC ran: an entry id per XADD, OK for SET, or an error line instead
#   -EXECABORT text;          or: EXEC ran nothing because a command was refused while queueing
#   *-1;                      or: EXEC ran nothing because the watched key had changed
#   +OK; $#;<position>;       only if the block keeps a position: WATCH, and GET ($-1; if no value)
#  State that `_scan` keeps between calls: its offset in the buffer; the number of replies it has
# read (MULTI and the commands, then EXEC, then its items, then WATCH and GET; if EXEC ran nothing,
# its items count as read); the bounds of the first error line and the number of its reply; the
# outcome; whether EXEC ran nothing; and the bounds of the newest bulk string.
_AT, _REPLY, _ERROR, _ERROR_END, _ERROR_REPLY, _OUTCOME, _ABORTED, _TEXT, _TEXT_END = range(9)
_WAITING, _ANSWERED, _BROKEN = range(3)


@kernel
def _scan(  # noqa: C901, PLR0912 - one machine, one loop
    buffer: Bytes, end: int, commands: int, replies: int, state: Longs
) -> None:
    """Read the complete replies between `state[_AT]` and `end`, until `replies` have been read."""
    at, reply = state[_AT], state[_REPLY]
    while state[_OUTCOME] == _WAITING:
        stop = at
        while stop < end and buffer[stop] != 10:
            stop += 1
        if stop == end:
            break
        kind = buffer[at]
        next_at = stop + 1
        if stop == at or buffer[stop - 1] != 13:
            state[_OUTCOME] = _BROKEN
        elif kind == 45:  # -
            state[_TEXT_END] = 0
            if state[_ERROR_END] == 0:
                state[_ERROR], state[_ERROR_END], state[_ERROR_REPLY] = at + 1, stop - 1, reply
            if reply == commands + 1:
                state[_ABORTED] = 1
        elif reply == commands + 1:
            if kind != 42:  # *
                state[_OUTCOME] = _BROKEN
            elif buffer[at + 1] == 45:
                state[_ABORTED] = 1
            elif _number(buffer, at + 1, stop - 1) != commands:
                state[_OUTCOME] = _BROKEN
        elif reply > commands + 1 and kind == 36:  # $
            size = _number(buffer, at + 1, stop - 1)
            none = buffer[at + 1] == 45
            if size >= 0:
                next_at += size + 2
            if size < 0 and not (none and reply == 2 * commands + 3):
                state[_OUTCOME] = _BROKEN
            elif next_at > end:
                break
            state[_TEXT], state[_TEXT_END] = stop + 1, 0 if none else next_at - 2
        elif kind != 43:  # +
            state[_OUTCOME] = _BROKEN
        at = next_at
        reply += 1
        if reply == commands + 2 and state[_ABORTED]:
            reply += commands
        if reply == replies and state[_OUTCOME] == _WAITING:
            state[_OUTCOME] = _ANSWERED
    state[_AT], state[_REPLY] = at, reply


@kernel
def _number(buffer: Bytes, start: int, stop: int) -> int:
    """Parse a decimal number of up to nine digits; return -1 for anything else."""
    number = 0 if 0 < stop - start < 10 else -1
    for index in range(start, stop):
        if number < 0 or buffer[index] < 48 or buffer[index] > 57:
            return -1
        number = number * 10 + int(buffer[index]) - 48
    return number


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the server did with a block.

    Attributes:
        executed: Whether EXEC ran the commands; if there is no `error`, all of them succeeded.
            False without an `error` means that the watched key had changed.
        error: The first error line without its `-`, or None.
        row: Index of the command to which the error belongs: an XADD, or the SET, which comes after
            all of them; None if the error belongs to another reply.
        held: Value of the position's key after a block that keeps a position; None if there is
            none.
    """

    executed: bool
    error: str | None
    row: int | None
    held: bytes | None = None


class Replies:
    """Parses the replies to blocks incrementally, one block after the other.

    The received bytes may be cut anywhere. Call `expect`, then receive into `space()` and call
    `received(n)` until it returns a verdict. What was received after the reply to the block belongs
    to the next one.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(1 << 18, np.uint8)
        self._state = np.zeros(9, np.int64)
        self._commands = 0
        self._replies = 0
        self._end = 0

    def expect(self, rows: int, *, keeping: bool = False) -> None:
        """Begin the next block, of `rows` XADDs; `keeping` says whether it keeps a position."""
        read = int(self._state[_AT])
        self._buffer[: self._end - read] = self._buffer[read : self._end].copy()
        self._end -= read
        self._state[:] = 0
        self._commands = rows + keeping
        self._replies = 2 * self._commands + 2 + 2 * keeping
        self._scan()

    def space(self) -> memoryview:
        """Return the free part of the buffer, at least 64 KiB."""
        if len(self._buffer) - self._end < 1 << 16:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        return self._buffer.data[self._end :]

    def received(self, size: int, *, more: bool = False) -> Verdict | None:
        """Parse `size` more bytes; return the verdict once the reply is complete, until then None.

        Args:
            size: Number of bytes received into `space()`.
            more: Whether the next block is queued already, so that replies to it may follow.

        Raises:
            SinkUnavailable: The bytes are not a reply to the block; the connection is unusable.
        """
        self._end += size
        self._scan()
        outcome = self._state[_OUTCOME]
        if outcome == _WAITING:
            return None
        if outcome == _BROKEN or (self._state[_AT] != self._end and not more):
            raise SinkUnavailable("the server answered something else than what it was asked")
        return self.so_far()

    def _scan(self) -> None:
        _scan(self._buffer, self._end, self._commands, self._replies, self._state)

    def so_far(self) -> Verdict:
        """Return the verdict so far, such as an error sent before the connection broke."""
        answered = self._state[_OUTCOME] == _ANSWERED
        executed = bool(answered and not self._state[_ABORTED])
        held = None
        if answered and self._replies > 2 * self._commands + 2 and self._state[_TEXT_END]:
            held = self._buffer[self._state[_TEXT] : self._state[_TEXT_END]].tobytes()
        start, stop, reply = (int(n) for n in self._state[[_ERROR, _ERROR_END, _ERROR_REPLY]])
        if stop == 0:
            return Verdict(executed, None, None, held)
        text = self._buffer[start:stop].tobytes().decode("utf-8", "replace")
        for first in (1, self._commands + 2):  # queueing, then EXEC's items
            if first <= reply < first + self._commands:
                return Verdict(executed, text, reply - first, held)
        return Verdict(executed, text, None, held)


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    replies = Replies()
    replies.expect(0)
    replies.space()[:9] = b"+OK\r\n*0\r\n"
    replies.received(9)
