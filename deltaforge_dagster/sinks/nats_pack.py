r"""NATS' wire protocol for whole batches: messages into `HPUB` commands.

A Python call per message costs several times what the server needs for it, so this is a Numba
kernel over plain bytes, as is the way back (`nats_answers`): `Packer` reads the buffers of Arrow columns
where they lie and writes finished commands (docs.nats.io, "Client Protocol", section HPUB).

Messages for a stream are *chained*: each one names the one before it and is stored only directly
behind it (`Nats-Expected-Last-Msg-Id`). So a server that refuses one refuses all that were sent after
it, and what is stored is a beginning without gaps, however many are on their way. What a chain's first message
must find in the stream is said by the sender, in the headers that it gives for the first row.
"""

# ruff: noqa: C901, PLR0911, PLR0917, PLR1714 - kernels are flat loops over bytes, see `sources.kernel`

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.sinks.base import MESSAGES, whole_ordinals
from deltaforge_dagster.sinks.text_columns import digits_of, is_null, put_number, text_column
from deltaforge_dagster.sources.kernel import Bytes, Longs, copy, kernel, read_only

_Offsets = npt.NDArray[np.int32]

MAX_BLOCK_ROWS = 2_000
"""Messages sent before one looks at the guard; two blocks at most are on their way. The server keeps
what it has read and not stored in a queue of 10,000 (`max_buffered_msgs`), of all who send to a stream, and
refuses what does not fit."""

MAX_BLOCK_BYTES = 1 << 20
"""Bytes of one block, unless a single change is larger."""

MAX_SUBJECT = 2_000
"""Bytes of a subject. Servers end connections whose command lines are beyond 4,096 (`max_control_line`)."""

_OVERHEAD = 256
"""Bytes of a message beside its texts, at most: the names of its headers and their numbers."""

_EMPTY = read_only(b"")
_CRLF = read_only(b"\r\n")
_HPUB = read_only(b"HPUB ")
_VERSION = read_only(b"NATS/1.0\r\nNats-Msg-Id: ")
_EXPECTED = read_only(b"Nats-Expected-Last-Msg-Id: ")
_KEY_NAME = read_only(b"df-key: ")
_POSITION_NAME = read_only(b"df-position: ")
_MINUS_ONE = read_only(b"-1")
_NO_LIMIT = 1 << 62

_NAMES = ("destination", "idempotency_key", "value", "key", "headers", "event_id")
_DESTINATION, _ID, _VALUE, _KEY, _HEADERS, _EVENT_ID = range(6)
_NO_PROBLEM, _SUBJECT, _TOO_LARGE, _LINE_BREAK = range(4)
_PROBLEMS: dict[int, Literal["subject", "too large", "line break"]] = {
    _SUBJECT: "subject",
    _TOO_LARGE: "too large",
    _LINE_BREAK: "line break",
}

_HEADER_NAME = re.compile(r"[!-9;-~]+")  # visible ASCII without the colon
_HEADER_VALUE = re.compile(r"[^\r\n\0]*")
_RESERVED = ("nats-", "df-key", "df-position", "df-replay")
"""How names of headers begin that the server or this sink gives a meaning to."""


class _Columns(NamedTuple):
    """Arrow's buffers (Arrow Columnar Format, "Variable-size Binary Layout") of `_NAMES`.

    `offsets` start at the batch's first row; `valid` are the bitmaps of key and headers, empty
    when nothing is null, with the bit of row 0 at `first_bit`.
    """

    offsets: tuple[_Offsets, ...]
    data: tuple[Bytes, ...]
    valid: tuple[Bytes, Bytes]
    first_bit: tuple[int, int]
    ordinals: Longs


class _Shared(NamedTuple):
    """What the messages of a block share.

    `reply` is what answers go to, with a number behind it; empty for messages that nobody
    answers, and that are not chained. `suffix` ends every message id and its line; `marks` are whole
    header lines.
    """

    reply: Bytes
    suffix: Bytes
    marks: Bytes


