"""PARTIAL_UPDATE_ROWS events: updates that log only the changed parts of JSON documents.

With `binlog_row_value_options = PARTIAL_JSON` the server writes such events for statements like
`SET j = JSON_SET(j, '$.a', 1)`. This module rewrites them as ordinary UPDATE_ROWS events: it
applies each difference to the document in the old image, which must therefore be in the log. The
layouts are those of `Rows_log_event` in the server's `rows_event.h`, and of `json_diff.h`::

    body        as of UPDATE_ROWS, except that a new image is: packed options
                | if options & 1: bitmap: 1 for a difference, a bit for each JSON column of a table
                | bitmap of nulls | values
    difference  in place of a document: Int32 size | operation ...
    operation   Int8: 0 replace, 1 insert, 2 remove | packed size, path
                | except for remove: packed size, document
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TypeAlias

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.sources.mysql.decode.layout import (
    COLUMN_KIND,
    COLUMN_PREFIX,
    COLUMN_SIZE,
    MAP_ID,
    MAP_VERSION,
    TABLE_CAPTURED,
    TABLE_COLUMNS,
    TABLE_FIRST,
)
from deltaforge_dagster.sources.mysql.decode.scan_rows import find_table
from deltaforge_dagster.sources.mysql.events.binlog import HEADER, UPDATE_ROWS_2, FieldReader
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableVersions
from deltaforge_dagster.sources.mysql.values.types import JSON

_NAME = "a PARTIAL_UPDATE_ROWS event"
_PARTIAL_JSON = 1
_REPLACE, _INSERT, _REMOVE = range(3)
_OBJECT, _ARRAY, _LARGE = 0, 2, 1
_LITERAL, _UINT16, _INT32, _UINT32, _STRING, _COLUMN = 4, 6, 7, 8, 12, 15
_SIZES = {4: 1, 5: 2, 6: 2, 7: 4, 8: 4, 9: 8, 10: 8, 11: 8}
_MAX_DEPTH = 128  # the server accepts documents of at most 100 levels

Node: TypeAlias = "Scalar | list[Node] | dict[bytes, Node]"
"""A parsed binary JSON document (`values.json_binary`); scalars keep their bytes."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that is neither object nor array: its type, and its bytes."""

    kind: int
    data: bytes


def whole_event(event: bytes, versions: MysqlTableVersions) -> bytes:
    """Return the equivalent UPDATE_ROWS event; both events have headers, but no checksums.

    Raises:
        CorruptLog: The bytes do not follow the format.
        UnsupportedEvent: The old image does not have a document that was changed.
    """
    head, body = event[:HEADER], event[HEADER:]
    map_line = versions.maps[find_table(versions.maps, int.from_bytes(body[:6], "little"))]
    if map_line[MAP_ID] == -1:
        raise CorruptLog("a PARTIAL_UPDATE_ROWS event of a table that was never described")
    table = versions.tables[map_line[MAP_VERSION]]
    first = table[TABLE_FIRST]
    columns = versions.layout.columns[first : first + table[TABLE_COLUMNS]]
    try:
        body = whole_update(body, columns, captured=bool(table[TABLE_CAPTURED]))
    except UnsupportedEvent as error:
        name = versions.version_name(int(map_line[MAP_VERSION]))
        raise UnsupportedEvent(f"table {name}: {error}") from error
    size = (HEADER + len(body)).to_bytes(4, "little")
    return head[:4] + bytes([UPDATE_ROWS_2]) + head[5:9] + size + head[13:] + body


