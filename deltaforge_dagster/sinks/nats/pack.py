r"""Packs a batch into blocks of `HPUB` commands for a NATS server, with kernels.

A Python call per message would cost several times what the server needs for it, so kernels write
whole blocks; kernels also parse the answers (`answers`). `Packer` decides the bounds of blocks and
their headers. `measure` returns how many messages fit into a block and their size, `emit` writes
them, and `check` finds a message that no server accepts. All of them read the buffers of Arrow
columns in place.

Messages for a stream are *chained*: each one names the message before it and is stored only
directly after it (`Nats-Expected-Last-Msg-Id`). So a server that refuses one message refuses all
that were sent after it, and the stored messages are a prefix without gaps, however many are on
their way. If a message is stored, all before it are, so not every message has to be answered. The
sender states the condition for a chain's first message in the headers that it passes for the first
row.

The bytes of one message (docs.nats.io, "Client Protocol", section HPUB); `;` stands for `\r\n`,
<..> for the row's own text, #.. for a decimal number::

    HPUB <destination> [<reply>.#n ]#header #all;      n only if it is answered; sizes of the
                                                       headers, and of headers and value
    NATS/1.0;
    Nats-Msg-Id: <idempotency key><suffix>;
    Nats-Expected-Last-Msg-Id: <idempotency key of the row before><suffix>;      if it is chained
    df-key: <key>;                                     only if the key is not null
    <headers>                                          whole lines, only if they are not null
    <marks>                                            whole lines, the same in all rows
    df-position: <position>;                           see `PositionHeader`
    <first>                                            whole lines, only in the block's first row
    ;
    <value>;
"""

# ruff: noqa: C901, PLR0911, PLR0917, PLR1714 - kernels are flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.kernels.message_text import (
    TextColumns,
    digits_of,
    is_null,
    put_number,
    text_columns,
)
from deltaforge_dagster.kernels.runtime import Bytes, Longs, copy, kernel, read_only
from deltaforge_dagster.sinks.base import MESSAGES, whole_ordinals

MAX_SUBJECT = 2_000
"""Maximum length of a subject.

Servers close connections with command lines of more than 4,096 bytes (`max_control_line`).
"""

OVERHEAD = 256
"""Upper limit of a message's bytes beside its texts: header names and numbers."""

NAMES = ("destination", "idempotency_key", "value", "key", "headers", "event_id")
"""Columns of a message that its command contains, in their order in `TextColumns`."""

NO_PROBLEM, SUBJECT, TOO_LARGE, LINE_BREAK = range(4)
"""Results of `check`."""

_DESTINATION, _ID, _VALUE, _KEY, _HEADERS, _EVENT_ID = range(6)

_CRLF = read_only(b"\r\n")
_HPUB = read_only(b"HPUB ")
_VERSION = read_only(b"NATS/1.0\r\nNats-Msg-Id: ")
_EXPECTED = read_only(b"Nats-Expected-Last-Msg-Id: ")
_KEY_NAME = read_only(b"df-key: ")
_POSITION_NAME = read_only(b"df-position: ")
_MINUS_ONE = read_only(b"-1")

MAX_BLOCK_ROWS = 2_000
"""Messages sent between two calls of the guard; at most two blocks are on their way.

The server queues up to 10,000 messages (`max_buffered_msgs`) that are read but not yet stored, of
all publishers to a stream, and refuses more.
"""

MAX_BLOCK_BYTES = 1 << 20
"""Bytes of one block, unless the messages of a single change are larger."""

_EMPTY = read_only(b"")
_NO_LIMIT = 1 << 62

_PROBLEMS: dict[int, Literal["subject", "too large", "line break"]] = {
    SUBJECT: "subject",
    TOO_LARGE: "too large",
    LINE_BREAK: "line break",
}

_HEADER_NAME = re.compile(r"[!-9;-~]+")  # visible ASCII without the colon
_HEADER_VALUE = re.compile(r"[^\r\n\0]*")
_RESERVED = ("nats-", "df-key", "df-position", "df-replay")
"""Prefixes of header names that have a meaning to the server or this sink."""


