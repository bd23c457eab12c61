r"""Packs a batch into blocks of commands for a NATS server: decides their bounds and their headers.

A Python call per message would cost several times what the server needs for it, so a `Packer` lets
kernels write whole blocks (`commands` shows the bytes); kernels also parse the answers
(`answers`).

Messages for a stream are *chained*: each one names the message before it and is stored only
directly after it (`Nats-Expected-Last-Msg-Id`). So a server that refuses one message refuses all
that were sent after it, and the stored messages are a prefix without gaps, however many are on
their way. If a message is stored, all before it are, so not every message has to be answered. The
sender states the condition for a chain's first message in the headers that it passes for the first
row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.kernels.message_text import text_columns
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.sinks.base import MESSAGES, whole_ordinals
from deltaforge_dagster.sinks.nats.commands import (
    LINE_BREAK,
    NAMES,
    NO_PROBLEM,
    OVERHEAD,
    SUBJECT,
    TOO_LARGE,
    Shared,
    Special,
    check,
    emit,
    measure,
)

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
