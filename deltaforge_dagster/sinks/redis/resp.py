r"""Redis' wire protocol for whole batches: packs XADD commands, and parses replies.

A Python call per field would cost more than the server needs for a message. So `pack_blocks` is
built on Numba kernels, which read the buffers of Arrow columns in place and write finished
commands. `Replies` parses the replies to a block into a verdict in the same way.

It uses RESP2 (redis.io, "Redis serialization protocol specification") on purpose: the types of
RESP3 are not needed, and every server and proxy supports RESP2.

A *block* is one transaction: `MULTI`, some XADDs, `EXEC`. The server queues the commands and runs
all of them at EXEC; if it refuses one while queueing (out of memory, read-only, no permission),
EXEC runs none. That is why a sender can continue after an error without leaving a gap. And because
nothing happens before EXEC, a sender can have the server queue a block while it still waits for the
answer to the one before.

A block that *keeps a position* also sets a key to it in the same transaction, and ends with `WATCH`
and `GET` of that key. So the server already watches the key while the next block is packed and
sent, and that block's EXEC has no effect (`*-1`) if anyone else has moved the position meanwhile.
The reply to GET shows whether that happened between EXEC and WATCH. None of this costs a round
trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.kernels.message_text import (
    TextColumns,
    digits_of,
    is_null,
    put_number,
    text_columns,
)
from deltaforge_dagster.kernels.runtime import Bytes, Longs, copy, kernel, read_only
from deltaforge_dagster.sinks.base import whole_ordinals

MAX_BLOCK_ROWS = 5_000
"""XADDs of one transaction; the server serves no other client while it runs them (about 10 ms)."""

MAX_BLOCK_BYTES = 1 << 18
"""Bytes of commands in one block, unless the messages of a single change are larger.

The server keeps the queued commands until EXEC; large blocks no longer fit into the processor's and
the allocator's caches. A message of 560 bytes costs the server 3.8 to 4.2 µs of processor time in
blocks of 1 MiB and 2.6 µs in blocks of 256 KiB. Smaller blocks are not cheaper, and suffer more
from network round trips.
"""


def _bytes(text: str) -> Bytes:
    return read_only(text.encode())


def _bulk(text: str) -> str:
    return f"${len(text.encode())}\r\n{text}\r\n"


def _command(*strings: str) -> bytes:
    return f"*{len(strings)}\r\n{''.join(map(_bulk, strings))}".encode()


_MULTI = _command("MULTI")
_EXEC = _command("EXEC")

EventField = Literal["df-event", "event"]
"""Name of the field that holds the envelope; a field named `event` is the first of the entry."""

# Parts of a command that are the same for every message.
_BEFORE_KEY = _bytes(_bulk("df-key"))
_BEFORE_HEADERS = _bytes(_bulk("df-headers"))
_XADD = _bytes("\r\n" + _bulk("XADD"))
_EMPTY = _bytes("")
_NO_LIMIT = 1 << 62

# Columns of a message that become bulk strings, and their places in `TextColumns`.
_NAMES = ("destination", "event_id", "idempotency_key", "value", "key", "headers")
_DESTINATION, _EVENT_ID, _IDEMPOTENCY_KEY, _VALUE, _KEY, _HEADERS = range(6)


class _Layout(NamedTuple):
    """The first three fields of an entry: the bytes before each value, and the value's column."""

    before: tuple[Bytes, Bytes, Bytes]
    columns: tuple[int, int, int]
    fixed: int  # number of bytes that all commands have in common


def _layout(*fields: tuple[str, int]) -> _Layout:
    names = [_bulk(name) for name, _ in fields]
    first, second, third = (_bytes(name) for name in (_bulk("*") + names[0], *names[1:]))
    fixed = sum(len(part) for part in (_XADD, first, second, third, _BEFORE_KEY))
    a, b, c = (column for _, column in fields)
    return _Layout((first, second, third), (a, b, c), fixed)


_IDS = (("event_id", _EVENT_ID), ("idempotency_key", _IDEMPOTENCY_KEY))
_LAYOUTS: dict[EventField, _Layout] = {
    "df-event": _layout(*_IDS, ("df-event", _VALUE)),
    "event": _layout(("event", _VALUE), *_IDS),
}