class Shared(NamedTuple):
    """Texts shared by all messages of a block.

    `reply` is the prefix, before a number, of the subjects for answers; it is empty for messages
    that are neither answered nor chained. Every `every`-th message of a block is answered, and its
    last one. `suffix` ends every message id and its line; `marks` are whole header lines.
    """

    reply: Bytes
    every: int
    suffix: Bytes
    marks: Bytes


class Special(NamedTuple):
    """Texts of single rows of a block: `first` are additional header lines of its first row.

    `ordinals` are the ordinals of all rows; messages of one change have the same one. If `keeping`
    is 1, the rows `anchor` and `last` have whole positions, the others short ones; if it is 0, none
    has.
    """

    ordinals: Longs
    first: Bytes
    keeping: int
    anchor: int
    anchor_position: Bytes
    last: int
    last_position: Bytes


@kernel
def _size(columns: TextColumns, column: int, row: int) -> int:
    offsets = columns.offsets[column]
    size: int = offsets[row + 1] - offsets[row]
    return size


@kernel
def _more_follow(special: Special, row: int) -> bool:
    """Return whether the next row is a message of the same change."""
    ordinals = special.ordinals
    return row + 1 < len(ordinals) and ordinals[row + 1] == ordinals[row]


@kernel
def _position_size(columns: TextColumns, special: Special, start: int, row: int) -> int:
    """Return the size of a row's `df-position`, 0 if it has none or `first` contains it."""
    if special.keeping == 0:
        return 0
    if row == special.anchor:
        return len(special.anchor_position)
    if row == special.last:
        return len(special.last_position)
    if _more_follow(special, row):
        return 0 if row == start else 2
    size = digits_of(row - special.anchor) + 1 + digits_of(special.ordinals[row]) + 1
    return size + _size(columns, _EVENT_ID, row)


@kernel
def _header_size(
    columns: TextColumns, shared: Shared, special: Special, start: int, row: int
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
    columns: TextColumns, shared: Shared, special: Special, start: int, row: int, number: int
) -> int:
    """Return the size of a row's command if it is answered.

    `number` is the number of the block's first answer if every row is answered.
    """
    header = _header_size(columns, shared, special, start, row)
    whole = header + _size(columns, _VALUE, row)
    size = len(_HPUB) + _size(columns, _DESTINATION, row) + 1
    if len(shared.reply) > 0:
        size += len(shared.reply) + digits_of(number + row - start) + 1
    return size + digits_of(header) + 1 + digits_of(whole) + 2 + whole + 2


@kernel
def measure(
    columns: TextColumns,
    shared: Shared,
    special: Special,
    start: int,
    most: int,
    number: int,
    max_bytes: int,
) -> tuple[int, int]:
    """Return the end of a block from row `start`, at most `most`, and an upper limit of its size.

    The size is that of the commands if each of them is answered.
    """
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
def check(columns: TextColumns, own: int, limit: int) -> tuple[int, int]:
    """Return the first row that cannot be sent, and why; `NO_PROBLEM` if all can be sent."""
    subjects = columns.offsets[_DESTINATION]
    text = columns.data[_DESTINATION]
    keys = columns.data[_KEY]
    for row in range(len(subjects) - 1):
        first, end = subjects[row], subjects[row + 1]
        if end == first or end - first > MAX_SUBJECT:
            return row, SUBJECT
        before = 46  # a dot, after which none may follow
        for index in range(first, end):
            byte = text[index]
            if byte <= 32 or byte == 127 or byte == 42 or byte == 62:  # blank, control, * and >
                return row, SUBJECT
            if byte == 46 and before == 46:
                return row, SUBJECT
            before = byte
        if before == 46:
            return row, SUBJECT
        size = own + _size(columns, _ID, row) + _size(columns, _VALUE, row)
        size += _size(columns, _EVENT_ID, row)
        if row > 0:
            size += _size(columns, _ID, row - 1)
        if not is_null(columns.valid[0], columns.first_bit[0] + row):
            size += _size(columns, _KEY, row)
            for index in range(columns.offsets[_KEY][row], columns.offsets[_KEY][row + 1]):
                if keys[index] == 10 or keys[index] == 13 or keys[index] == 0:
                    return row, LINE_BREAK
        if not is_null(columns.valid[1], columns.first_bit[1] + row):
            size += _size(columns, _HEADERS, row)
        if size > limit:
            return row, TOO_LARGE
    return 0, NO_PROBLEM


