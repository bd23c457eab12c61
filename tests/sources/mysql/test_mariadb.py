"""MariaDB's log, on a real server; what it has in common with MySQL's is in the contract."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import (
    CorruptLog,
    PositionLost,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.mysql.events import binlog
from deltaforge_dagster.sources.mysql.events.compressed_events import decompressed
from deltaforge_dagster.sources.mysql.position import BinlogPosition, covers
from deltaforge_dagster.tables import ColumnDetails
from deltaforge_dagster.testing.sources import (
    Taken,
    insert,
    inserts,
    take,
    whole,
)
from tests.fix_mysql import MysqlVersion
from tests.sources.mysql.bench import MysqlBench
from tests.sources.mysql.schema.test_catalog import details_of_many

pytestmark = pytest.mark.mysql

VALUES = {
    "tiny": ("tinyint unsigned", "255", 255),
    "big": ("bigint unsigned", "18446744073709551615", 18446744073709551615),
    "whole": ("int", "-7", -7),
    "price": ("decimal(9,3)", "-1.5", "-1.500"),
    "word": ("varchar(20) character set latin1", "'h\u00e9'", "h\u00e9"),
    "kanji": ("varchar(20) character set sjis", "'\u65e5\u672c'", "\u65e5\u672c"),
    "uca": ("varchar(20) collate utf8mb4_uca1400_ai_ci", "'\u00fc'", "\u00fc"),
    "doc": ("json", """'{"a": 1}'""", '{"a": 1}'),
    "raw": ("varbinary(4)", "x'ff00'", {"_base64": "/wA="}),
    "id128": ("uuid", "'123e4567-e89b-12d3-a456-426655440000'", "123e4567-e89b-12d3-a456-426655440000"),
    "four": ("inet4", "'192.0.2.0'", "192.0.2.0"),
    "six": ("inet6", "'2001:db8::ff00:42:0'", "2001:db8::ff00:42:0"),
    "sixteen": ("binary(16)", "x'00ff0102'", {"_base64": "AP8BAgAAAAAAAAAAAAAAAA=="}),
    "moment": ("timestamp(6) null", "'2020-01-02 03:04:05.678901'", None),
    "day": ("datetime(3)", "'2020-01-02 03:04:05.678'", "2020-01-02 03:04:05.678000"),
    "span": ("time(2)", "'-10:11:12.13'", "-10:11:12.130000"),
    "pick": ("enum('a','\u00e4') COLLATE utf8mb4_bin", "'\u00e4'", "\u00e4"),
    "picks": ("set('x','y')", "'x,y'", "x,y"),
}  # fmt: skip
"""By column: its type, a literal, and the value in JSON; None for what is only compared."""

SINCE = {"id128": (10, 7), "uca": (10, 10), "four": (10, 10)}
"""Columns whose types older versions do not have."""


@pytest.fixture(
    params=[
        "mariadb",
        pytest.param("mariadb 11.8", marks=pytest.mark.soak("versions")),
        pytest.param("mariadb 10.11", marks=pytest.mark.soak("versions")),
        pytest.param("mariadb 10.5", marks=pytest.mark.soak("versions")),
    ]
)
def bench(request: pytest.FixtureRequest, mysql_version: MysqlVersion) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other` on MariaDB."""
    with MysqlBench(mysql_version(request.param).create_database()) as made:
        yield made


def taken_from(bench: MysqlBench, start: Position, count: int) -> Taken:
    """Read `count` changes."""
    return take(bench, start, whole(count))


def with_statements(taken: Taken) -> list[dict[str, object]]:
    """Return the rows together with those of statements."""
    batches = [batch.rows for batch in taken.batches if batch.rows is not None]
    return [row for rows in batches for row in rows.to_pylist()]


@pytest.mark.parametrize("metadata", ["NO_LOG", "MINIMAL", "FULL"])
def test_every_amount_of_metadata_gives_the_same_values(bench: MysqlBench, metadata: str) -> None:
    """What the log leaves out (signs, character sets, UUID behind BINARY) comes from the catalog."""
    there = {name: of for name, of in VALUES.items() if SINCE.get(name, ()) <= bench.version}
    columns = ", ".join(f"{name} {type_}" for name, (type_, _, _) in there.items())
    bench.run(
        f"SET GLOBAL binlog_row_metadata = {metadata}",
        "FLUSH BINARY LOGS",
        "SET time_zone = '+00:00'",
        f"CREATE TABLE orders_{metadata} (id int PRIMARY KEY, {columns})",
    )
    try:
        source = bench.source(tables=(f"{bench.database}.orders_{metadata}",))
        start = source.ensure_start()
        literals = ", ".join(literal for _, literal, _ in there.values())
        bench.run(f"INSERT INTO orders_{metadata} VALUES (1, {literals})")

        (row,) = take(bench, start, whole(1), source=source).rows
    finally:
        bench.run("SET GLOBAL binlog_row_metadata = NO_LOG")

    expected = {"id": 1, **{name: value for name, (_, _, value) in there.items()}}
    expected["moment"] = "2020-01-02T03:04:05.678901Z"
    assert json.loads(str(row["after"])) == expected
    assert row["key"] == '{"id":1}'