@dataclass(frozen=True, slots=True)
class PositionKey:
    """How blocks keep a position: they set `key` to what `text` returns for their last row.

    The key expires after `seconds`, or never if that is None.
    """

    key: str
    text: Callable[[int], str]
    seconds: int | None = None


@dataclass(frozen=True, slots=True)
class PackedCommands:
    """One packed transaction with the messages `start` to `stop` (exclusive) of a batch.

    The server queues what `queued` contains, and runs it when it gets `executed`. `queued` stays
    valid until the second block after this one is packed. `position` is the value to which the
    position's key is set, or None.
    """

    start: int
    stop: int
    queued: memoryview
    executed: bytes
    position: bytes | None = None

    @property
    def rows(self) -> int:
        """Number of messages."""
        return self.stop - self.start


def pack_blocks(
    messages: pa.RecordBatch,
    replay: str | None = None,
    *,
    keeping: PositionKey | None = None,
    event_field: EventField = "df-event",
    max_rows: int = MAX_BLOCK_ROWS,
    max_bytes: int = MAX_BLOCK_BYTES,
) -> Iterator[PackedCommands]:
    """Pack messages (columns of `sinks.base.MESSAGES`) lazily, one block per step, in order.

    No block ends between the messages of one change. A change whose messages alone exceed a limit
    becomes a block of its own.

    Args:
        messages: Rows to send; may be a slice.
        replay: Run id that every message of a replay carries in the field `df-replay`.
        keeping: How each block keeps a position; None if none does.
        event_field: See `EventField`.
        max_rows: Maximum number of messages per block.
        max_bytes: Maximum size of the XADDs of a block.

    Raises:
        SinkRejected: A column other than key and headers contains a null.
    """
    columns = text_columns({name: messages.column(name) for name in _NAMES})
    layout = _LAYOUTS[event_field]
    tail = _bytes(_bulk("df-replay") + _bulk(replay)) if replay is not None else _EMPTY
    buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    start = 0
    while start < messages.num_rows:
        most = min(start + max_rows, messages.num_rows)
        fits, size = _measure(columns, layout, len(tail), start, most, max_bytes)
        stop = whole_ordinals(messages, start, fits)
        if stop != fits:
            _, size = _measure(columns, layout, len(tail), start, stop, _NO_LIMIT)
        position = None if keeping is None else keeping.text(stop - 1)
        end = _EXEC if position is None or keeping is None else _final_commands(keeping, position)
        size += len(_MULTI)
        buffers.reverse()
        if len(buffers[0]) < size:
            buffers[0] = np.empty(size, np.uint8)
        queued = buffers[0].data[:size]
        queued[: len(_MULTI)] = _MULTI
        _emit(columns, layout, tail, start, stop, buffers[0][len(_MULTI) :])
        value = None if position is None else position.encode()
        yield PackedCommands(start, stop, queued, end, value)
        start = stop


def _final_commands(keeping: PositionKey, position: str) -> bytes:
    """Return the final commands of a block that keeps a position."""
    key, seconds = keeping.key, keeping.seconds
    expiry = () if seconds is None else ("EX", str(seconds))
    kept = _command("SET", key, position, *expiry)
    return kept + _EXEC + _command("WATCH", key) + _command("GET", key)


# One message on the wire; `;` stands for `\r\n`, <..> for the row's own text, #.. for a decimal
# length:
#
#   *#n; $4;XADD; $#;<destination>; $1;*;
#   $8;event_id;          $#;<event_id>;
#   $15;idempotency_key;  $#;<idempotency_key>;
#   $8;df-event;          $#;<value>;
#   $6;df-key;            $#;<key, or event_id if it is null>;
#   $10;df-headers;       $#;<headers>;             only if headers are not null
#   $9;df-replay;         $#;<run id>;              only in a replay: `tail`, the same in all rows
#
# n is the number of strings: 11, plus 2 for each of the last two lines. There is no MAXLEN, so
# nothing is trimmed. If the envelope's field is named `event`, its line comes before the one of
# event_id.


@kernel
def _bulk_size(length: int) -> int:
    return 1 + digits_of(length) + 2 + length + 2


