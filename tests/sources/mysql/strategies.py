"""Hypothesis strategies: columns with values as they stand in MySQL's log, and whole streams."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from deltaforge_lab.synthetic.mysql_events import (
    SyntheticColumn,
    SyntheticLog,
    bitmap,
    description,
    packed,
)
from tests.sources.mysql.reference import Table, decimal_size

Values = st.SearchStrategy[bytes]
"""Values of a column, with the length before them where the log has one."""

_texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\{},\n\x01\x7f\U0001f600'),
    max_size=20,
)
_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def _sized(prefix: int) -> Callable[[bytes], bytes]:
    return lambda value: len(value).to_bytes(prefix, "little") + value


def _bytes_of(size: int) -> Values:
    edges = [bytes(size), b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", bytes(size - 1) + b"\x80"]
    return st.binary(min_size=size, max_size=size) | st.sampled_from(edges)


@st.composite
def _integers(draw: st.DrawFn) -> tuple[SyntheticColumn, Values]:
    code, size = draw(st.sampled_from([(1, 1), (2, 2), (9, 3), (3, 4), (8, 8)]))
    return SyntheticColumn("", code, unsigned=draw(st.booleans())), _bytes_of(size)


def decimal_bytes(digits: int, scale: int, number: int) -> bytes:
    """Return `number` / 10^`scale` as a DECIMAL."""
    text = str(abs(number)).zfill(digits)
    whole = digits - scale
    partial = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    data, at = b"", 0
    for group in [whole % 9, *[9] * (whole // 9), *[9] * (scale // 9), scale % 9]:
        data += int(text[at : at + group] or "0").to_bytes(partial[group])
        at += group
    assert len(data) == decimal_size(digits, scale)
    if number < 0:
        data = bytes(byte ^ 255 for byte in data)
    return bytes([data[0] ^ 128]) + data[1:]


@st.composite
def _decimals(draw: st.DrawFn) -> tuple[SyntheticColumn, Values]:
    digits = draw(st.integers(1, 65))
    scale = draw(st.integers(0, min(digits, 30)))
    most = 10**digits - 1
    numbers = st.integers(-most, most) | st.sampled_from([0, most, -most, 1, -1])
    values = numbers.map(lambda number: decimal_bytes(digits, scale, number))
    return SyntheticColumn("", 246, bytes([digits, scale])), values


@st.composite
def _times(draw: st.DrawFn) -> tuple[SyntheticColumn, Values]:
    digits = draw(st.integers(0, 6))
    size = (digits + 1) // 2
    fraction = st.integers(0, 100**size - 1)
    code = draw(st.sampled_from([17, 18, 19]))
    if code == 17:
        values = st.builds(
            lambda seconds, part: seconds.to_bytes(4) + part.to_bytes(size),
            st.integers(0, 2**32 - 1),
            fraction,
        )
    elif code == 18:
        values = st.builds(
            lambda y, mo, d, h, mi, s, part: (
                (1 << 39 | (y * 13 + mo) << 22 | d << 17 | h << 12 | mi << 6 | s).to_bytes(5)
                + part.to_bytes(size)
            ),
            *(st.integers(0, most) for most in (9999, 12, 31, 23, 59, 59)),
            fraction,
        )
    else:
        values = st.builds(
            lambda sign, h, mi, s, part: (
                sign * ((h << 12 | mi << 6 | s) << 8 * size | part) + (0x800000 << 8 * size)
            ).to_bytes(3 + size),
            st.sampled_from([1, -1]),
            *(st.integers(0, most) for most in (838, 59, 59)),
            fraction,
        )
    return SyntheticColumn("", code, bytes([digits])), values


@st.composite
def _labelled(draw: st.DrawFn) -> tuple[SyntheticColumn, Values]:
    labels = draw(st.lists(_texts, min_size=1, max_size=4, unique=True))
    if draw(st.booleans()):
        labels += [f"label {i}" for i in range(draw(st.sampled_from([0, 251, 300])))]
        size = 1 if len(labels) < 256 else 2
        values = st.integers(0, len(labels)).map(lambda n: n.to_bytes(size, "little"))
        return SyntheticColumn("", 254, bytes([247, size]), labels=tuple(labels)), values
    labels += [f"label {i}" for i in range(draw(st.sampled_from([0, 4, 12, 20, 60])))]
    size = next(s for s in (1, 2, 3, 4, 8) if len(labels) <= 8 * s)
    most = (1 << len(labels)) - 1
    values = st.integers(0, most).map(lambda bits: bits.to_bytes(size, "little"))
    return SyntheticColumn("", 254, bytes([248, size]), labels=tuple(labels)), values


@st.composite
def _strings(draw: st.DrawFn) -> tuple[SyntheticColumn, Values]:
    collation = draw(st.sampled_from([255, 45, 33, 11, 8, 63, 51, 54]))
    contents = st.binary(max_size=30) | _texts.map(str.encode)
    code = draw(st.sampled_from([15, 252, 254]))
    if code == 252:
        prefix = draw(st.integers(1, 4))
        return SyntheticColumn("", 252, bytes([prefix]), collation=collation), contents.map(
            _sized(prefix)
        )
    size = draw(st.sampled_from([120, 255, 256, 1000]))
    prefix = 1 if size < 256 else 2
    of_char = bytes([254 ^ size >> 8 << 4, size & 255])
    metadata = of_char if code == 254 else struct.pack("<H", size)
    return SyntheticColumn("", code, metadata, collation=collation), contents.map(
        lambda value: _sized(prefix)(value[:120])
    )


@st.composite
def _others(draw: st.DrawFn) -> tuple[SyntheticColumn, Values]:
    code = draw(st.sampled_from([4, 5, 10, 13, 16, 255]))
    if code == 4:
        floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
        return SyntheticColumn("", 4, b"\4"), floats.map(lambda f: struct.pack("<f", f))
    if code == 5:
        floats = st.floats(allow_nan=False, allow_infinity=False)
        return SyntheticColumn("", 5, b"\x08"), floats.map(lambda f: struct.pack("<d", f))
    if code == 10:
        days = st.builds(
            lambda y, m, d: (y << 9 | m << 5 | d).to_bytes(3, "little"),
            *(st.integers(0, most) for most in (9999, 12, 31)),
        )
        return SyntheticColumn("", 10), days
    if code == 13:
        return SyntheticColumn("", 13), _bytes_of(1)
    if code == 16:
        bits = draw(st.integers(1, 64))
        values = st.integers(0, 2**bits - 1).map(lambda n: n.to_bytes((bits + 7) // 8))
        return SyntheticColumn("", 16, bytes([bits % 8, bits // 8])), values
    prefix = draw(st.integers(1, 4))
    return SyntheticColumn("", 255, bytes([prefix])), st.binary(max_size=30).map(_sized(prefix))


columns = _integers() | _decimals() | _times() | _labelled() | _strings() | _others()
"""A column without a name, and its values."""


@dataclass
class Made:
    """A stream, and the tables in it by id."""

    stream: bytes
    tables: dict[int, Table]


@st.composite
def _tables(draw: st.DrawFn) -> tuple[Table, list[Values]]:
    drawn = draw(st.lists(columns, min_size=1, max_size=12))
    names = draw(st.lists(_names, min_size=len(drawn), max_size=len(drawn), unique=True))
    fields = [replace(f, name=name) for (f, _), name in zip(drawn, names, strict=True)]
    key = draw(st.lists(st.integers(0, len(fields) - 1), max_size=3, unique=True))
    captured = draw(st.integers(0, 3)) > 0
    db, name = ("shop" if captured else "other"), draw(_names)
    return Table(db, name, fields, key, captured), [values for _, values in drawn]


@st.composite
def streams(draw: st.DrawFn) -> Made:
    """Valid streams of a few transactions on a few tables."""
    log = SyntheticLog(checksums=draw(st.booleans())).start()
    drawn = draw(st.lists(_tables(), min_size=1, max_size=3))
    tables = {100 + i * 4096: table for i, (table, _) in enumerate(drawn)}
    for number in range(1, draw(st.integers(1, 4)) + 1):
        clock = draw(st.integers(0, 2**51))
        gtid = number if draw(st.integers(0, 3)) else 0
        log.begin(gtid, clock, original=draw(st.none() | st.integers(0, 2**51)))
        for _ in range(draw(st.integers(0, 4))):
            which = draw(st.integers(0, len(drawn) - 1))
            table, values = drawn[which]
            log.table(
                100 + which * 4096, description(table.db, table.name, table.fields, table.key)
            )
            _rows(draw, log, 100 + which * 4096, table, values)
        if draw(st.booleans()):
            log.commit()
        else:
            log.query("COMMIT")
    return Made(log.stream(), tables)


def _rows(
    draw: st.DrawFn, log: SyntheticLog, table_id: int, table: Table, values: list[Values]
) -> None:
    """Add a rows event: of any kind and version, all columns or some, nulls here and there."""
    count = len(values)
    kind = draw(st.sampled_from([23, 24, 25, 30, 31, 32]))
    everything = draw(st.booleans())

    def present() -> list[bool]:
        chosen = [everything or draw(st.booleans()) for _ in range(count)]
        for column in table.key:
            chosen[column] = True
        return chosen if any(chosen) else [True] * count

    def image(chosen: list[bool]) -> bytes:
        sent = [v for v, there in zip(values, chosen, strict=True) if there]
        nulls = [draw(st.integers(0, 4)) == 0 for _ in sent]
        return bitmap(nulls) + b"".join(
            draw(v) for v, null in zip(sent, nulls, strict=True) if not null
        )

    old, new = present(), present()
    content = packed(count) + bitmap(old)
    update = kind in (24, 31)
    if update:
        content += bitmap(new)
    for _ in range(draw(st.integers(1, 4))):
        content += image(old) + (image(new) if update else b"")
    extra = b"" if kind < 30 else draw(st.sampled_from([b"", b"\0\5abc"]))
    log.rows(kind, table_id, content, extra=extra)