class _Special(NamedTuple):
    """What single rows of a block have: `first` are header lines of its first row.

    With `keeping` 1 the rows `anchor` and `last` have whole positions, the others short ones.
    """

    first: Bytes
    keeping: int
    anchor: int
    anchor_position: Bytes
    last: int
    last_position: Bytes


@dataclass(frozen=True, slots=True)
class Keeping:
    """How messages say what position the sink has with them, in the header `df-position`.

    The last message of the block's first change, and the last one of a segment, have the whole
    position. A message behind them says `<n> <ordinal> <event id>`: that of the message `n` places
    before it, with this ordinal and this event. One that more messages of its change follow says `-1`: the same
    as the message before it; a block's first one says where that is, `before`.

    Attributes:
        text: Returns the whole position of a sink that has everything up to a row.
        last: The row that is the last one of its segment, None when the batch does not have it.
        before: `-1`, or `-@<sequence in the stream>` where the message before is not the sink's.
    """

    text: Callable[[int], str]
    last: int | None
    before: str = "-1"


@dataclass(frozen=True, slots=True)
class Block:
    """Packed commands of the messages `start` to `stop` (exclusive) of a batch.

    `data` stays valid until the third block after it is packed. Answers have the numbers from
    `number` on.
    """

    start: int
    stop: int
    number: int
    data: memoryview

    @property
    def rows(self) -> int:
        """Number of messages."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Problem:
    """A message that no server takes: its row, and why."""

    row: int
    kind: Literal["subject", "too large", "line break"]


class Packer:
    """Packs the messages (columns of `sinks.base.MESSAGES`) of one batch, block by block.

    Args:
        messages: Rows to send; may be a slice.
        suffix: Ends the id of every message.
        reply: Prefix of the subjects that answers go to; None for messages that nobody answers, and
            that are not chained.

    Raises:
        SinkRejected: A message lacks what every message must have.
        Undeliverable: A message has headers that cannot be sent.
    """

    def __init__(self, messages: pa.RecordBatch, suffix: str, reply: str | None) -> None:
        self._messages = messages
        self._suffix = suffix
        self._columns = _columns(messages)
        self._reply = _EMPTY if reply is None else read_only(f"{reply}.".encode())
        self._suffix_line = read_only(f"{suffix}\r\n".encode())
        self._buffers = [np.empty(0, np.uint8) for _ in range(3)]

    def message_id(self, row: int) -> str:
        """Return the `Nats-Msg-Id` of a row."""
        return f"{self._messages.column('idempotency_key')[row].as_py()}{self._suffix}"

    def problem(self, limit: int) -> Problem | None:
        """Return the first message that no server takes whose limit are `limit` bytes a message."""
        own = _OVERHEAD + 2 * len(self._suffix_line)
        row, kind = _check(self._columns, own, limit)
        return Problem(row, _PROBLEMS[kind]) if kind != _NO_PROBLEM else None

    def pack(
        self,
        start: int,
        stop: int,
        number: int,
        first: Mapping[str, str],
        marks: Mapping[str, str],
        keeping: Keeping | None = None,
        *,
        max_rows: int = MAX_BLOCK_ROWS,
        max_bytes: int = MAX_BLOCK_BYTES,
    ) -> Block:
        """Pack messages from `start` on, none from `stop` on.

        No block ends between messages of one change. One whose messages alone are beyond a limit
        makes a block of its own.

        Args:
            start: First row.
            stop: Where the rows end that may be sent.
            number: Of the first answer.
            first: Headers of the first row.
            marks: Headers of every row.
            keeping: The positions to keep; None for none.
            max_rows: Messages at most.
            max_bytes: Bytes at most.
        """
        shared = _Shared(self._reply, self._suffix_line, _lines(marks))
        special = self._special(start, stop, first, keeping)
        most = min(start + max_rows, stop)
        fits, size = _measure(self._columns, shared, special, start, most, number, max_bytes)
        end = whole_ordinals(self._messages, start, fits)
        if end != fits:
            _, size = _measure(self._columns, shared, special, start, end, number, _NO_LIMIT)
        self._buffers.append(self._buffers.pop(0))
        if len(self._buffers[-1]) < size:
            self._buffers[-1] = np.empty(size, np.uint8)
        buffer = self._buffers[-1]
        _emit(self._columns, shared, special, start, end, number, buffer)
        return Block(start, end, number, buffer.data[:size])

    def _special(
        self, start: int, stop: int, first: Mapping[str, str], keeping: Keeping | None
    ) -> _Special:
        if keeping is None:
            return _Special(_lines(first), 0, -1, _EMPTY, -1, _EMPTY)
        anchor = whole_ordinals(self._messages, start, start + 1) - 1
        if anchor > start:
            first = {**first, "df-position": keeping.before}
        last = keeping.last if keeping.last is not None and keeping.last < stop else -1
        return _Special(
            _lines(first),
            1,
            anchor,
            read_only(keeping.text(anchor).encode()),
            last,
            _EMPTY if last < 0 else read_only(keeping.text(last).encode()),
        )


def _lines(headers: Mapping[str, str]) -> Bytes:
    return read_only("".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode())


def _columns(messages: pa.RecordBatch) -> _Columns:
    nullable = ("key", "headers")
    found = {n: text_column(n, _column(messages, n), nullable=n in nullable) for n in _NAMES}
    key, headers = (found[name] for name in nullable)
    return _Columns(
        tuple(one.offsets for one in found.values()),
        tuple(one.data for one in found.values()),
        (key.valid, headers.valid),
        (key.first_bit, headers.first_bit),
        messages.column("ordinal").to_numpy(),
    )


def _column(messages: pa.RecordBatch, name: str) -> pa.Array[Any]:
    column = messages.column(name)
    if name == "headers":
        return _rendered(messages, column)
    changes = messages.column("change_id")
    if name == "event_id" and changes.null_count < len(changes):
        return pc.coalesce(changes, column)
    return column


def _rendered(messages: pa.RecordBatch, column: pa.Array[Any]) -> pa.Array[Any]:
    """Return the headers as lines, ready to be copied; only few events have any."""
    if column.null_count == len(column):
        return column
    lines: dict[str, str] = {}
    for row, text in enumerate(column.to_pylist()):
        if text is not None and text not in lines:
            headers = {str(name): str(value) for name, value in orjson.loads(text).items()}
            for name, value in headers.items():
                if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                    raise _bad_header(messages, row, "has a header that NATS cannot carry")
                if name.lower().startswith(_RESERVED):
                    raise _bad_header(messages, row, f"has the header {name!r}, which is not free")
            lines[text] = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return pa.array([text and lines[text] for text in column.to_pylist()], pa.string())


def _bad_header(messages: pa.RecordBatch, row: int, what: str) -> Undeliverable:
    ordinal = cast("int", messages.column("ordinal")[row].as_py())
    return Undeliverable(f"the message of ordinal {ordinal} {what}", ordinal, "serialization")


# One message on the wire; `\r\n` is drawn as `;`, <..> is the row's own text, #.. a decimal number:
#
#   HPUB <destination> [<reply>.#n ]#header #all;      sizes of the headers, and of headers and value
#   NATS/1.0;
#   Nats-Msg-Id: <idempotency key><suffix>;
#   Nats-Expected-Last-Msg-Id: <idempotency key of the row before><suffix>;      if it is chained
#   df-key: <key>;                                     only where the key is not null
#   <headers>                                          whole lines, only where they are not null
#   <marks>                                            whole lines, the same in all rows
#   df-position: <position>;                           see `Keeping`
#   <first>                                            whole lines, only in the block's first row
#   ;
#   <value>;


@kernel
def _size(columns: _Columns, column: int, row: int) -> int:
    offsets = columns.offsets[column]
    size: int = offsets[row + 1] - offsets[row]
    return size


@kernel
def _more_follow(columns: _Columns, row: int) -> bool:
    """Say whether the next row is a message of the same change."""
    ordinals = columns.ordinals
    return row + 1 < len(ordinals) and ordinals[row + 1] == ordinals[row]


@kernel
def _position_size(columns: _Columns, special: _Special, start: int, row: int) -> int:
    """Return the bytes of a row's own position, 0 where it has none."""
    if special.keeping == 0:
        return 0
    if row == special.anchor:
        return len(special.anchor_position)
    if row == special.last:
        return len(special.last_position)
    if _more_follow(columns, row):
        return 0 if row == start else 2
    size = digits_of(row - special.anchor) + 1 + digits_of(columns.ordinals[row]) + 1
    return size + _size(columns, _EVENT_ID, row)


