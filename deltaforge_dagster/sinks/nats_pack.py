r"""A batch as blocks of commands for a NATS server: which messages go together, and what each is to say.

A Python call per message costs several times what the server needs for it, so a `Packer` has kernels
write whole blocks (`nats_commands` draws the bytes), as kernels read what comes back (`nats_answers`).

Messages for a stream are *chained*: each one names the one before it and is stored only directly
behind it (`Nats-Expected-Last-Msg-Id`). So a server that refuses one refuses all that were sent after
it, and what is stored is a beginning without gaps, however many are on their way. What a chain's first message
must find in the stream is said by the sender, in the headers that it gives for the first row.
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
from deltaforge_dagster.sinks.base import MESSAGES, whole_ordinals
from deltaforge_dagster.sinks.nats_commands import (
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
from deltaforge_dagster.sinks.text_columns import text_columns
from deltaforge_dagster.sources.kernel import Bytes, read_only

MAX_BLOCK_ROWS = 2_000
"""Messages sent before one looks at the guard; two blocks at most are on their way. The server keeps
what it has read and not stored in a queue of 10,000 (`max_buffered_msgs`), of all who send to a stream, and
refuses what does not fit."""

MAX_BLOCK_BYTES = 1 << 20
"""Bytes of one block, unless a single change is larger."""

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
"""How names of headers begin that the server or this sink gives a meaning to."""


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
        self._columns = text_columns({name: _column(messages, name) for name in NAMES})
        self._ordinals = messages.column("ordinal").to_numpy()
        self._reply = _EMPTY if reply is None else read_only(f"{reply}.".encode())
        self._suffix_line = read_only(f"{suffix}\r\n".encode())
        self._buffers = [np.empty(0, np.uint8) for _ in range(3)]

    def message_id(self, row: int) -> str:
        """Return the `Nats-Msg-Id` of a row."""
        return f"{self._messages.column('idempotency_key')[row].as_py()}{self._suffix}"

    def problem(self, limit: int) -> Problem | None:
        """Return the first message that no server takes whose limit are `limit` bytes a message."""
        own = OVERHEAD + 2 * len(self._suffix_line)
        row, kind = check(self._columns, own, limit)
        return Problem(row, _PROBLEMS[kind]) if kind != NO_PROBLEM else None

    def pack(
        self,
        start: int,
        stop: int,
        number: int,
        *,
        first: Mapping[str, str],
        marks: Mapping[str, str],
        keeping: Keeping | None = None,
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
        shared = Shared(self._reply, self._suffix_line, _lines(marks))
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
        emit(self._columns, shared, special, start, end, number, buffer)
        return Block(start, end, number, buffer.data[:size])

    def _special(
        self, start: int, stop: int, first: Mapping[str, str], keeping: Keeping | None
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


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    row = dict.fromkeys(MESSAGES.names, "-") | {"ordinal": 0, "headers": None}
    packer = Packer(pa.RecordBatch.from_pylist([row], schema=MESSAGES), "|", "_")
    packer.problem(1 << 20)
    packer.pack(0, 1, 1, first={}, marks={}, keeping=Keeping(lambda _: "{}", None))