def test_a_json_column_that_was_added(bench: MysqlBench) -> None:
    """It is text in utf8mb4, which neither the log nor the statement says."""
    start = bench.source().ensure_start()
    bench.run("ALTER TABLE orders ADD COLUMN j json NOT NULL AFTER id")
    bench.execute("""INSERT INTO orders (id, j) VALUES (1, '{"ä": 1}')""")
    (row,) = taken_from(bench, start, 1).rows
    assert json.loads(str(row["after"])) == {"id": 1, "j": '{"ä": 1}', "v": None}


def test_compressed_events_are_those_that_they_stand_for(bench: MysqlBench) -> None:
    """Rows of every kind, also over 16 MiB, and statements, with log_bin_compress."""
    bench.run("SET GLOBAL log_bin_compress = ON", "SET GLOBAL binlog_row_metadata = FULL")
    bench.run("FLUSH BINARY LOGS")
    try:
        start = bench.source().ensure_start()
        bench.execute(*(f"INSERT INTO orders VALUES ({i}, repeat('ab', 1000))" for i in (1, 2)))
        bench.execute("UPDATE orders SET v = repeat('c', 1000)", "DELETE FROM orders")
        bench.run(f"ALTER TABLE orders ADD COLUMN w int /*{'.' * 400}*/")
        bench.execute("INSERT INTO orders VALUES (3, repeat('d', 20000000), 4)")

        rows = with_statements(taken_from(bench, start, 7))
    finally:
        bench.run("SET GLOBAL log_bin_compress = OFF", "SET GLOBAL binlog_row_metadata = NO_LOG")

    ops = [row["op"] for row in rows]
    assert ops == ["c", "c", "u", "u", "d", "d", "ddl", "c"]
    assert json.loads(str(rows[0]["after"])) == {"id": 1, "v": "ab" * 1000}
    assert json.loads(str(rows[4]["before"])) == {"id": 1, "v": "c" * 1000}
    assert json.loads(str(rows[7]["after"])) == {"id": 3, "v": "d" * 20_000_000, "w": 4}


@given(st.binary(max_size=400), st.integers(0, 9))
def test_a_damaged_compressed_event_is_an_error(content: bytes, rows: int) -> None:
    """Whatever the bytes, there is the event that they stand for, or an error of ours."""
    kind = binlog.QUERY_COMPRESSED + rows % 7
    event = bytes(4) + bytes([kind]) + bytes(14) + content
    with contextlib.suppress(CorruptLog, UnsupportedEvent):
        assert decompressed(event)[4] != kind


@pytest.mark.parametrize("size", [b"\x81\x09", b"\x81\x0b", b"\x87" + b"\x7f" * 7])
def test_a_size_that_is_not_true_is_damage(size: bytes) -> None:
    """A stream that gives another size than it says is not taken for whole; none is made room for."""
    body = bytes(8) + b"\x01" + b"\xff" + size + zlib.compress(b"0123456789")
    event = bytes(4) + bytes([binlog.WRITE_ROWS_COMPRESSED_1]) + bytes(14) + body

    with pytest.raises(CorruptLog, match="differs from its size"):
        decompressed(event)


def test_xa_counts_at_its_commit(bench: MysqlBench) -> None:
    """Also compressed, and when reading begins between its two parts: its rows are in the log."""
    bench.run("SET GLOBAL log_bin_compress = ON", "FLUSH BINARY LOGS")
    try:
        start = bench.source().ensure_start()
        for number in (1, 2):
            bench.run(
                f"XA START 'x{number}'", f"INSERT INTO orders VALUES ({number}, repeat('z', 500))"
            )
            bench.run(f"XA END 'x{number}'", f"XA PREPARE 'x{number}'")
            bench.reconnect()  # a session has one at a time
        between = bench.source().ensure_start()
        bench.run("XA ROLLBACK 'x1'", "XA COMMIT 'x2'")
        bench.run("XA START 'x3'", insert("orders", 3), "XA END 'x3'", "XA COMMIT 'x3' ONE PHASE")
    finally:
        bench.run("SET GLOBAL log_bin_compress = OFF")

    for begin in (start, between):
        rows = taken_from(bench, begin, 2).rows
        assert [json.loads(str(row["after"]))["id"] for row in rows] == [2, 3]
        assert all(row["tx_end"] for row in rows)