@kernel
def _header_size(
    columns: _Columns, shared: _Shared, special: _Special, start: int, row: int
) -> int:
    size = len(_VERSION) + _size(columns, _ID, row) + len(shared.suffix) + len(shared.marks) + 2
    if row == start:
        size += len(special.first)
    elif len(shared.reply) > 0:
        size += len(_EXPECTED) + _size(columns, _ID, row - 1) + len(shared.suffix)
    if not is_null(columns.valid[0], columns.first_bit[0] + row):
        size += len(_KEY_NAME) + _size(columns, _KEY, row) + 2
    if not is_null(columns.valid[1], columns.first_bit[1] + row):
        size += _size(columns, _HEADERS, row)
    position = _position_size(columns, special, start, row)
    if position > 0:
        size += len(_POSITION_NAME) + position + 2
    return size


@kernel
def _command_size(
    columns: _Columns, shared: _Shared, special: _Special, start: int, row: int, number: int
) -> int:
    header = _header_size(columns, shared, special, start, row)
    whole = header + _size(columns, _VALUE, row)
    size = len(_HPUB) + _size(columns, _DESTINATION, row) + 1
    if len(shared.reply) > 0:
        size += len(shared.reply) + digits_of(number + row - start) + 1
    return size + digits_of(header) + 1 + digits_of(whole) + 2 + whole + 2


