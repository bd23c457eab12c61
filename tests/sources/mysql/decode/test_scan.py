"""What stops the MySQL decoder, and what does not."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import read_only
from deltaforge_dagster.sources.mysql.decode.scan import crc32
from deltaforge_lab.synthetic import mysql_events as samples
from deltaforge_lab.synthetic.mysql_events import (
    FILE,
    SyntheticColumn,
    SyntheticLog,
    packed,
)
from tests.chance import examples
from tests.sources.mysql.decode.test_decoder import (
    DESCRIPTION,
    TABLE,
    USERS,
    decode,
    inserts,
    make_decoder,
    rows_of,
    transaction,
)
from tests.sources.mysql.reference import Catalog


def damaged(stream: bytes, at: int) -> bytes:
    """Return the stream with another byte at `at`."""
    return stream[:at] + bytes([stream[at] ^ 0xFF]) + stream[at + 1 :]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (26, "INCIDENT"),
        (200, "type 200"),
    ],
)
def test_unknown_events_stop(kind: int, words: str) -> None:
    """An event that is not decoded stops with its name and place, after the rows before it."""
    log = transaction(SyntheticLog().start(), 1, 1).begin(2)
    place = f"after {FILE}:{log.pos}"
    log.event(kind, b"abc")
    batches, error = decode(log.stream())

    assert isinstance(error, UnsupportedEvent)
    assert words in str(error)
    assert place in str(error)
    assert len(rows_of(batches)) == 1


def test_ignorable_events_are_passed_over() -> None:
    """Unknown events with the flag "ignorable", and those without changes, stop nothing."""
    log = (
        SyntheticLog()
        .start()
        .event(35, bytes(8))
        .begin(1)
        .event(29, b"\1x")
        .event(200, b"?", flags=0x80)
    )
    log.table(TABLE, DESCRIPTION)
    inserts(log, 1).event(37, b"view").commit().event(3, b"")
    batches, error = decode(log.stream())

    assert error is None
    assert len(rows_of(batches)) == 1


@pytest.mark.parametrize(
    "statement",
    ["INSERT INTO users VALUES (1)", "/* x */ update users set id = 1", "CALL p()"],
)
def test_changes_logged_as_statements_stop(statement: str) -> None:
    """A statement that changes rows is no row: its change would be lost."""
    log = transaction(SyntheticLog().start(), 1, 1).begin(2).query(statement)
    batches, error = decode(log.stream())

    assert isinstance(error, UnsupportedEvent)
    assert "binlog_format=ROW" in str(error)
    assert len(rows_of(batches)) == 1


def test_rolled_back_changes_stop() -> None:
    """ROLLBACK after changes (tables without transactions) is refused; after none it is nothing."""
    log = SyntheticLog().start().begin(1).query("ROLLBACK")
    harmless, none = decode(log.stream())
    log.begin(2).table(TABLE, DESCRIPTION)
    _, error = decode(inserts(log, 1).query("ROLLBACK").stream())

    assert none is None
    assert harmless[0].end is not None
    assert isinstance(error, UnsupportedEvent)
    assert "ROLLBACK" in str(error)


def test_savepoints_change_nothing() -> None:
    """SAVEPOINT statements, which some programs write before every change, are passed over."""
    catalog = Catalog()
    log = SyntheticLog().start().begin(1).query("SAVEPOINT `a`").table(TABLE, DESCRIPTION)
    batches, error = decode(inserts(log, 1).commit().stream(), catalog=catalog)

    assert error is None
    assert len(rows_of(batches)) == 1
    assert catalog.statements == []


def test_damage_stops() -> None:
    """A byte that is not what it was is noticed by its event's checksum, wherever it is."""
    log = SyntheticLog().start()
    start = len(log.stream())
    transaction(log, 1, 1, 2)
    whole = transaction(log, 2, 3).stream()
    rows = rows_of(decode(whole)[0])
    for at in range(start + 4, len(whole), 7):
        stream = damaged(whole, at)
        decoded = make_decoder().feed(stream, len(stream))
        # Else the byte was a packet's size or number, which the sum does not cover.
        if decoded.error is not None:
            assert isinstance(decoded.error, CorruptLog)
        else:
            assert rows_of(list(decoded.batches)) == rows[: len(rows_of(list(decoded.batches)))]


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(50))
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 10_000), st.integers(0, 255))
def test_damage_without_checksums_raises_nothing(at: int, byte: int, at2: int, byte2: int) -> None:
    """Where the file has no checksums, damaged bytes give an error of the tree or wrong rows."""
    log = SyntheticLog(checksums=False).start()
    start = len(log.stream())
    stream = bytearray(transaction(transaction(log, 1, 1, 2), 2, 3, 4).stream())
    for place, value in ((at, byte), (at2, byte2)):
        stream[start + place % (len(stream) - start)] = value
    decoder = make_decoder()
    decoded = decoder.feed(stream, len(stream))

    assert decoded.error is None or isinstance(decoded.error, DeltaforgeError)