@kernel
def _measure(  # noqa: PLR0917 - a kernel takes what it needs
    columns: TextColumns, layout: _Layout, tail: int, start: int, most: int, max_bytes: int
) -> tuple[int, int]:
    """Return the end of a block from row `start`, at most `most`, and the size of its XADDs."""
    stop = start
    total = 0
    while stop < most:
        size = 1 + 2 + layout.fixed + tail
        for column in range(4):
            size += _bulk_size(columns.offsets[column][stop + 1] - columns.offsets[column][stop])
        key = _EVENT_ID if is_null(columns.valid[0], columns.first_bit[0] + stop) else _KEY
        size += _bulk_size(columns.offsets[key][stop + 1] - columns.offsets[key][stop])
        if not is_null(columns.valid[1], columns.first_bit[1] + stop):
            headers = columns.offsets[_HEADERS]
            size += len(_BEFORE_HEADERS) + _bulk_size(headers[stop + 1] - headers[stop])
        if total + size > max_bytes and stop > start:
            break
        total += size
        stop += 1
    return stop, total


@kernel
def _put_bulk(out: Bytes, at: int, source: Bytes, start: int, stop: int) -> int:
    length = stop - start
    out[at] = 36  # $
    at = put_number(out, at + 1, length)
    out[at] = 13
    out[at + 1] = 10
    at = copy(source, start, stop, out, at + 2)
    out[at] = 13
    out[at + 1] = 10
    return at + 2


@kernel
def _put_cell(out: Bytes, at: int, columns: TextColumns, column: int, row: int) -> int:
    offsets = columns.offsets[column]
    return _put_bulk(out, at, columns.data[column], offsets[row], offsets[row + 1])


@kernel
def _emit(  # noqa: PLR0917 - a kernel takes what it needs
    columns: TextColumns, layout: _Layout, tail: Bytes, start: int, stop: int, out: Bytes
) -> None:
    """Write the XADDs of the rows `start` to `stop` (exclusive)."""
    first, second, third = layout.before
    at = 0
    for row in range(start, stop):
        headers = not is_null(columns.valid[1], columns.first_bit[1] + row)
        strings = 11 + 2 * int(headers) + 2 * int(len(tail) > 0)
        out[at] = 42  # *
        out[at + 1] = 48 + strings // 10
        out[at + 2] = 48 + strings % 10
        at = copy(_XADD, 0, len(_XADD), out, at + 3)
        at = _put_cell(out, at, columns, _DESTINATION, row)
        at = copy(first, 0, len(first), out, at)
        at = _put_cell(out, at, columns, layout.columns[0], row)
        at = copy(second, 0, len(second), out, at)
        at = _put_cell(out, at, columns, layout.columns[1], row)
        at = copy(third, 0, len(third), out, at)
        at = _put_cell(out, at, columns, layout.columns[2], row)
        at = copy(_BEFORE_KEY, 0, len(_BEFORE_KEY), out, at)
        key = _EVENT_ID if is_null(columns.valid[0], columns.first_bit[0] + row) else _KEY
        at = _put_cell(out, at, columns, key, row)
        if headers:
            at = copy(_BEFORE_HEADERS, 0, len(_BEFORE_HEADERS), out, at)
            at = _put_cell(out, at, columns, _HEADERS, row)
        at = copy(tail, 0, len(tail), out, at)


# The server's reply to a block of n commands (XADDs and SET); `;` stands for `\r\n`:
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
        stored: Value of the position's key after a block that keeps a position; None if there is
            none.
    """

    executed: bool
    error: str | None
    row: int | None
    stored: bytes | None = None


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
        stored = None
        if answered and self._replies > 2 * self._commands + 2 and self._state[_TEXT_END]:
            stored = self._buffer[self._state[_TEXT] : self._state[_TEXT_END]].tobytes()
        start, stop, reply = (int(n) for n in self._state[[_ERROR, _ERROR_END, _ERROR_REPLY]])
        if stop == 0:
            return Verdict(executed, None, None, stored)
        text = self._buffer[start:stop].tobytes().decode("utf-8", "replace")
        for first in (1, self._commands + 2):  # queueing, then EXEC's items
            if first <= reply < first + self._commands:
                return Verdict(executed, text, reply - first, stored)
        return Verdict(executed, text, None, stored)


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    row = {name: pa.array(["-"]) for name in _NAMES}
    list(pack_blocks(pa.record_batch({"ordinal": pa.array([0]), **row})))
    replies = Replies()
    replies.expect(0)
    replies.space()[:9] = b"+OK\r\n*0\r\n"
    replies.received(9)