@kernel
def _measure(
    columns: _Columns,
    shared: _Shared,
    special: _Special,
    start: int,
    most: int,
    number: int,
    max_bytes: int,
) -> tuple[int, int]:
    """Return where a block from row `start` ends, `most` at most, and the bytes of its commands."""
    stop = start
    total = 0
    while stop < most:
        size = _command_size(columns, shared, special, start, stop, number)
        if total + size > max_bytes and stop > start:
            break
        total += size
        stop += 1
    return stop, total


@kernel
def _check(columns: _Columns, own: int, limit: int) -> tuple[int, int]:
    """Return the first row that cannot be sent, and why; see `_PROBLEMS`."""
    subjects = columns.offsets[_DESTINATION]
    text = columns.data[_DESTINATION]
    keys = columns.data[_KEY]
    for row in range(len(columns.ordinals)):
        first, end = subjects[row], subjects[row + 1]
        if end == first or end - first > MAX_SUBJECT:
            return row, _SUBJECT
        before = 46
        for place in range(first, end):
            byte = text[place]
            if byte <= 32 or byte == 127 or byte == 42 or byte == 62:  # blank, control, * and >
                return row, _SUBJECT
            if byte == 46 and before == 46:
                return row, _SUBJECT
            before = byte
        if before == 46:
            return row, _SUBJECT
        size = own + _size(columns, _ID, row) + _size(columns, _VALUE, row)
        size += _size(columns, _EVENT_ID, row)
        if row > 0:
            size += _size(columns, _ID, row - 1)
        if not is_null(columns.valid[0], columns.first_bit[0] + row):
            size += _size(columns, _KEY, row)
            for place in range(columns.offsets[_KEY][row], columns.offsets[_KEY][row + 1]):
                if keys[place] == 10 or keys[place] == 13 or keys[place] == 0:
                    return row, _LINE_BREAK
        if not is_null(columns.valid[1], columns.first_bit[1] + row):
            size += _size(columns, _HEADERS, row)
        if size > limit:
            return row, _TOO_LARGE
    return 0, _NO_PROBLEM


