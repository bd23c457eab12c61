"""Synthetic binary logs of one type family each, to measure what decoding its values costs.

A row has a key and ten columns of the family. A few distinct rows are repeated, so that making a
log takes less time than decoding it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from deltaforge_dagster.sources.mysql.events.binlog import WRITE_ROWS_2
from deltaforge_lab.synthetic.mysql_events import (
    SyntheticColumn,
    SyntheticLog,
    bitmap,
    description,
    packed,
)

COLUMNS = 10
_DIFFERENT = 64
_ROWS_PER_TX = 1000
_EVENT_BYTES = 8192

_Make = Callable[[int, int], bytes]
"""Makes a value in the log's format, with its length prefix if the type has one.

Its arguments are the value's row and column number.
"""


def _text(encoding: str, words: str) -> _Make:
    def make(row: int, column: int) -> bytes:
        content = f"{words} {row * 7919 + column}".encode(encoding)
        return struct.pack("<H", len(content)) + content

    return make


def _document(row: int, column: int) -> bytes:
    """Return `{"id": n, "ok": true, "name": "...", "price": 1.25, "tags": ["a", 7]}`."""
    name = b"item %05d" % (row + column)
    strings = bytes([len(name)]) + name
    tags = b"\2\0\x0c\0" + b"\x0c\x0a\0" + b"\5\7\0" + b"\1a"
    keys = (b"id", b"ok", b"name", b"tags", b"price")
    values_at = 4 + 5 * 4 + 5 * 3 + sum(map(len, keys))
    entries, at = b"", 4 + 5 * 4 + 5 * 3
    for key in keys:
        entries += struct.pack("<HH", at, len(key))
        at += len(key)
    tags_at = values_at + len(strings)
    price_at = tags_at + len(tags)
    entries += b"\5" + struct.pack("<h", row) + b"\4\1\0" + struct.pack("<BH", 12, values_at)
    entries += struct.pack("<BH", 2, tags_at) + struct.pack("<BH", 11, price_at)
    body = entries + b"".join(keys) + strings + tags + struct.pack("<d", row * 1.25 + 0.1)
    content = b"\0" + struct.pack("<HH", 5, len(body) + 4) + body
    return struct.pack("<I", len(content)) + content


def _moment(row: int, column: int) -> bytes:
    clock = (row % 24) << 12 | (column * 5) << 6 | row % 60
    day = (2026 * 13 + 3) << 22 | (row % 28 + 1) << 17 | clock
    return ((1 << 39) | day).to_bytes(5) + (row * 1000).to_bytes(3)


_FAMILIES: dict[str, tuple[SyntheticColumn, _Make]] = {
    "int": (SyntheticColumn("", 3), lambda r, c: struct.pack("<i", (r - 9) * 70_001 + c)),
    "bigint": (
        SyntheticColumn("", 8),
        lambda r, c: struct.pack("<q", (r - 9) * 700_000_000_001 + c),
    ),
    "decimal": (
        SyntheticColumn("", 246, b"\x0c\2"),
        lambda r, c: (
            (r * 7919 + c | 1 << 39).to_bytes(5)[:1] + (r * 7919 + c).to_bytes(4) + bytes([r % 100])
        ),
    ),
    "float": (SyntheticColumn("", 4, b"\4"), lambda r, c: struct.pack("<f", r * 1.1 + c)),
    "double": (SyntheticColumn("", 5, b"\x08"), lambda r, c: struct.pack("<d", r * 1.1 + c / 3)),
    "datetime": (SyntheticColumn("", 18, b"\6"), _moment),
    "timestamp": (
        SyntheticColumn("", 17, b"\6"),
        lambda r, c: (1_767_322_245 + r * 86_413 + c).to_bytes(4) + (r * 999).to_bytes(3),
    ),
    "text": (
        SyntheticColumn("", 15, b"\x90\x01", collation=255),
        _text("utf-8", "an ordinary text"),
    ),
    "text beyond ASCII": (
        SyntheticColumn("", 15, b"\x90\x01", collation=255),
        _text("utf-8", "größer 日本"),
    ),
    "text in latin1": (
        SyntheticColumn("", 15, b"\x90\x01", collation=8),
        _text("latin-1", "größer, älter"),
    ),
    "text in gbk": (
        SyntheticColumn("", 15, b"\x90\x01", collation=28),
        _text("gbk", "普通的文字 text"),
    ),
    "enum": (
        SyntheticColumn("", 254, b"\xf7\1", labels=("new", "paid", "shipped", "cancelled")),
        lambda r, c: bytes([(r + c) % 4 + 1]),
    ),
    "varbinary": (
        SyntheticColumn("", 15, b"\x2c\x01", collation=63),
        _text("latin-1", "\xff\xfe bytes"),
    ),
    "blob": (
        SyntheticColumn("", 252, b"\2", collation=63),
        _text("utf-8", "an ordinary blob of bytes"),
    ),
    "json": (SyntheticColumn("", 245, b"\4"), _document),
}

_MIXED = (
    "int", "bigint", "decimal", "double", "datetime", "timestamp", "text", "text beyond ASCII",
    "enum", "text",
)  # fmt: skip
"""The columns of ordinary rows."""

NAMES = ("mixed", *_FAMILIES)
"""The families for which `stream` makes logs; `mixed` is a row of several types."""


def stream(name: str, rows: int) -> bytes:
    """Return the log of `rows` inserts into a table with a key and ten columns of a family."""
    columns = [_FAMILIES[family] for family in (_MIXED if name == "mixed" else [name] * COLUMNS)]
    fields = [
        SyntheticColumn("id", 8, nullable=False),
        *(replace(field, name=f"c{column}") for column, (field, _) in enumerate(columns)),
    ]
    images = [
        b"\0\0"
        + struct.pack("<q", row)
        + b"".join(make(row, column) for column, (_, make) in enumerate(columns))
        for row in range(_DIFFERENT)
    ]
    per_event = max(1, _EVENT_BYTES // len(images[-1]))
    head = packed(len(fields)) + bitmap([True] * len(fields))
    described = description("shop", "family", fields, (0,))
    log = SyntheticLog().start().gtid(1).query("CREATE TABLE family (id bigint PRIMARY KEY)")
    for first in range(0, rows, _ROWS_PER_TX):
        last = min(first + _ROWS_PER_TX, rows)
        log.begin(first // _ROWS_PER_TX + 2, 1_767_322_245_000_000 + first).table(108, described)
        for start in range(first, last, per_event):
            numbers = range(start, min(start + per_event, last))
            log.rows(WRITE_ROWS_2, 108, head + b"".join(images[n % _DIFFERENT] for n in numbers))
        log.commit()
    return log.stream()
