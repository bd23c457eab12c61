r"""Redis' wire protocol for whole batches: messages into XADD commands, replies into a verdict.

A Python call per field costs more than the server needs for a message, so both directions are
Numba kernels over plain bytes: `pack_blocks` reads the buffers of Arrow columns where they lie and
writes finished commands, `Replies` looks through everything the server said to one block.

RESP2 (redis.io, "Redis serialization protocol specification") on purpose: nothing here needs the
types of RESP3, and every server and proxy speaks it.

A *block* is one transaction: `MULTI`, some XADDs, `EXEC`. The server queues the commands and runs
all of them at EXEC; when it refuses one while queueing (out of memory, read-only, no permission),
EXEC runs none. That is what lets a sender go on after an error without a gap.

A block that *keeps a position* also sets a key to it, in the same transaction, and ends with `WATCH`
and `GET` of that key. So while the next block is packed and sent the server already watches, and
its EXEC does nothing (`*-1`) when anybody else has moved the position meanwhile; what GET answers
shows whether somebody did so between EXEC and WATCH. All that costs no round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.base import MESSAGES
from deltaforge_dagster.sources.kernel import Bytes, Longs, copy, kernel

_Offsets = npt.NDArray[np.int32]

MAX_BLOCK_ROWS = 5_000
"""Commands of one transaction; the server serves nobody else while it runs them (some 10 ms)."""

MAX_BLOCK_BYTES = 1 << 18
"""Bytes of one block, unless a single message is larger.

The server keeps the queued commands until EXEC, and what it keeps leaves its processor's cache and
its allocator's own. Messages of 560 bytes cost it 3.8 to 4.2 µs of processor time each in blocks of
1 MiB, 2.6 in blocks of 256 KiB and no less in smaller ones, which feel a network's round trip more.
"""


def _bytes(text: str) -> Bytes:
    return _readonly(np.frombuffer(text.encode(), np.uint8))


def _readonly(array: Bytes) -> Bytes:
    array.flags.writeable = False  # one type for all inputs is one compiled kernel
    return array


def _bulk(text: str) -> str:
    return f"${len(text.encode())}\r\n{text}\r\n"


def _command(*strings: str) -> bytes:
    return f"*{len(strings)}\r\n{''.join(map(_bulk, strings))}".encode()


_MULTI = _command("MULTI")
_EXEC = _command("EXEC")

# The parts of a command that are the same for every message, in the order of the drawing below.
_AFTER_STREAM = _bytes(_bulk("*") + _bulk("event_id"))
_BEFORE_IDEMPOTENCY_KEY = _bytes(_bulk("idempotency_key"))
_BEFORE_EVENT = _bytes(_bulk("df-event"))
_BEFORE_KEY = _bytes(_bulk("df-key"))
_BEFORE_HEADERS = _bytes(_bulk("df-headers"))
_XADD = _bytes("\r\n" + _bulk("XADD"))
_FIXED = sum(
    len(part)
    for part in (_XADD, _AFTER_STREAM, _BEFORE_IDEMPOTENCY_KEY, _BEFORE_EVENT, _BEFORE_KEY)
)
_FIXED_HEADERS = len(_BEFORE_HEADERS)
_EMPTY = _bytes("")

# Columns of a message that become bulk strings, and their places in `_Columns`.
_NAMES = ("destination", "event_id", "idempotency_key", "value", "key", "headers")
_DESTINATION, _EVENT_ID, _IDEMPOTENCY_KEY, _VALUE, _KEY, _HEADERS = range(6)


class _Columns(NamedTuple):
    """Arrow's buffers (Arrow Columnar Format, "Variable-size Binary Layout") of `_NAMES`.

    `offsets` start at the batch's first row; `valid` are the bitmaps of key and headers, empty
    when nothing is null, with the bit of row 0 at `first_bit`.
    """

    offsets: tuple[_Offsets, ...]
    data: tuple[Bytes, ...]
    valid: tuple[Bytes, Bytes]
    first_bit: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What blocks do that keep a position: set `key` to what `text` returns for their last row."""

    key: str
    text: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Block:
    """One packed transaction of the messages `start` to `stop` (exclusive) of a batch.

    `data` is MULTI, the XADDs and EXEC, and what keeps the position. It stays valid until the next
    but one block is packed. `position` is the text that the key is set to, None if none is.
    """

    start: int
    stop: int
    data: memoryview
    position: bytes | None = None

    @property
    def rows(self) -> int:
        """Number of messages."""
        return self.stop - self.start