def whole_update(body: bytes, columns: Longs, *, captured: bool = True) -> bytes:
    """Return the body of the equivalent UPDATE_ROWS event.

    Args:
        body: The body of the event, which begins with the table id.
        columns: The lines of the table's columns (`layout.COLUMN_*`).
        captured: False if only the number of rows matters, so that documents need not be correct.

    Raises:
        CorruptLog: The bytes do not follow the format.
        UnsupportedEvent: The old image does not have a document that was changed.
    """
    reader = FieldReader(body, _NAME)
    reader.read(8)
    reader.read(reader.number(2) - 2)
    if reader.packed() != len(columns):
        raise CorruptLog("a PARTIAL_UPDATE_ROWS event that does not fit its table")
    width = (len(columns) + 7) // 8
    old_columns = _present(reader.read(width), len(columns))
    new_columns = _present(reader.read(width), len(columns))
    parts = [body[: reader.at]]
    documents = [i for i, column in enumerate(columns) if column[COLUMN_KIND] == JSON]
    while reader:
        start = reader.at
        old = _image(reader, columns, old_columns)
        parts.append(body[start : reader.at])
        changed: set[int] = set()
        if reader.packed() & _PARTIAL_JSON:
            bits = reader.read((len(documents) + 7) // 8)
            changed = {documents[bit] for bit in _present(bits, len(documents))}
        start = reader.at
        new = _image(reader, columns, new_columns)
        parts.append(body[start : start + (len(new_columns) + 7) // 8])
        for index, value in new.items():
            if captured and index in changed and value is not None:
                parts.append(_sized(_changed(old.get(index), value), columns[index]))
            elif value is not None:
                parts.append(_sized(value, columns[index]))
    return b"".join(parts)


def _present(bits: bytes, count: int) -> list[int]:
    return [i for i in range(count) if bits[i >> 3] >> (i & 7) & 1]


def _image(reader: FieldReader, columns: Longs, present: list[int]) -> dict[int, bytes | None]:
    """Read an image: the value of each column in it, without the size before it; None for null."""
    nulls = reader.read((len(present) + 7) // 8)
    values: dict[int, bytes | None] = {}
    for null_bit, index in enumerate(present):
        values[index] = None
        if not nulls[null_bit >> 3] >> (null_bit & 7) & 1:
            prefix = int(columns[index][COLUMN_PREFIX])
            size = reader.number(prefix) if prefix else int(columns[index][COLUMN_SIZE])
            values[index] = reader.read(size)
    return values


def _sized(value: bytes, column: Longs) -> bytes:
    """Return a value as an image has it: after its size, if the column's type has a size prefix."""
    prefix = int(column[COLUMN_PREFIX])
    return len(value).to_bytes(prefix, "little") + value if prefix else value


def _changed(document: bytes | None, difference: bytes) -> bytes:
    """Apply a difference to a document."""
    if document is None:
        raise UnsupportedEvent(
            "a change of a JSON document (binlog_row_value_options=PARTIAL_JSON) whose old value is"
            " not in the log; set binlog_row_image to FULL, or binlog_row_value_options to '', and"
            " reconnect what writes"
        )
    try:
        root = _parse(document[0], document[1:], 0) if document else Scalar(_LITERAL, b"\0")
        reader = FieldReader(difference, _NAME)
        while reader:
            operation = reader.number(1)
            path = reader.read(reader.packed()).decode()
            value = None
            if operation != _REMOVE:
                content = reader.read(reader.packed())
                value = _parse(content[0], content[1:], 0)
            root = _apply(operation, root, _legs(path), value)
        kind, data = _encode(root)
    except (struct.error, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptLog("a change of a JSON document that does not follow its format") from error
    return bytes([kind]) + data


def _legs(path: str) -> list[bytes | int]:
    """Return the member names and array indexes of a path such as `$.a."b c"[3]`."""
    if not path.startswith("$"):
        raise ValueError
    legs: list[bytes | int] = []
    at = 1
    while at < len(path):
        if path[at] == "[":
            end = path.index("]", at)
            legs.append(int(path[at + 1 : end]))
            at = end + 1
        elif path[at : at + 2] == '."':
            name, at = json.JSONDecoder().raw_decode(path, at + 1)
            legs.append(name.encode())
        elif path[at] == ".":
            end = at + 1
            while end < len(path) and path[end] not in ".[":
                end += 1
            legs.append(path[at + 1 : end].encode())
            at = end
        else:
            raise ValueError
    return legs


def _apply(operation: int, root: Node, legs: list[bytes | int], value: Node | None) -> Node:
    """Apply one operation of a difference; return the document, which may be a new object."""
    if operation == _REPLACE and value is not None and not legs:
        return value
    parent = root
    for leg in legs[:-1]:
        parent = _member(parent, leg)
    leg = legs[-1]
    if isinstance(parent, dict) and isinstance(leg, bytes):
        if (leg in parent) != (operation != _INSERT):
            raise KeyError
        if value is None:
            del parent[leg]
        else:
            parent[leg] = value
    elif isinstance(parent, list) and isinstance(leg, int):
        if operation == _INSERT and value is not None:
            parent.insert(leg, value)
        elif operation == _REPLACE and value is not None:
            parent[leg] = value
        else:
            del parent[leg]
    else:
        raise TypeError
    return root


def _member(node: Node, leg: bytes | int) -> Node:
    if isinstance(node, dict) and isinstance(leg, bytes):
        return node[leg]
    if isinstance(node, list) and isinstance(leg, int):
        return node[leg]
    raise TypeError


def _parse(kind: int, data: bytes, depth: int) -> Node:
    """Parse the value at the start of `data`."""
    if kind > 3:
        return Scalar(kind, data[: _scalar_size(kind, data)])
    if depth > _MAX_DEPTH:
        raise ValueError
    width, number = (4, "<I") if kind & _LARGE else (2, "<H")
    count, size = (struct.unpack_from(number, data, at)[0] for at in (0, width))
    data = data[:size]
    is_object = kind < _ARRAY
    entries = 2 * width + (count * (width + 2) if is_object else 0)
    members: dict[bytes, Node] = {}
    elements: list[Node] = []
    for index in range(count):
        value_entry = entries + index * (1 + width)
        start = value_entry + 1
        if not _inlined(data[value_entry], width):
            (start,) = struct.unpack_from(number, data, value_entry + 1)
        node = _parse(data[value_entry], data[start:], depth + 1)
        if is_object:
            at = 2 * width + index * (width + 2)
            (key,) = struct.unpack_from(number, data, at)
            (length,) = struct.unpack_from("<H", data, at + width)
            members[data[key : key + length]] = node
        else:
            elements.append(node)
    return members if is_object else elements


def _inlined(kind: int, width: int) -> bool:
    return _LITERAL <= kind <= _UINT16 or (width == 4 and kind in (_INT32, _UINT32))


def _scalar_size(kind: int, data: bytes) -> int:
    if kind in _SIZES:
        return _SIZES[kind]
    if kind not in (_STRING, _COLUMN):
        raise ValueError
    at, size, shift = (1 if kind == _COLUMN else 0), 0, 0
    while True:
        size |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return at + size


def _encode(node: Node) -> tuple[int, bytes]:
    """Return a value's type and bytes; objects and arrays always with 32-bit offsets."""
    if isinstance(node, Scalar):
        return node.kind, node.data
    # Binary JSON has the keys of an object in order of length, then of their bytes.
    keys = sorted(node, key=lambda key: (len(key), key)) if isinstance(node, dict) else []
    values = [node[key] for key in keys] if isinstance(node, dict) else node
    at = 8 + len(keys) * 6 + len(values) * 5
    head: list[bytes] = []
    for key in keys:
        head.append(struct.pack("<IH", at, len(key)))
        at += len(key)
    tail: list[bytes] = []
    for value in values:
        kind, data = _encode(value)
        if _inlined(kind, 4):
            head.append(bytes([kind]) + data.ljust(4, b"\0"))
        else:
            head.append(struct.pack("<BI", kind, at))
            tail.append(data)
            at += len(data)
    kind = (_OBJECT if isinstance(node, dict) else _ARRAY) | _LARGE
    return kind, b"".join([struct.pack("<II", len(values), at), *head, *keys, *tail])