@kernel
def _put(out: Bytes, at: int, text: Bytes) -> int:
    return copy(text, 0, len(text), out, at)


@kernel
def _put_cell(out: Bytes, at: int, columns: TextColumns, column: int, row: int) -> int:
    offsets = columns.offsets[column]
    return copy(columns.data[column], offsets[row], offsets[row + 1], out, at)


@kernel
def _put_position(
    out: Bytes, at: int, columns: TextColumns, special: Special, start: int, row: int
) -> int:
    if _position_size(columns, special, start, row) == 0:
        return at
    at = _put(out, at, _POSITION_NAME)
    if row == special.anchor:
        at = _put(out, at, special.anchor_position)
    elif row == special.last:
        at = _put(out, at, special.last_position)
    elif _more_follow(special, row):
        at = _put(out, at, _MINUS_ONE)
    else:
        at = put_number(out, at, row - special.anchor)
        out[at] = 32
        at = put_number(out, at + 1, special.ordinals[row])
        out[at] = 32
        at = _put_cell(out, at + 1, columns, _EVENT_ID, row)
    return _put(out, at, _CRLF)


@kernel
def emit(
    columns: TextColumns,
    shared: Shared,
    special: Special,
    start: int,
    stop: int,
    number: int,
    out: Bytes,
) -> int:
    """Write the commands of the rows `start` to `stop` (exclusive); return their size."""
    at = 0
    for row in range(start, stop):
        header = _header_size(columns, shared, special, start, row)
        at = _put(out, at, _HPUB)
        at = _put_cell(out, at, columns, _DESTINATION, row)
        out[at] = 32
        at += 1
        if len(shared.reply) > 0 and ((row - start + 1) % shared.every == 0 or row == stop - 1):
            at = _put(out, at, shared.reply)
            at = put_number(out, at, number)
            out[at] = 32
            at += 1
            number += 1
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
    return at


@dataclass(frozen=True, slots=True)
class PositionHeader:
    """How messages state the sink's position after them, in the header `df-position`.

    The last message of the block's first change and the last message of a segment carry the whole
    position. Another message that is the last of its change says `<n> <ordinal> <event id>`: the
    position of the message `n` places before it, with this ordinal and event id. A message that is
    not the last of its change says `-1`: the same position as the message before it. The block's
    first message says `before` instead.

    Attributes:
        text: Returns the whole position of a sink that has received everything up to a row.
        last: The row that is the last one of its segment; None if the batch does not contain it.
        before: `-1`, or `-@<sequence in the stream>` if another message may be in front of the
            block.
    """

    text: Callable[[int], str]
    last: int | None
    before: str = "-1"