def pack_blocks(
    messages: pa.RecordBatch,
    replay: str | None = None,
    *,
    keeping: Keeping | None = None,
    max_rows: int = MAX_BLOCK_ROWS,
    max_bytes: int = MAX_BLOCK_BYTES,
) -> Iterator[Block]:
    """Pack messages (columns of `sinks.base.MESSAGES`) lazily, one block per step, in order.

    Args:
        messages: Rows to send; may be a slice.
        replay: Run id that every message of a replay carries in the field `df-replay`.
        keeping: The position to keep with each block; None for none.
        max_rows: Messages per block at most.
        max_bytes: Bytes of commands per block at most; a larger message makes a block of its own.

    Raises:
        SinkRejected: A message lacks what every message must have.
    """
    columns = _columns(messages)
    tail = _bytes(_bulk("df-replay") + _bulk(replay)) if replay is not None else _EMPTY
    buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    start = 0
    while start < messages.num_rows:
        most = min(start + max_rows, messages.num_rows)
        stop, size = _measure(columns, len(tail), start, most, max_bytes)
        position = None if keeping is None else keeping.text(stop - 1)
        end = _EXEC if position is None or keeping is None else _keep(keeping.key, position)
        size += len(_MULTI) + len(end)
        buffers.reverse()
        if len(buffers[0]) < size:
            buffers[0] = np.empty(size, np.uint8)
        data = buffers[0].data[:size]
        data[: len(_MULTI)] = _MULTI
        _emit(columns, tail, start, stop, buffers[0][len(_MULTI) :])
        data[size - len(end) :] = end
        yield Block(start, stop, data, None if position is None else position.encode())
        start = stop


def _keep(key: str, position: str) -> bytes:
    """Return how a block ends that keeps a position."""
    return _command("SET", key, position) + _EXEC + _command("WATCH", key) + _command("GET", key)


def _columns(messages: pa.RecordBatch) -> _Columns:
    offsets, data, valid, first_bit = [], [], [], []
    for name in _NAMES:
        column = messages.column(name)
        bitmap, ends, text = column.buffers()
        first, rows = column.offset, len(column)
        if name in {"key", "headers"}:
            valid.append(_view(bitmap if column.null_count else None))
            first_bit.append(first)
        elif column.null_count:
            raise SinkRejected(f"{column.null_count} of {rows} messages have no {name}")
        ints = np.frombuffer(memoryview(ends), np.int32) if ends else np.zeros(1, np.int32)
        ints = ints[first : first + rows + 1]
        ints.flags.writeable = False
        offsets.append(ints)
        data.append(_view(text))
    return _Columns(tuple(offsets), tuple(data), (valid[0], valid[1]), (first_bit[0], first_bit[1]))


def _view(buffer: pa.Buffer | None) -> Bytes:
    if buffer is None or buffer.size == 0:
        return _EMPTY
    return _readonly(np.frombuffer(memoryview(buffer), np.uint8))


# One message on the wire; `\r\n` is drawn as `;`, <..> is the row's own text, #.. a decimal length:
#
#   *#n; $4;XADD; $#;<destination>; $1;*;
#   $8;event_id;          $#;<event_id>;
#   $15;idempotency_key;  $#;<idempotency_key>;
#   $8;df-event;          $#;<value>;
#   $6;df-key;            $#;<key, or event_id where it is null>;
#   $10;df-headers;       $#;<headers>;             only where headers are not null
#   $9;df-replay;         $#;<run id>;              only in a replay: `tail`, the same in all rows
#
# n counts the strings: 11, and 2 more for each of the last two lines. No MAXLEN: nothing is trimmed.


