"""A second decoder of the replication stream, in plain Python, to compare the kernels with.

It is written from the manual alone, with `struct`, `json`, `re` and `uuid`; it shares nothing with
the decoder but the words of the change frame. It reads a whole stream and returns the rows of the
transactions that are complete.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0917 - follows the manual message by message

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.postgres.decode.types import BUILT_IN, CatalogType
from deltaforge_dagster.tables import ColumnChanges, SchemaStamp, TableFate, TableSchema
from tests.strategies import DOMAIN, DOMAIN_ARRAY, ENUM, ENUM_ARRAY

JSON_TYPES, NUMBERS, FLOATS = {114, 3802}, {20, 21, 23, 26, DOMAIN}, {700, 701}
TIMESTAMPS = {1114, 1184}
ELEMENTS = {oid: 25 for oid, known in BUILT_IN.items() if known.delimiter} | {
    1000: 16, 1001: 17, 1005: 21, 1007: 23, 1016: 20, 1028: 26, 1021: 700, 1022: 701, 199: 114,
    1115: 1114, 1185: 1184, 3807: 3802, ENUM_ARRAY: ENUM, DOMAIN_ARRAY: DOMAIN, 1020: 603,
}  # fmt: skip
"""What arrays are made of; elements that are no numbers, booleans, bytes or documents are texts."""
FORWARD = (1 << 64) - 1

Name = tuple[str, str]
"""Schema and table."""


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

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Note nothing: the log says everything."""

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Note nothing: columns have numbers."""

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Note nothing: the log has no statements."""

    def defined(self, position: Position) -> dict[str, str]:
        """Know nothing."""
        del position
        return {}

    def holds(self) -> Mapping[str, str]:
        """Hold no table."""
        return {}


class Catalog:
    """A catalog where the primary key of each table is its first known column."""

    def __init__(self, keys: dict[int, tuple[str, ...]] | None = None) -> None:
        self.keys = keys or {}

    def primary_key(self, relation: int) -> tuple[str, ...]:
        """Return the key given for the relation."""
        return self.keys.get(relation, ())

    def type(self, oid: int) -> CatalogType | None:
        """Know an enum, a domain, and their arrays."""
        return {
            ENUM: CatalogType("mood", "e", 0),
            ENUM_ARRAY: CatalogType("mood[]", "b", ENUM),
            DOMAIN: CatalogType("positive", "d", 0, base=23),
            DOMAIN_ARRAY: CatalogType("positive[]", "b", DOMAIN),
        }.get(oid)

    def remade_type(self, schema: str, name: str) -> int | None:
        """Know no type that was made again."""
        del schema, name
        return None

    def system_type(self, name: str) -> int | None:
        """Know two names."""
        return {"int4": 23, "_text": 1009}.get(name)


class BadStreamError(Exception):
    """The stream does not follow its format."""