@kernel
def _put(out: Bytes, at: int, text: Bytes) -> int:
    return copy(text, 0, len(text), out, at)


@kernel
def _put_cell(out: Bytes, at: int, columns: _Columns, column: int, row: int) -> int:
    offsets = columns.offsets[column]
    return copy(columns.data[column], offsets[row], offsets[row + 1], out, at)


@kernel
def _put_position(
    out: Bytes, at: int, columns: _Columns, special: _Special, start: int, row: int
) -> int:
    if _position_size(columns, special, start, row) == 0:
        return at
    at = _put(out, at, _POSITION_NAME)
    if row == special.anchor:
        at = _put(out, at, special.anchor_position)
    elif row == special.last:
        at = _put(out, at, special.last_position)
    elif _more_follow(columns, row):
        at = _put(out, at, _MINUS_ONE)
    else:
        at = put_number(out, at, row - special.anchor)
        out[at] = 32
        at = put_number(out, at + 1, columns.ordinals[row])
        out[at] = 32
        at = _put_cell(out, at + 1, columns, _EVENT_ID, row)
    return _put(out, at, _CRLF)


@kernel
def _emit(
    columns: _Columns,
    shared: _Shared,
    special: _Special,
    start: int,
    stop: int,
    number: int,
    out: Bytes,
) -> None:
    """Write the commands of the rows `start` to `stop`."""
    at = 0
    for row in range(start, stop):
        header = _header_size(columns, shared, special, start, row)
        at = _put(out, at, _HPUB)
        at = _put_cell(out, at, columns, _DESTINATION, row)
        out[at] = 32
        at += 1
        if len(shared.reply) > 0:
            at = _put(out, at, shared.reply)
            at = put_number(out, at, number + row - start)
            out[at] = 32
            at += 1
        at = put_number(out, at, header)
        out[at] = 32
        at = put_number(out, at + 1, header + _size(columns, _VALUE, row))
        at = _put(out, at, _CRLF)
        at = _put(out, at, _VERSION)
        at = _put_cell(out, at, columns, _ID, row)
        at = _put(out, at, shared.suffix)
        if row > start and len(shared.reply) > 0:
            at = _put(out, at, _EXPECTED)
            at = _put_cell(out, at, columns, _ID, row - 1)
            at = _put(out, at, shared.suffix)
        if not is_null(columns.valid[0], columns.first_bit[0] + row):
            at = _put(out, at, _KEY_NAME)
            at = _put_cell(out, at, columns, _KEY, row)
            at = _put(out, at, _CRLF)
        if not is_null(columns.valid[1], columns.first_bit[1] + row):
            at = _put_cell(out, at, columns, _HEADERS, row)
        at = _put(out, at, shared.marks)
        at = _put_position(out, at, columns, special, start, row)
        if row == start:
            at = _put(out, at, special.first)
        at = _put(out, at, _CRLF)
        at = _put_cell(out, at, columns, _VALUE, row)
        at = _put(out, at, _CRLF)


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    row = dict.fromkeys(MESSAGES.names, "-") | {"ordinal": 0, "headers": None}
    packer = Packer(pa.RecordBatch.from_pylist([row], schema=MESSAGES), "|", "_")
    packer.problem(1 << 20)
    packer.pack(0, 1, 1, {}, {}, Keeping(lambda _: "{}", None))