def test_statements_and_rows_of_one_transaction(bench: MysqlBench) -> None:
    """CREATE TABLE ... SELECT, a table without transactions amid others, savepoints, TRUNCATE."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1), "SAVEPOINT s", insert("orders", 2))
    bench.run(f"CREATE TABLE {bench.database}.made AS SELECT * FROM orders")
    bench.run("ALTER TABLE items ENGINE = MyISAM")
    bench.run("BEGIN", insert("orders", 3), insert("items", 1), "ROLLBACK", "TRUNCATE TABLE items")

    rows = with_statements(taken_from(bench, start, 4))

    assert [(row["op"], row["table"]) for row in rows] == [
        ("c", "orders"),
        ("c", "orders"),
        ("ddl", "_ddl"),
        ("ddl", "_ddl"),
        ("c", "items"),
        ("t", "items"),
    ]


def test_domains_are_followed_side_by_side(bench: MysqlBench) -> None:
    """A position has the last GTID of each; reading goes on behind all of them."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1))
    bench.run("SET SESSION gtid_domain_id = 7", insert("orders", 2))
    first = taken_from(bench, start, 2)
    bench.run(insert("orders", 3), "SET SESSION gtid_domain_id = 0", insert("orders", 4))
    second = taken_from(bench, first.end, 2)

    assert first.changes + second.changes == inserts("orders", 1, 2, 3, 4)
    names = [str(row["tx_id"]).split("-") for row in first.rows + second.rows]
    assert [(domain, server) for domain, server, _ in names] == [
        ("0", "1"), ("7", "1"), ("7", "1"), ("0", "1"),
    ]  # fmt: skip
    assert isinstance(second.end, BinlogPosition)
    executed = str(bench.rows("SELECT @@gtid_binlog_pos")[0][0])
    assert covers(executed, second.end.gtid_set or "")
    assert covers(second.end.gtid_set or "", executed)


def test_a_place_gains_its_gtids(bench: MysqlBench) -> None:
    """Reading may begin at a file and an offset; from then on the position has GTIDs."""
    place = bench.head()
    bench.execute(insert("orders", 1))

    taken = taken_from(bench, place, 1)

    assert place.gtid_set is None
    assert isinstance(taken.end, BinlogPosition)
    assert str(taken.rows[0]["tx_id"]) in (taken.end.gtid_set or "").split(",")


def test_gtids_that_the_server_has_not_are_a_lost_position(bench: MysqlBench) -> None:
    """Another server, or one restored from a backup, does not go on somewhere."""
    head = bench.source().head()

    for gtids in ("0-1-99999999", "0-77-1", "55-1-1"):
        with pytest.raises(PositionLost, match="Re-snapshot required"):
            taken_from(bench, BinlogPosition(head.file, head.pos, gtids), 1)


@pytest.mark.parametrize(
    "bench",
    ["mariadb", pytest.param("mariadb 10.11", marks=pytest.mark.soak("versions"))],  # since 10.8
    indirect=True,
)
def test_an_alter_in_two_phases_stops(bench: MysqlBench) -> None:
    """Between its phases rows still have the old columns; the message names the variable."""
    start = bench.source().ensure_start()
    bench.run("SET SESSION binlog_alter_two_phase = ON", "ALTER TABLE orders ADD COLUMN w int")

    with pytest.raises(UnsupportedEvent, match="binlog_alter_two_phase"):
        taken_from(bench, start, 1)


def test_a_table_that_is_gone_is_held_when_only_the_catalog_knew_its_types(
    bench: MysqlBench,
) -> None:
    """Nobody can say any more whether BINARY(16) was a UUID: its rows are kept back, not guessed."""
    bench.run(
        "SET GLOBAL binlog_row_metadata = FULL",
        "DROP TABLE items",
        "CREATE TABLE items (id int PRIMARY KEY, v binary(16))",
        "FLUSH BINARY LOGS",
    )
    try:
        start = bench.source().ensure_start()
        bench.run("INSERT INTO items VALUES (1, 'x')", "DROP TABLE items", insert("orders", 1))

        taken = take(bench, start, lambda t: any(row["table"] == "orders" for row in t.rows))
    finally:
        bench.run("SET GLOBAL binlog_row_metadata = NO_LOG")

    held = [event.table for batch in taken.batches for event in batch.parked]
    assert f"{bench.database}.items" in held
    assert all(row["table"] != "items" for row in taken.rows)


def test_details_come_from_the_catalog(bench: MysqlBench) -> None:
    """What the log does not say: defaults as the server writes them, how values are made, and the table's text."""
    assert details_of_many(bench) == {
        "id": ColumnDetails(False, None, "auto_increment"),
        "at": ColumnDetails(False, "current_timestamp()", "on update current_timestamp()"),
        "word": ColumnDetails(False, "'NULL'", ""),
        "blank": ColumnDetails(True, "''", ""),
        "n": ColumnDetails(True, None, ""),
        "g": ColumnDetails(True, None, "STORED GENERATED"),
    }


def test_compressed_columns_of_tables_that_are_not_captured_stop_nothing(bench: MysqlBench) -> None:
    """Their values are skipped by their sizes."""
    source = bench.source(tables=(f"{bench.database}.orders",))
    start = source.ensure_start()
    bench.run(
        "CREATE TABLE squeezed (a varchar(20) COMPRESSED, b text COMPRESSED, c varbinary(900) COMPRESSED,"
        " d longblob COMPRESSED, e int)"
    )
    bench.execute(
        "INSERT INTO squeezed VALUES ('a', repeat('b', 999), repeat('c', 900), 'd', 5), (NULL, '', NULL, '', 6)",
        insert("orders", 1),
    )
    bench.run(insert("orders", 2))

    rows = take(bench, start, whole(2), source=source).rows
    assert [row["key"] for row in rows] == ['{"id":1}', '{"id":2}']