@dataclass
class Reference:
    """Decodes a stream at once; timestamps in the form of ISO 8601, if asked to."""

    source_id: str
    iso: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0
    failed: bool = False

    def decode(self, stream: bytes) -> Reference:
        """Read as far as possible; `failed` says whether that is the end of the bytes."""
        self._relations: dict[int, tuple[Name, list[tuple[str, int, bool]], bool]] = {}
        self._held: set[Name] = set()
        self._open: list[dict[str, Any]] | None = None
        try:
            self._messages(stream)
        except (BadStreamError, struct.error, UnicodeDecodeError, IndexError, ValueError):
            self.failed = True
        return self

    def _messages(self, stream: bytes) -> None:
        at = 0
        while len(stream) - at >= 5:
            kind, size = stream[at : at + 1], struct.unpack_from(">I", stream, at + 1)[0]
            if not 4 <= size <= (1 << 30) + (1 << 16):
                raise BadStreamError
            if kind not in (b"d", b"N", b"S"):
                return
            content = stream[at + 5 : at + 1 + size]
            if len(content) < size - 4:
                return
            at += 1 + size
            if kind == b"d":
                self._copy_data(content)

    def _copy_data(self, content: bytes) -> None:
        if content[:1] == b"k":
            if len(content) != 18:
                raise BadStreamError
            lsn = struct.unpack_from(">q", content, 1)[0]
            if self._open is None:
                self.end = max(self.end, lsn)
            return
        if content[:1] != b"w" or len(content) < 26:
            raise BadStreamError
        lsn = struct.unpack_from(">q", content, 1)[0]
        if lsn < 0:
            raise BadStreamError
        kind, body = chr(content[25]), content[26:]
        match kind:
            case "B":
                self._final, clock, self._xid = struct.unpack(">qqI", body)
                wrapped = (clock + 946_684_800_000_000 + 2**63) % 2**64 - 2**63
                self._ts_us = wrapped
                if self._open is not None or self._final < 0 or self._xid == 0:
                    raise BadStreamError
                self._open, self._index = [], 0
            case "C":
                _, final, end, _ = struct.unpack(">Bqqq", body)
                if self._open is None or final != self._final or end <= final:
                    raise BadStreamError
                if self._open:
                    self._open[-1]["tx_end"] = True
                self.rows += self._open
                self._open = None
                self.end = max(end, self.end)
            case "R":
                self._relation(body)
            case "I" | "U" | "D":
                self._change(kind, body, lsn)
            case "T":
                self._truncate(body, lsn)
            case "M":
                self._message(body, struct.unpack_from(">q", content, 17)[0])
            case "Y":
                schema, name, rest = body[4:].split(b"\0")
                schema.decode(), name.decode()
                if rest:
                    raise BadStreamError
            case "O":
                pass
            case _:
                raise BadStreamError

    def _relation(self, body: bytes) -> None:
        (oid,) = struct.unpack_from(">I", body)
        schema, _, rest = body[4:].partition(b"\0")
        table, zero, rest = rest.partition(b"\0")
        identity, (count,) = chr(rest[0]), struct.unpack_from(">H", rest, 1)
        rest = rest[3:]
        columns = []
        known = True
        for _ in range(count):
            name, zero, tail = rest[1:].partition(b"\0")
            type_oid, _modifier = struct.unpack_from(">Ii", tail)
            columns.append((name.decode(), type_oid, bool(rest[0] & 1) and identity in "di"))
            rest = tail[8:]
            known = known and (type_oid in ELEMENTS or known_scalar(type_oid))
            if not zero:
                raise BadStreamError
        names = [c[0] for c in columns]
        if not zero or rest or identity not in "dnfi" or len(set(names)) != len(names):
            raise BadStreamError
        full_name = schema.decode() or "pg_catalog", table.decode()
        if not known:
            self._held.add(full_name)
        # A table of the same name that was described before goes on as it was.
        self._relations[oid] = full_name, columns, full_name in self._held

    def _change(self, kind: str, body: bytes, lsn: int) -> None:
        if self._open is None:
            raise BadStreamError
        (oid,) = struct.unpack_from(">I", body)
        if oid not in self._relations:
            raise BadStreamError
        table, columns, held = self._relations[oid]
        rest = body[4:]
        if len(rest) < 3:
            raise BadStreamError
        if held:
            self._index += 1
            return
        old: dict[str, str] | None = None
        new: dict[str, str] | None = None
        if kind == "D" or (kind == "U" and rest[:1] != b"N"):
            if rest[:1] not in (b"K", b"O"):
                raise BadStreamError
            old, rest = self._tuple(rest[1:], columns)
        if kind != "D":
            if rest[:1] != b"N":
                raise BadStreamError
            new, rest = self._tuple(rest[1:], columns)
        if rest:
            raise BadStreamError
        keys = {}
        for name, _, in_key in columns:
            if in_key:
                value = (old if new is None else new)[name]  # type: ignore[index]
                if value == UNCHANGED_JSON and new is not None and old is not None:
                    value = old[name]
                if value == UNCHANGED_JSON:
                    raise BadStreamError
                keys[name] = value
        images = {
            "before": _object(old),
            "after": _object(new),
            "key": _object(keys) if keys else None,
        }
        op = {"I": "c", "U": "u", "D": "d"}[kind]
        self._open.append(self._row(op, table, lsn) | images)
        self._index += 1

    def _truncate(self, body: bytes, lsn: int) -> None:
        count, flags = struct.unpack_from(">IB", body)
        oids = [oid for (oid,) in struct.iter_unpack(">I", body[5:])]
        if self._open is None or len(oids) != count or any(o not in self._relations for o in oids):
            raise BadStreamError
        ddl = {
            "sql": "TRUNCATE",
            "cascade": bool(flags & 1),
            "restart_identity": bool(flags & 2),
        }
        for oid in oids:
            table, _, held = self._relations[oid]
            if not held:
                self._open.append(
                    self._row("t", table, lsn) | {"ddl": json.dumps(ddl, separators=(",", ":"))}
                )
            self._index += 1

    def _message(self, body: bytes, clock: int) -> None:
        flags, lsn = struct.unpack_from(">Bq", body)
        prefix, zero, rest = body[9:].partition(b"\0")
        (size,) = struct.unpack_from(">I", rest)
        content = rest[4:]
        if flags > 1 or lsn < 0 or not zero or len(content) != size:
            raise BadStreamError
        table = "__wal_message", prefix.decode()
        if bool(flags) != (self._open is not None):
            raise BadStreamError
        # The prefix of our own messages, which only move the position.
        after = None if prefix == b"deltaforge_heartbeat" else message_json(content)
        if self._open is not None:
            if after is not None:
                self._open.append(self._row("c", table, lsn) | {"after": after})
            self._index += 1
            return
        if lsn == 0:  # it ends where reading starts
            return
        self.end = max(self.end, lsn)
        if after is not None:
            self._final, self._xid, self._index, self._ts_us = lsn, 0, 0, 0
            wrapped = (clock + 946_684_800_000_000 + 2**63) % 2**64 - 2**63
            self.rows.append(
                self._row("c", table, lsn)
                | {"after": after, "tx_id": None, "tx_end": True, "ts_us": wrapped}
            )

    def _row(self, op: str, table: Name, lsn: int) -> dict[str, Any]:
        """Return a row without images."""
        return {
            "op": op,
            "ts_us": self._ts_us,
            "schema": table[0],
            "table": table[1],
            "before": None,
            "after": None,
            "key": None,
            "ddl": None,
            "pos": lsn,
            "row": self._index,
            "tx_id": str(self._xid),
            "tx_end": False,
            "event_id": self._event_id(),
        }

    def _tuple(
        self, rest: bytes, columns: list[tuple[str, int, bool]]
    ) -> tuple[dict[str, str], bytes]:
        (count,) = struct.unpack_from(">H", rest)
        if count != len(columns):
            raise BadStreamError
        rest = rest[2:]
        values = {}
        for name, type_oid, _ in columns:
            sent, rest = rest[:1], rest[1:]
            if sent == b"n":
                values[name] = "null"
            elif sent == b"u":
                values[name] = UNCHANGED_JSON
            elif sent == b"t":
                (size,) = struct.unpack_from(">I", rest)
                if len(rest) < 4 + size:
                    raise BadStreamError
                values[name] = to_json(type_oid, rest[4 : 4 + size].decode(), iso=self.iso)
                rest = rest[4 + size :]
            else:
                raise BadStreamError
        return values, rest

    def _event_id(self) -> str:
        digest = hashlib.blake2b(
            self.source_id.encode(), digest_size=16, person=b"event_id"
        ).digest()
        a, b = struct.unpack("<QQ", digest)
        for number in (self._final, self._xid, self._index):
            a = _mix(a ^ number, 33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)
            b = _mix(b ^ number, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
        high = (self._ts_us // 1000 & (1 << 48) - 1) << 16 | 7 << 12 | a & 0xFFF
        return str(uuid.UUID(int=high << 64 | 1 << 63 | b & (1 << 62) - 1))


UNCHANGED_JSON = '{"_unchanged":true}'


def known_scalar(oid: int) -> bool:
    """Say whether this decoder and the catalog above know the type."""
    return oid in (ENUM, DOMAIN) or (oid in BUILT_IN and not BUILT_IN[oid].delimiter)


def _mix(h: int, s1: int, m1: int, s2: int, m2: int, s3: int) -> int:
    h = (h ^ h >> s1) * m1 & FORWARD
    h = (h ^ h >> s2) * m2 & FORWARD
    return h ^ h >> s3


def _object(values: dict[str, str] | None) -> str | None:
    if values is None:
        return None
    pairs = (f"{json.dumps(name, ensure_ascii=False)}:{v}" for name, v in values.items())
    return "{" + ",".join(pairs) + "}"


def to_json(type_oid: int, text: str, *, iso: bool = False) -> str:
    """Return the JSON text of a value."""
    if type_oid in ELEMENTS:
        return _array(ELEMENTS[type_oid], text, iso=iso)
    if type_oid in TIMESTAMPS and iso:
        return json.dumps(_iso(text))
    if type_oid == 16:
        return {"t": "true", "f": "false"}.get(text) or _refuse()
    if type_oid in NUMBERS:
        return text if re.fullmatch(r"-?(0|[1-9][0-9]*)", text) else _refuse()
    if type_oid in FLOATS:
        if text in ("NaN", "Infinity", "-Infinity"):
            return json.dumps(text)
        number = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
        return text if re.fullmatch(number, text) else _refuse()
    if type_oid in JSON_TYPES:
        json.loads(text, parse_constant=lambda _: _refuse(), parse_int=str, parse_float=str)
        compact = re.sub(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+', lambda match: match[1] or "", text)
        return {"null": "null\t", UNCHANGED_JSON: '{"_unchanged":true }'}.get(compact, compact)
    if type_oid == 17:
        encoded = base64.b64encode(_bytea(text)).decode()
        return f'{{"_base64":"{encoded}"}}'
    return json.dumps(text, ensure_ascii=False)


def message_json(content: bytes) -> str | None:
    """Return a logical message's content as JSON text, None if it is none."""
    try:
        text = to_json(114, content.decode())
        return {"null\t": "null", '{"_unchanged":true }': UNCHANGED_JSON}.get(text, text)
    except (ValueError, BadStreamError):
        return None


def _iso(text: str) -> str:
    if text in ("infinity", "-infinity"):
        return text
    day, clock = r"[0-9]{4,}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?"
    match = re.fullmatch(rf"({day}) ({clock})([+-][0-9]{{2}}(?::[0-9]{{2}})*)?( BC)?", text)
    if match is None:
        raise BadStreamError
    zone, era = match[3] or "", match[4] or ""
    return f"{match[1]}T{match[2]}{zone}{':00' if len(zone) == 3 else ''}{era}"


def _bytea(text: str) -> bytes:
    if re.fullmatch(r"\\x([0-9a-fA-F]{2})*", text):
        return bytes.fromhex(text[2:])
    if not re.fullmatch(r"([ -\[\]-~]|\\\\|\\[0-3][0-7]{2})*", text):
        _refuse()
    octal = re.sub(r"\\(\\|[0-7]{3})", lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 8)), text)
    return octal.encode("latin-1")


def _refuse() -> str:
    raise BadStreamError


def _array(element: int, text: str, *, iso: bool) -> str:
    """Return a JSON array, reading the array text token by token."""
    text = re.sub(r"^\[[0-9:\[\]-]*\]=", "", text) if text.startswith("[") else text
    d = ";" if element == 603 else ","
    token = re.compile(rf'[{{}}{d}]|"(?:[^"\\]|\\.)*"|[^{{}}{d}"\\]+', re.DOTALL)
    out = []
    at, depth, before = 0, 0, ""
    while at < len(text):
        match = token.match(text, at)
        if match is None or (before and depth == 0):
            raise BadStreamError
        part, at = match[0], match.end()
        if part == "{":
            allowed, depth = before in ("", "{", d), depth + 1
            out.append("[")
        elif part == "}":
            allowed, depth = before in ("{", "}", "value"), depth - 1
            out.append("]")
        elif part == d:
            allowed = before in ("}", "value")
            out.append(",")
        else:
            allowed = before in ("{", d) and depth > 0
            if part == "NULL":
                out.append("null")
            else:
                plain = re.sub(r"\\(.)", r"\1", part[1:-1], flags=re.DOTALL)
                out.append(to_json(element, plain if part[0] == '"' else part, iso=iso))
        if not allowed:
            raise BadStreamError
        before = part if part in ("{", "}", d) else "value"
    if depth or before != "}":
        raise BadStreamError
    return "".join(out)
