r"""Kernels that write messages as `HPUB` commands of NATS' wire protocol.

`measure` returns how many messages fit into a block and their size, `emit` writes them, and `check`
finds a message that no server accepts (docs.nats.io, "Client Protocol", section HPUB). All of them
read the buffers of Arrow columns in place. `pack` decides which messages form a block.

The bytes of one message; `;` stands for `\r\n`, <..> for the row's own text, #.. for a decimal
number::

    HPUB <destination> [<reply>.#n ]#header #all;      n only if it is answered; sizes of the
                                                       headers, and of headers and value
    NATS/1.0;
    Nats-Msg-Id: <idempotency key><suffix>;
    Nats-Expected-Last-Msg-Id: <idempotency key of the row before><suffix>;      if it is chained
    df-key: <key>;                                     only if the key is not null
    <headers>                                          whole lines, only if they are not null
    <marks>                                            whole lines, the same in all rows
    df-position: <position>;                           see `pack.PositionHeader`
    <first>                                            whole lines, only in the block's first row
    ;
    <value>;
"""

# ruff: noqa: C901, PLR0911, PLR0917, PLR1714 - kernels are flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

from typing import NamedTuple

from deltaforge_dagster.kernels.message_text import TextColumns, digits_of, is_null, put_number
from deltaforge_dagster.kernels.runtime import Bytes, Longs, copy, kernel, read_only

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
        before = 46
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
