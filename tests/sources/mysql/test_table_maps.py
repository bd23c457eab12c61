"""What servers say of a table's columns in TABLE_MAP events: every type before and between every other kind of column."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pymysql
import pytest

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.binlog import LogServer
from deltaforge_dagster.sources.mysql.events.table_map import parse_table_map
from deltaforge_dagster.testing.sources import take, whole
from deltaforge_lab.servers.mysql_programs import Version
from deltaforge_lab.synthetic.mysql_events import SyntheticColumn, description
from tests.fix_mysql import EVERY_SERVER, MysqlVersion
from tests.sources.mysql.bench import MysqlBench

TYPES = [
    "tinyint", "smallint unsigned", "mediumint", "int", "bigint unsigned", "decimal(9,3) unsigned",
    "float unsigned", "double", "bit(9)", "year", "date", "time(3)", "datetime(6)",
    "timestamp(2) null", "char(0)", "char(3)", "varchar(300)", "binary(4)", "varbinary(9)",
    "tinytext", "text", "longtext", "tinyblob", "blob", "mediumblob", "json",
    "enum('p','q') character set latin1", "set('p','q')", "geometry", "point", "multipolygon",
    "geometrycollection", "vector(3)", "uuid", "inet4", "inet6",
]  # fmt: skip
"""Every type of any server; one that a server does not know is left out there."""

COLUMNS = """
    id int, {x} {type}, n int, u int unsigned, l varchar(9) character set latin1, y year,
    s varchar(9) character set sjis, {x}_2 {type}, b tinyint unsigned, e enum('ä','b') character set latin1,
    t set('x','日') character set utf8mb4, m mediumtext character set gbk, {x}_3 {type},
    d decimal(5,2), ud decimal(5,2) unsigned, ub bigint unsigned, r varbinary(3), c char(3) character set utf8mb4,
    z enum('日') character set sjis
"""
VALUES: dict[str, tuple[str, object]] = {
    "id": ("1", 1), "n": ("-1", -1), "u": ("4294967295", 4294967295), "l": ("'é'", "é"), "y": ("2026", 2026),
    "s": ("'日本'", "日本"), "b": ("255", 255), "e": ("'ä'", "ä"), "t": ("'日'", "日"), "m": ("'誠'", "誠"),
    "d": ("-1.5", "-1.50"), "ud": ("9.75", "9.75"), "ub": ("18446744073709551615", 18446744073709551615),
    "r": ("x'ff00'", {"_base64": "/wA="}), "c": ("'ß'", "ß"), "z": ("'日'", "日"),
}  # fmt: skip
"""By column: the value in SQL and in JSON. All others are null."""
INT, YEAR = 3, 13


@pytest.fixture(params=EVERY_SERVER)
def bench(request: pytest.FixtureRequest, mysql_version: MysqlVersion) -> Iterator[MysqlBench]:
    """A database on each server."""
    version: Version = request.param
    with MysqlBench(mysql_version(version).create_database()) as made:
        yield made


@pytest.mark.mysql
@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
@pytest.mark.parametrize("key", ["(ub, id)", "(l(3), id)"])
def test_every_type_leaves_the_columns_behind_it_as_they_are(
    bench: MysqlBench, metadata: str, key: str
) -> None:
    """Signs, character sets, labels and key, whatever of a column the server counts for them."""
    if not bench.is_mariadb and bench.version < (8, 0):
        metadata = ""
    if metadata:
        bench.run(f"SET GLOBAL binlog_row_metadata = {metadata}", "FLUSH BINARY LOGS")
    source = bench.source(tables=(f"{bench.database}.m%",))
    start = source.ensure_start()
    made = []
    try:
        bench.reconnect()
        for number, type_ in enumerate(TYPES):
            columns = COLUMNS.format(type=type_, x=f"x{number}")
            try:
                bench.run(f"CREATE TABLE m{number} ({columns}, PRIMARY KEY {key}) CHARSET latin1")
            except pymysql.Error:
                assert type_ in TYPES[-4:]
                continue
            made.append((number, type_))
            literals = ", ".join(literal for literal, _ in VALUES.values())
            bench.run(f"INSERT INTO m{number} ({', '.join(VALUES)}) VALUES ({literals})")
        rows = take(bench, start, whole(len(made)), source=source).rows
    finally:
        if metadata:
            bench.run(
                f"SET GLOBAL binlog_row_metadata = {'NO_LOG' if bench.is_mariadb else 'MINIMAL'}"
            )

    right = {name: value for name, (_, value) in VALUES.items()}
    of_key = {"(ub, id)": ("id", "ub"), "(l(3), id)": ("id", "l")}[key]
    for (number, type_), row in zip(made, rows, strict=True):
        after = json.loads(str(row["after"]))
        nulls = [name for name in after if name.startswith(f"x{number}")]
        assert nulls == [f"x{number}", f"x{number}_2", f"x{number}_3"], type_
        assert {after.pop(name) for name in nulls} == {None}
        assert after == right, type_
        assert json.loads(str(row["key"])) == {name: right[name] for name in of_key}, type_


def columns(*codes: int) -> list[SyntheticColumn]:
    """Return columns of these types."""
    return [SyntheticColumn(f"c{number}", code) for number, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("8.0.15-log", [False, False, True, False]),
        ("8.0.36-28.1", [False, False, False, False]),
        ("9.7.0", [False, False, False, False]),
        ("5.5.5-10.5.23-MariaDB-log", [False, False, False, False]),
        ("8.0.19", [False, False, None, False]),
        ("", [False, False, None, False]),
    ],
)
def test_the_version_says_whether_a_year_has_a_sign(
    version: str, expected: list[bool | None]
) -> None:
    """Where neither it nor the number of bytes says so, signs that depend on it are unknown."""
    body = bytes(8) + description("shop", "t", columns(INT, YEAR, INT, INT), full=False)
    assert body[-1:] == b"\0"
    found = parse_table_map(body[:-1] + b"\x40", LogServer.named(version))
    assert found.unsigned == expected


def test_the_number_of_bytes_may_say_whether_a_year_has_a_sign() -> None:
    """Nine signs do not fit into a byte; a version whose rule needs another number of bytes has not written them."""
    body = bytes(8) + description("shop", "t", columns(YEAR, *[INT] * 8), full=False)
    assert parse_table_map(body[:-1] + b"\x01", LogServer.named("8.0.19")).unsigned[-1] is True
    with pytest.raises(CorruptLog, match="SIGNEDNESS"):
        parse_table_map(body, LogServer.named("9.7.0"))


def test_a_type_that_is_not_known_is_named() -> None:
    """Its metadata cannot be told from those of the next column."""
    body = bytes(8) + description("shop", "t", columns(INT, 99), full=False)
    with pytest.raises(UnsupportedEvent, match=r"shop\.t has types that are not known: \[99\]"):
        parse_table_map(body, LogServer.named("9.7.0"))
