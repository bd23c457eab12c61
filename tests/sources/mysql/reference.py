"""A second decoder of the binary log, in plain Python, to compare the kernels with.

It is written from the documentation of the log alone, with `struct`, `json`, `datetime` and `uuid`;
it shares nothing with the decoder but the words of the change frame, and is told the tables instead
of reading TABLE_MAP events. It reads a whole stream of packets and returns its rows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from deltaforge_dagster.errors import PositionLost, UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import GtidRun
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.tables import SchemaStamp, TableSchema
from deltaforge_lab.synthetic.mysql_events import SyntheticColumn

FORWARD = (1 << 64) - 1


@dataclass(frozen=True, order=True)
class Place:
    """A position: where in which file, and how many transactions have a GTID up to there."""

    file: str
    pos: int
    transactions: int = 0

    def to_json(self) -> str:
        """Return some text."""
        return json.dumps([self.file, self.pos, self.transactions])


class Progress:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.runs: list[GtidRun] = []

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> Position:
        """Take in the transactions."""
        self.runs += gtids
        return self.within(file, pos)

    def within(self, file: str, pos: int) -> Position:
        """Return the place, with the number of transactions so far."""
        return Place(file, pos, sum(run.last - run.first + 1 for run in self.runs))


class Registry:
    """A registry in memory: equal schemas have equal stamps."""

    def __init__(self) -> None:
        self.registered: list[tuple[TableSchema, Position]] = []
        self._stamps: dict[TableSchema, SchemaStamp] = {}

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Remember the call; the fingerprint is the number of the schema."""
        self.registered.append((table, position))
        number = len(self._stamps) + 1
        return self._stamps.setdefault(table, SchemaStamp(f"sha256:{number}", 1, number))