def test_events_out_of_order_stop() -> None:
    """A change outside a transaction, a transaction in another, or an unknown table is damage."""
    known = SyntheticLog().start().begin(1).table(TABLE, DESCRIPTION).commit()
    for log, words in [
        (inserts(known, 1), "where a transaction may not have it"),
        (SyntheticLog().start().begin(1).gtid(2), "where a transaction may not have it"),
        (inserts(SyntheticLog().start().begin(1), 1), "never described"),
        (SyntheticLog().start().begin(1).event(23, b"abc"), "shorter or longer"),
    ]:
        _, error = decode(log.stream())
        assert isinstance(error, CorruptLog)
        assert words in str(error)


def test_images_without_columns_stop() -> None:
    """A MINIMAL insert of nothing but defaults does not say how many rows it is about."""
    log = (
        SyntheticLog().start().begin(1).table(TABLE, DESCRIPTION).rows(30, TABLE, packed(2) + b"\0")
    )
    _, error = decode(log.stream())

    assert isinstance(error, UnsupportedEvent)
    assert "binlog_row_image=FULL" in str(error)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (SyntheticColumn("v", 15, b"\xff\0", collation=9999), "unknown collation 9999"),
        (SyntheticColumn("v", 15, b"\xff\0"), "which the log leaves out"),
        (SyntheticColumn("v", 7), "before MySQL 5.6"),
    ],
)
def test_columns_that_are_not_decoded_are_named(column: SyntheticColumn, words: str) -> None:
    """A type or character set that is not known stops with its column; not if it is not captured."""
    described = samples.description("shop", "t", (USERS[0], column), (0,))
    log = SyntheticLog().start().begin(1).table(TABLE, described)
    _, error = decode(log.stream())

    assert isinstance(error, UnsupportedEvent)
    assert words in str(error)
    assert "table shop.t" in str(error)
    if column.code != 7:
        assert decode(log.commit().stream(), captures=lambda *_: False)[1] is None


def test_bad_values_are_named() -> None:
    """A value that cannot be right stops with column, type, table and place."""
    for code, metadata, value in [
        (254, b"\xf7\1", b"\3"),
        (254, b"\xf8\1", b"\4"),
        (18, b"\0", bytes(5)),
        (10, b"", b"\xff\xff\xff"),
        (245, b"\4", b"\1\0\0\0\xff"),
    ]:
        labels = ("a", "b") if code == 254 else ()
        described = samples.description(
            "shop", "t", (SyntheticColumn("v", code, metadata, labels=labels),)
        )
        log = transaction(SyntheticLog().start(), 1, 1).begin(2).table(9, described)
        log.rows(30, 9, packed(1) + b"\1\0" + value).commit()
        batches, error = decode(log.stream())

        assert isinstance(error, CorruptLog)
        assert len(rows_of(batches)) == 1


@given(st.binary(max_size=100), st.integers(0, 10))
def test_crc32_is_zlib_s(content: bytes, start: int) -> None:
    """The checksum of bytes from any place on is the one that zlib computes."""
    start = min(start, len(content))

    assert crc32(read_only(content), start, len(content)) == zlib.crc32(content[start:])