@kernel
def _is_null(valid: Bytes, bit: int) -> bool:
    return len(valid) > 0 and (valid[bit >> 3] >> (bit & 7)) & 1 == 0


@kernel
def _digits(number: int) -> int:
    digits = 1
    while number >= 10:
        number //= 10
        digits += 1
    return digits


@kernel
def _bulk_size(length: int) -> int:
    return 1 + _digits(length) + 2 + length + 2


@kernel
def _measure(
    columns: _Columns, tail: int, start: int, most: int, max_bytes: int
) -> tuple[int, int]:
    """Return where a block from row `start` ends, `most` at most, and the bytes of its XADDs."""
    stop = start
    total = 0
    while stop < most:
        size = 1 + 2 + _FIXED + tail
        for column in range(4):
            size += _bulk_size(columns.offsets[column][stop + 1] - columns.offsets[column][stop])
        key = _EVENT_ID if _is_null(columns.valid[0], columns.first_bit[0] + stop) else _KEY
        size += _bulk_size(columns.offsets[key][stop + 1] - columns.offsets[key][stop])
        if not _is_null(columns.valid[1], columns.first_bit[1] + stop):
            headers = columns.offsets[_HEADERS]
            size += _FIXED_HEADERS + _bulk_size(headers[stop + 1] - headers[stop])
        if total + size > max_bytes and stop > start:
            break
        total += size
        stop += 1
    return stop, total


@kernel
def _put_bulk(out: Bytes, at: int, source: Bytes, start: int, stop: int) -> int:
    length = stop - start
    out[at] = 36  # $
    digits = _digits(length)
    rest = length
    for place in range(at + digits, at, -1):
        out[place] = 48 + rest % 10
        rest //= 10
    at += 1 + digits
    out[at] = 13
    out[at + 1] = 10
    at = copy(source, start, stop, out, at + 2)
    out[at] = 13
    out[at + 1] = 10
    return at + 2


@kernel
def _put_cell(out: Bytes, at: int, columns: _Columns, column: int, row: int) -> int:
    offsets = columns.offsets[column]
    return _put_bulk(out, at, columns.data[column], offsets[row], offsets[row + 1])


@kernel
def _emit(columns: _Columns, tail: Bytes, start: int, stop: int, out: Bytes) -> None:
    """Write the commands of the rows `start` to `stop`."""
    at = 0
    for row in range(start, stop):
        headers = not _is_null(columns.valid[1], columns.first_bit[1] + row)
        strings = 11 + 2 * int(headers) + 2 * int(len(tail) > 0)
        out[at] = 42  # *
        out[at + 1] = 48 + strings // 10
        out[at + 2] = 48 + strings % 10
        at = copy(_XADD, 0, len(_XADD), out, at + 3)
        at = _put_cell(out, at, columns, _DESTINATION, row)
        at = copy(_AFTER_STREAM, 0, len(_AFTER_STREAM), out, at)
        at = _put_cell(out, at, columns, _EVENT_ID, row)
        at = copy(_BEFORE_IDEMPOTENCY_KEY, 0, len(_BEFORE_IDEMPOTENCY_KEY), out, at)
        at = _put_cell(out, at, columns, _IDEMPOTENCY_KEY, row)
        at = copy(_BEFORE_EVENT, 0, len(_BEFORE_EVENT), out, at)
        at = _put_cell(out, at, columns, _VALUE, row)
        at = copy(_BEFORE_KEY, 0, len(_BEFORE_KEY), out, at)
        key = _EVENT_ID if _is_null(columns.valid[0], columns.first_bit[0] + row) else _KEY
        at = _put_cell(out, at, columns, key, row)
        if headers:
            at = copy(_BEFORE_HEADERS, 0, len(_BEFORE_HEADERS), out, at)
            at = _put_cell(out, at, columns, _HEADERS, row)
        at = copy(tail, 0, len(tail), out, at)