@dataclass(frozen=True, slots=True)
class PackedMessages:
    """Packed commands of the messages `start` to `stop` (exclusive) of a batch.

    `data` stays valid until the third block after this one is packed. Every `every`-th message is
    answered, and the last one; the answers are numbered from `number`.
    """

    start: int
    stop: int
    number: int
    every: int
    data: memoryview

    @property
    def answers(self) -> int:
        """Number of answers."""
        return -(-(self.stop - self.start) // self.every)

    def rows_of(self, answer: int) -> range:
        """Return the rows that an answer, counted from 0, covers; the last of them is answered."""
        first = self.start + answer * self.every
        return range(first, min(first + self.every, self.stop))

    def answers_before(self, row: int) -> int:
        """Return the number of answers that cover only rows before this one."""
        return self.answers if row == self.stop else (row - self.start) // self.every


@dataclass(frozen=True, slots=True)
class UnacceptableMessage:
    """A message that no server accepts: its row and the reason."""

    row: int
    kind: Literal["subject", "too large", "line break"]


class Packer:
    """Packs the messages (columns of `sinks.base.MESSAGES`) of one batch, block by block.

    Args:
        messages: Rows to send; may be a slice.
        suffix: Suffix of every message id.
        reply: Prefix of the subjects for answers; None for messages that are neither answered nor
            chained.

    Raises:
        SinkRejected: A column that must not have nulls contains one.
        Undeliverable: A message has headers that cannot be sent.
    """

    def __init__(self, messages: pa.RecordBatch, suffix: str, reply: str | None) -> None:
        self._messages = messages
        self._suffix = suffix
        self._columns = text_columns({name: _column(messages, name) for name in NAMES})
        self._ordinals = messages.column("ordinal").to_numpy()
        self._reply = _EMPTY if reply is None else read_only(f"{reply}.".encode())
        self._suffix_line = read_only(f"{suffix}\r\n".encode())
        self._buffers = [np.empty(0, np.uint8) for _ in range(3)]

    def message_id(self, row: int) -> str:
        """Return the `Nats-Msg-Id` of a row."""
        return f"{self._messages.column('idempotency_key')[row].as_py()}{self._suffix}"

    def problem(self, limit: int) -> UnacceptableMessage | None:
        """Return the first message that a server with a limit of `limit` bytes does not accept."""
        overhead = OVERHEAD + 2 * len(self._suffix_line)
        row, kind = check(self._columns, overhead, limit)
        return UnacceptableMessage(row, _PROBLEMS[kind]) if kind != NO_PROBLEM else None

    def pack(
        self,
        start: int,
        stop: int,
        number: int,
        *,
        first: Mapping[str, str],
        marks: Mapping[str, str],
        keeping: PositionHeader | None = None,
        every: int = 1,
        max_rows: int = MAX_BLOCK_ROWS,
        max_bytes: int = MAX_BLOCK_BYTES,
    ) -> PackedMessages:
        """Pack one block of messages from row `start`, ending at row `stop` at the latest.

        No block ends between the messages of one change. A change whose messages alone exceed a
        limit becomes a block of its own.

        Args:
            start: First row.
            stop: End of the rows that may be sent.
            number: Number of the first answer.
            first: Additional headers of the first row.
            marks: Additional headers of every row.
            keeping: How the messages state positions; None if they do not.
            every: How many messages there are for each one that is answered.
            max_rows: Maximum number of messages.
            max_bytes: Maximum number of bytes.
        """
        shared = Shared(self._reply, every, self._suffix_line, _lines(marks))
        special = self._special(start, stop, first, keeping)
        most = min(start + max_rows, stop)
        fits, size = measure(self._columns, shared, special, start, most, number, max_bytes)
        end = whole_ordinals(self._messages, start, fits)
        if end != fits:
            _, size = measure(self._columns, shared, special, start, end, number, _NO_LIMIT)
        self._buffers.append(self._buffers.pop(0))
        if len(self._buffers[-1]) < size:
            self._buffers[-1] = np.empty(size, np.uint8)
        buffer = self._buffers[-1]
        size = emit(self._columns, shared, special, start, end, number, buffer)
        return PackedMessages(start, end, number, every, buffer.data[:size])

    def _special(
        self, start: int, stop: int, first: Mapping[str, str], keeping: PositionHeader | None
    ) -> Special:
        if keeping is None:
            return Special(self._ordinals, _lines(first), 0, -1, _EMPTY, -1, _EMPTY)
        anchor = whole_ordinals(self._messages, start, start + 1) - 1
        if anchor > start:
            first = {**first, "df-position": keeping.before}
        last = keeping.last if keeping.last is not None and keeping.last < stop else -1
        return Special(
            self._ordinals,
            _lines(first),
            1,
            anchor,
            read_only(keeping.text(anchor).encode()),
            last,
            _EMPTY if last < 0 else read_only(keeping.text(last).encode()),
        )


def _lines(headers: Mapping[str, str]) -> Bytes:
    return read_only("".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode())


def _column(messages: pa.RecordBatch, name: str) -> pa.Array[Any]:
    column = messages.column(name)
    if name == "headers":
        return _header_lines(messages, column)
    changes = messages.column("change_id")
    if name == "event_id" and changes.null_count < len(changes):
        return pc.coalesce(changes, column)
    return column


def _header_lines(messages: pa.RecordBatch, column: pa.Array[Any]) -> pa.Array[Any]:
    """Convert JSON headers to header lines, ready to be copied; only few events have any."""
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


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    row = dict.fromkeys(MESSAGES.names, "-") | {"ordinal": 0, "headers": None}
    packer = Packer(pa.RecordBatch.from_pylist([row], schema=MESSAGES), "|", "_")
    packer.problem(1 << 20)
    packer.pack(0, 1, 1, first={}, marks={}, keeping=PositionHeader(lambda _: "{}", None))