class Catalog:
    """A catalog that knows the tables it was given, and remembers what it was asked."""

    def __init__(self, tables: dict[str, CatalogTable] | None = None) -> None:
        self.tables = tables or {}
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        self.statements: list[tuple[str, str]] = []

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable:
        """Return the table of that name."""
        del position, charsets
        self.asked.append((db, table, types))
        if table not in self.tables:
            raise UnsupportedEvent(f"table {table} is not known")
        return self.tables[table]

    def defaults(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        columns: Collection[str],
        position: Position,
    ) -> CatalogTable | Unknown:
        """Return the table of that name, which may have no defaults."""
        del types, columns, position
        return self.tables.get(table, Unknown(f"table {db}.{table} is not known"))

    def statement(self, db: str, sql: str, position: Position) -> Collection[tuple[str, str]]:
        """Remember the statement."""
        del position
        self.statements.append((db, sql))
        return ()

    def existing(self, names: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those whose name is one of the tables of tests."""
        return {name for name in names if name[1] in {"users", "orders", "t"}}


class NoLog:
    """A log in which no prepared transaction is found, unless it was given its events."""

    def __init__(self, pieces: dict[Xid, list[bytes]] | None = None) -> None:
        self.pieces = pieces or {}

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Return the pieces that were given."""
        if xid not in self.pieces:
            raise PositionLost(f"no transaction {xid} before {until.file}:{until.pos}")
        yield from self.pieces[xid]


@dataclass
class Table:
    """A table as a test describes it."""

    db: str
    name: str
    fields: Sequence[SyntheticColumn]
    key: Sequence[int]
    captured: bool = True


@dataclass
class Reference:
    """Decodes a stream at once."""

    source_id: str
    tables: dict[int, Table]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def decode(self, stream: bytes) -> Reference:
        """Read all of it."""
        self._open: list[dict[str, Any]] = []
        self._sums, self._file = True, ""
        at, event = 0, b""
        while at < len(stream):
            size = int.from_bytes(stream[at : at + 3], "little")
            event += stream[at + 4 : at + 4 + size]
            at += 4 + size
            if size < 0xFFFFFF:
                self._event(event[1:])
                event = b""
        return self

    def _event(self, event: bytes) -> None:
        clock, kind, _, size, self._pos, _ = struct.unpack_from("<IBIIIH", event)
        assert size == len(event)
        if self._sums or kind == 15:
            assert zlib.crc32(event[:-4]) == int.from_bytes(event[-4:], "little")
            event = event[:-4]
        body = event[19:]
        match kind:
            case 4:
                self._file = body[8:].decode()
            case 15:
                self._sums = body[-1] == 1
            case 33 | 34:
                self._begin(clock, body, has_gtid=kind == 33)
            case 16:
                self._commit()
            case 2 if body.endswith(b"COMMIT"):
                self._commit()
            case 23 | 24 | 25 | 30 | 31 | 32:
                self._rows(kind, body)
            case _:
                pass

    def _begin(self, clock: int, body: bytes, *, has_gtid: bool) -> None:
        self._index = 0
        self._ts_us = clock * 1_000_000
        here, there = (int.from_bytes(body[at : at + 7], "little") for at in (42, 49))
        if here >> 55:
            self._ts_us = there
        elif here:
            self._ts_us = here
        sid, number = body[1:17], int.from_bytes(body[17:25], "little")
        self._tx_id = f"{uuid.UUID(bytes=sid)}:{number}" if has_gtid else None
        if has_gtid:
            self._names = [int.from_bytes(sid[:8]), int.from_bytes(sid[8:]), number]
        else:
            name = self._file.encode()
            digest = hashlib.blake2b(name, digest_size=16, person=b"binlog_file").digest()
            self._names = [*struct.unpack("<QQ", digest), self._pos]

    def _commit(self) -> None:
        if self._open:
            self._open[-1]["tx_end"] = True
        self.rows += self._open
        self._open = []

    def _rows(self, kind: int, body: bytes) -> None:
        table = self.tables[int.from_bytes(body[:6], "little")]
        at = 8
        if kind >= 30:
            at += int.from_bytes(body[8:10], "little")
        count = len(table.fields)
        at += 1 if body[at] < 251 else 3
        width = (count + 7) // 8
        old_bits = _bits(body[at : at + width], count)
        at += width
        new_bits = old_bits
        if kind in (24, 31):
            new_bits = _bits(body[at : at + width], count)
            at += width
        while at < len(body):
            before = after = None
            if kind in (24, 31):
                before, at = _image(table.fields, old_bits, body, at)
                after, at = _image(table.fields, new_bits, body, at)
            elif kind in (23, 30):
                after, at = _image(table.fields, old_bits, body, at)
            else:
                before, at = _image(table.fields, old_bits, body, at)
            if table.captured:
                self._row(
                    {23: "c", 24: "u", 25: "d"}[kind - 7 * (kind >= 30)], table, before, after
                )
            self._index += 1

    def _row(
        self, op: str, table: Table, before: dict[str, str] | None, after: dict[str, str] | None
    ) -> None:
        known = (before or {}) | (after or {})
        key = {table.fields[i].name: known[table.fields[i].name] for i in sorted(table.key)}
        self._open.append(
            {
                "op": op,
                "ts_us": self._ts_us,
                "db": table.db,
                "schema": None,
                "table": table.name,
                "before": _object(before),
                "after": _object(after),
                "key": _object(key or None),
                "file": self._file,
                "pos": self._pos,
                "row": self._index,
                "tx_id": self._tx_id,
                "tx_end": False,
                "event_id": self._event_id(),
            }
        )

    def _event_id(self) -> str:
        seed = self.source_id.encode()
        digest = hashlib.blake2b(seed, digest_size=16, person=b"event_id").digest()
        a, b = struct.unpack("<QQ", digest)
        for number in (*self._names, self._index):
            a = _mix(a ^ number, 33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)
            b = _mix(b ^ number, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
        high = (self._ts_us // 1000) % 2**48 << 16 | 7 << 12 | a & 0xFFF
        return str(uuid.UUID(int=high << 64 | 1 << 63 | b & (1 << 62) - 1))


def _mix(h: int, s1: int, m1: int, s2: int, m2: int, s3: int) -> int:  # noqa: PLR0917 - as published
    h = (h ^ h >> s1) * m1 & FORWARD
    h = (h ^ h >> s2) * m2 & FORWARD
    return h ^ h >> s3


def _object(values: dict[str, str] | None) -> str | None:
    if values is None:
        return None
    pairs = (f"{json.dumps(name, ensure_ascii=False)}:{v}" for name, v in values.items())
    return "{" + ",".join(pairs) + "}"


def _bits(data: bytes, count: int) -> list[bool]:
    number = int.from_bytes(data, "little")
    return [bool(number >> i & 1) for i in range(count)]


def _image(
    fields: Sequence[SyntheticColumn], present: list[bool], body: bytes, at: int
) -> tuple[dict[str, str], int]:
    sent = [f for f, there in zip(fields, present, strict=True) if there]
    width = (len(sent) + 7) // 8
    nulls = _bits(body[at : at + width], len(sent))
    at += width
    values = {}
    for column, null in zip(sent, nulls, strict=True):
        values[column.name] = "null"
        if not null:
            size, at = _size(column, body, at)
            values[column.name] = to_json(column, body[at : at + size])
            at += size
    return values, at


def _size(column: SyntheticColumn, body: bytes, at: int) -> tuple[int, int]:
    """Return the size of a value, and where it starts."""
    first, second = (*column.metadata, 0, 0)[:2]
    fixed = {1: 1, 2: 2, 9: 3, 3: 4, 8: 8, 4: 4, 5: 8, 13: 1, 10: 3}
    if column.code in fixed:
        return fixed[column.code], at
    if column.code in (17, 18, 19):
        return {17: 4, 18: 5, 19: 3}[column.code] + (first + 1) // 2, at
    if column.code == 246:
        return decimal_size(first, second), at
    if column.code == 16:
        return second + (first > 0), at
    if column.code == 254 and first in (247, 248):
        return second, at
    prefix = first
    if column.code == 254:
        prefix = 1 if second | (first & 0x30 ^ 0x30) << 4 < 256 else 2
    elif column.code == 15:
        prefix = 1 if first | second << 8 < 256 else 2
    return int.from_bytes(body[at : at + prefix], "little"), at + prefix


def decimal_size(digits: int, scale: int) -> int:
    """Return the bytes of a DECIMAL."""
    partial = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    sides = (digits - scale, scale)
    return sum(side // 9 * 4 + partial[side % 9] for side in sides)


def to_json(column: SyntheticColumn, value: bytes) -> str:
    """Return the JSON text of a value."""
    return _WRITERS[column.code](column, value)


def _integer(column: SyntheticColumn, value: bytes) -> str:
    return str(int.from_bytes(value, "little", signed=not column.unsigned))


def _decimal(column: SyntheticColumn, value: bytes) -> str:
    digits, scale = column.metadata
    negative = value[0] < 128
    raw = int.from_bytes(value) ^ 1 << (8 * len(value) - 1)
    if negative:
        raw ^= (1 << 8 * len(value)) - 1
    data = raw.to_bytes(len(value))
    partial = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    text = ""
    whole = digits - scale
    for group in [whole % 9, *[9] * (whole // 9), *[9] * (scale // 9), scale % 9]:
        size = partial[group]
        text += f"{int.from_bytes(data[:size]):0{group}}" if group else ""
        data = data[size:]
    shown = str(int(text[:whole] or "0")) + ("." + text[whole:] if scale else "")
    return json.dumps(("-" if negative else "") + shown)


def _fraction(value: bytes) -> int:
    return int.from_bytes(value) * int(100 ** (3 - len(value)))


def _date(_: SyntheticColumn, value: bytes) -> str:
    number = int.from_bytes(value, "little")
    return f'"{number >> 9:04}-{number >> 5 & 15:02}-{number & 31:02}"'


def _datetime(_: SyntheticColumn, value: bytes) -> str:
    number = int.from_bytes(value[:5]) - 0x8000000000
    year, month = divmod(number >> 22, 13)
    clock = f"{number >> 12 & 31:02}:{number >> 6 & 63:02}:{number & 63:02}"
    return f'"{year:04}-{month:02}-{number >> 17 & 31:02} {clock}.{_fraction(value[5:]):06}"'


def _timestamp(_: SyntheticColumn, value: bytes) -> str:
    if not any(value):
        return '"0000-00-00T00:00:00.000000Z"'
    seconds = timedelta(seconds=int.from_bytes(value[:4]), microseconds=_fraction(value[4:]))
    moment = datetime(1970, 1, 1, tzinfo=UTC) + seconds
    return f'"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"'


def _time(_: SyntheticColumn, value: bytes) -> str:
    size = len(value) - 3
    number = int.from_bytes(value) - (0x800000 << 8 * size)
    sign, number = ("-", -number) if number < 0 else ("", number)
    micros = _fraction((number % (1 << 8 * size)).to_bytes(size))
    number >>= 8 * size
    return f'"{sign}{number >> 12:02}:{number >> 6 & 63:02}:{number & 63:02}.{micros:06}"'


def _base64(value: bytes) -> str:
    return f'{{"_base64":"{base64.b64encode(value).decode()}"}}'


def _labelled(column: SyntheticColumn, value: bytes) -> str:
    number = int.from_bytes(value, "little")
    if column.metadata[0] == 247:
        return json.dumps(("", *column.labels)[number], ensure_ascii=False)
    shown = [label for i, label in enumerate(column.labels) if number >> i & 1]
    return json.dumps(",".join(shown), ensure_ascii=False)


def _text(column: SyntheticColumn, value: bytes) -> str:
    if column.code == 254 and column.metadata[0] in (247, 248):
        return _labelled(column, value)
    if column.collation == 63:
        if column.code == 254:
            first, second = column.metadata
            value = value.ljust(second | (first & 0x30 ^ 0x30) << 4, b"\0")
        return _base64(value)
    if column.collation == 8:
        text = "".join(
            chr(byte) if byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D) else bytes([byte]).decode("cp1252")
            for byte in value
        )
        return json.dumps(text, ensure_ascii=False)
    try:
        codec = {51: "cp1251", 54: "utf-16-be"}.get(column.collation or 0, "utf-8")
        return json.dumps(value.decode(codec), ensure_ascii=False)
    except UnicodeDecodeError:
        return _base64(value)


def _float(_: SyntheticColumn, value: bytes) -> str:
    if len(value) == 4:
        return str(np.frombuffer(value, "<f4")[0])
    return repr(struct.unpack("<d", value)[0])


def _year(_: SyntheticColumn, value: bytes) -> str:
    return str(value[0] and value[0] + 1900)


_WRITERS: dict[int, Callable[[SyntheticColumn, bytes], str]] = {
    **dict.fromkeys((1, 2, 3, 8, 9), _integer),
    **dict.fromkeys((4, 5), _float),
    **dict.fromkeys((15, 252, 254), _text),
    10: _date,
    13: _year,
    16: lambda _, value: str(int.from_bytes(value)),
    17: _timestamp,
    18: _datetime,
    19: _time,
    246: _decimal,
    255: lambda _, value: _base64(value),
}