# The server's answer to a block of n commands (XADDs, and SET), again with `;` for `\r\n`:
#
#   +OK; (+QUEUED;) x n       one status line per command, or an error line -CODE text;
#   *n; ($#;<id>; | +OK;) x n EXEC ran: an entry id per XADD, OK for SET, or an error line instead
#   -EXECABORT text;          or: EXEC ran nothing, a command was refused while queueing
#   *-1;                      or: EXEC ran nothing, the watched key had changed
#   +OK; $#;<position>;       only of a block that keeps a position: WATCH, and GET ($-1; for none)
#
# What `_scan` remembers between two pieces of it: where it stands, how many replies are behind it
# (MULTI and the commands, then EXEC, then its items, then WATCH and GET; all items at once when
# there are none), the bounds of the first error line and which reply that was, how the block
# ended, whether EXEC ran nothing, and the bounds of the newest bulk string.
_AT, _REPLY, _ERROR, _ERROR_END, _ERROR_REPLY, _OUTCOME, _ABORTED, _TEXT, _TEXT_END = range(9)
_WAITING, _ANSWERED, _BROKEN = range(3)


@kernel
def _scan(  # noqa: C901, PLR0912 - one machine, one loop
    buffer: Bytes, end: int, commands: int, replies: int, state: Longs
) -> None:
    """Go through the whole replies between `state[_AT]` and `end`, of `replies` in all."""
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
    """Return a short decimal number, -1 for anything else."""
    number = 0 if 0 < stop - start < 10 else -1
    for place in range(start, stop):
        if number < 0 or buffer[place] < 48 or buffer[place] > 57:
            return -1
        number = number * 10 + int(buffer[place]) - 48
    return number


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the server did with a block.

    Attributes:
        executed: EXEC ran the commands; without `error` every one of them succeeded. False without
            `error`: the watched key had changed.
        error: The first error line without its `-`, None when there was none.
        row: Which command of the block the error answers, from 0: an XADD, or after all of them
            the SET; None when it answers something else.
        held: What the position's key holds after a block that keeps one; None for nothing.
    """

    executed: bool
    error: str | None
    row: int | None
    held: bytes | None = None


class Replies:
    """Reads the answer to one block as it arrives, cut anywhere.

    Call `expect`, then receive into `space()` and tell `received(n)` until that gives a verdict.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(1 << 18, np.uint8)
        self._state = np.zeros(9, np.int64)
        self._commands = 0
        self._replies = 0
        self._end = 0

    def expect(self, rows: int, *, keeping: bool = False) -> None:
        """Start anew, for a block of `rows` XADDs that keeps a position or does not."""
        self._state[:] = 0
        self._commands = rows + keeping
        self._replies = 2 * self._commands + 2 + 2 * keeping
        self._end = 0

    def space(self) -> memoryview:
        """Return where to receive next: at least 64 KiB."""
        if len(self._buffer) - self._end < 1 << 16:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        return self._buffer.data[self._end :]

    def received(self, size: int) -> Verdict | None:
        """Take in `size` more bytes; None until the answer is whole.

        Raises:
            SinkUnavailable: The bytes are no answer to a block; the connection is of no use.
        """
        self._end += size
        _scan(self._buffer, self._end, self._commands, self._replies, self._state)
        outcome = self._state[_OUTCOME]
        if outcome == _WAITING:
            return None
        if outcome == _BROKEN or self._state[_AT] != self._end:
            raise SinkUnavailable("the server answered something else than what it was asked")
        return self.so_far()

    def so_far(self) -> Verdict:
        """Return the verdict on what has arrived: an error sent before a connection broke."""
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
    row = [pa.array([0]), *(pa.array(["-"]) for _ in _NAMES)]
    list(pack_blocks(pa.record_batch(row, schema=MESSAGES)))
    replies = Replies()
    replies.expect(0)
    replies.space()[:9] = b"+OK\r\n*0\r\n"
    replies.received(9)
