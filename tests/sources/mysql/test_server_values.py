"""What a server has stored is what its log is decoded to: every type, at its boundaries."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.testing.sources import take, whole
from deltaforge_lab.servers.mysql import MysqlServer
from tests.sources.mysql.bench import MysqlBench

pytestmark = [pytest.mark.mysql]


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """An empty database, with nothing but what a test makes."""
    with MysqlBench(mysql_dsn) as made:
        made.run("SET time_zone = '+00:00'", "SET sql_mode = ''")
        yield made


def reader(bench: MysqlBench) -> MysqlSource:
    """Return a source that captures every table of the database."""
    return bench.source(tables=(f"{bench.database}.*",))


def integers(bits: int) -> list[str]:
    """Return the boundaries of a signed and of an unsigned integer."""
    return [str(-(2 ** (bits - 1))), "-1", "0", "127", "128", str(2 ** (bits - 1) - 1)]


def shortest(value: float) -> float:
    """Return the shortest number that is the same FLOAT."""
    return float(str(np.float32(value)))


def six(text: str) -> str:
    """Return the text of a time with six digits of its fraction."""
    whole_, _, fraction = text.partition(".")
    return f"{whole_}.{fraction:0<6}"


def zulu(text: str) -> str:
    """Return the text of a TIMESTAMP as ISO 8601."""
    return six(text).replace(" ", "T") + "Z"


def blob(value: bytes) -> object:
    """Return what JSON says of a BLOB."""
    return {"_base64": base64.b64encode(value).decode()}


CHARS = "CAST({} AS CHAR)"
TYPES: dict[str, tuple[list[str], str, Callable[[Any], object]]] = {
    # type: (values as SQL, how the server is asked, what that is as JSON)
    "tinyint": ([*integers(8)[:4], "127"], "{}", int),
    "tinyint unsigned": (["0", "127", "128", "255"], "{}", int),
    "bool": (["true", "false"], "{}", int),
    "smallint": (integers(16), "{}", int),
    "smallint unsigned": (["0", "32768", "65535"], "{}", int),
    "mediumint": (integers(24), "{}", int),
    "mediumint unsigned": (["0", "8388608", "16777215"], "{}", int),
    "int": (integers(32), "{}", int),
    "int unsigned zerofill": (["0", "2147483648", "4294967295"], "{}", int),
    "bigint": (integers(64), "{}", int),
    "bigint unsigned": (["0", "9223372036854775808", "18446744073709551615"], "{}", int),
    "decimal(65,30)": (
        [
            "0",
            f"{'9' * 35}.{'9' * 30}",
            f"-{'9' * 35}.{'9' * 30}",
            "-0.000000000000000000000000000001",
        ],
        CHARS,
        str,
    ),
    "decimal(1,0)": (["0", "9", "-9"], CHARS, str),
    "decimal(30,30)": (["0.5", "-0.000000000000000000000000000009"], CHARS, str),
    "decimal(10,2) unsigned": (["99.90", "0.5"], CHARS, str),
    "decimal(18,9)": (["123456789.123456789", "-1.5", "-0.0"], CHARS, str),
    "decimal(65,0)": (["9" * 65, "-" + "9" * 65, "1000000000"], CHARS, str),
    "float": (
        ["0.5", "-1.17549435e-38", "3.40282347e+38", "0.1", "16777216"],
        "{} + 0e0",
        shortest,
    ),
    "double": (["0.1", "-2.2250738585072014e-308", "1.7976931348623157e+308", "-0.0"], "{}", float),
    "bit(1)": (["b'1'", "b'0'"], "{} + 0", int),
    "bit(64)": (["b'0'", str(2**64 - 1), str(2**63)], "{} + 0", int),
    "bit(13)": (["b'1010101010101'"], "{} + 0", int),
    "year": (["0", "1901", "2155", "2026"], "{}", int),
    "date": (["'0000-00-00'", "'1000-01-01'", "'9999-12-31'", "'2024-02-29'"], CHARS, str),
    **{
        f"datetime({digits})": (
            [
                "'0000-00-00'",
                "'1000-01-01'",
                "'9999-12-31 23:59:59'",
                "'2024-02-29 12:34:56.789123'",
            ],
            CHARS,
            six,
        )
        for digits in range(7)
    },
    **{
        f"timestamp({digits}) null": (
            ["'1970-01-01 00:00:01'", "'2038-01-19 03:14:07'", "'2024-02-29 12:34:56.789123'", "0"],
            CHARS,
            zulu,
        )
        for digits in range(7)
    },
    **{
        f"time({digits})": (
            ["'-838:59:59'", "'838:59:59'", "'-00:00:00.000001'", "'-12:34:56.789123'", "0"],
            CHARS,
            six,
        )
        for digits in range(7)
    },
    "enum('new','it''s','日本','','a\"b')": (
        ["'new'", "'it''s'", "'日本'", "'a\"b'", "5"],
        "{}",
        str,
    ),
    "set('a','b','c\"','ü')": (["''", "'a,c\"'", "'ü'", "15"], "{}", str),
    "char(10)": (["''", "'x '", "'日本語😀'", "'\\0\\n\\t\\\\\"'"], "{}", str),
    "char(200)": (["'x'", "repeat('ü', 200)"], "{}", str),
    "varchar(255)": (["''", "'x '", "repeat('😀', 255)"], "{}", str),
    "varchar(10) character set latin1": (["''", "'äé€'", "unhex('818d8f909d9fff')"], "{}", str),
    "varchar(10) character set cp1251": (["'привет'", "''"], "{}", str),
    "varchar(10) character set ucs2": (["'aü日'"], "{}", str),
    "text character set utf16": (["'aü日😀'"], "{}", str),
    "tinytext": (["''", "repeat('x', 255)"], "{}", str),
    "text": (["''", "repeat('ü', 30000)"], "{}", str),
    "mediumtext": (["repeat('\\n', 70000)"], "{}", str),
    "longtext": (["repeat('x', 70000)", "'\\u007f'"], "{}", str),
    "binary(4)": (["''", "'ab'", "x'ff'", "x'00010203'", "x'6100'"], "{}", blob),
    "varbinary(300)": (["''", "'ab'", "x'ff00'", "repeat(x'00', 300)"], "{}", blob),
    "tinyblob": (["''", "'ab'", "x'ff00'"], "{}", blob),
    "blob": (["repeat('abc', 3000)"], "{}", blob),
    "mediumblob": (["repeat(x'fe', 70000)"], "{}", blob),
    "longblob": (["x'00'"], "{}", blob),
    "geometry": (["ST_GeomFromText('POINT(1 2)')"], "{}", blob),
    "json": (
        [
            "'{}'",
            "'[]'",
            "'null'",
            '\'{"a": [1, -2, 2.5, 1e30, true, false, null, "ü\\\\n"], "b": {"c": {}}}\'',
            "json_array(-32768, 32768, 65536, -2147483649, 4294967296, 18446744073709551615)",
            "json_array(cast('2026-01-02 03:04:05.6' as datetime(6)), cast('-12:34:56' as time(6)))",
            "json_array(cast('2026-01-02' as date), 12345678901234567890.123, -0.5)",
            "json_array(repeat('x', 200), repeat('y', 70000))",
            "json_object('', repeat('z', 70000), 'k', json_array(1, 100000, 'q'))",
            "cast(concat('[', repeat('1,', 40000), '2]') as json)",
        ],
        "{}",
        json.loads,
    ),
}


@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
def test_every_type_at_its_boundaries(bench: MysqlBench, metadata: str) -> None:
    """Each value of each type, and null, is decoded to what the server answers when asked."""
    columns = {f"c{i:03}": type_ for i, type_ in enumerate(TYPES)}
    most = max(len(values) for values, *_ in TYPES.values())
    bench.run(f"SET GLOBAL binlog_row_metadata = {metadata}")
    try:
        start = reader(bench).ensure_start()
        bench.run(f"CREATE TABLE v ({', '.join(f'{n} {type_}' for n, type_ in columns.items())})")
        for line in range(most + 1):  # the last line is nothing but nulls
            values = [
                values[line] if line < len(values) else "NULL" for values, *_ in TYPES.values()
            ]
            bench.execute(f"INSERT INTO v VALUES ({', '.join(values)})")
        taken = take(bench, start, whole(most + 1), source=reader(bench))
    finally:
        bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")

    decoded = [json.loads(str(row["after"])) for row in taken.rows]
    wrong = {}
    for name, type_ in columns.items():
        _, question, as_json = TYPES[type_]
        answers = [row[0] for row in bench.rows(f"SELECT {question.format(name)} FROM v")]
        expected = [None if answer is None else as_json(answer) for answer in answers]
        found = [row[name] for row in decoded]
        if found != expected:
            wrong[type_] = (found, expected)
    assert not wrong
    assert list(decoded[0]) == list(columns)


def test_wide_tables(bench: MysqlBench) -> None:
    """Tables of 1 to 500 columns keep each value, each null and each name in its place."""
    start = reader(bench).ensure_start()
    widths = (1, 7, 8, 9, 63, 64, 65, 250, 251, 252, 500)
    for width in widths:
        names = [f"c{i}" for i in range(width)]
        bench.run(f"CREATE TABLE w{width} ({', '.join(f'{name} int' for name in names)})")
        values = ["NULL" if i % 3 == 1 else str(i) for i in range(width)]
        bench.execute(
            f"INSERT INTO w{width} VALUES ({', '.join(values)})",
            f"UPDATE w{width} SET c{width - 1} = -1",
        )

    taken = take(bench, start, whole(2 * len(widths)), source=reader(bench))

    for width, row, update in zip(widths, taken.rows[::2], taken.rows[1::2], strict=True):
        image = {f"c{i}": None if i % 3 == 1 else i for i in range(width)}
        assert json.loads(str(row["after"])) == image
        assert row["key"] is None
        assert json.loads(str(update["before"])) == image
        assert json.loads(str(update["after"])) == image | {f"c{width - 1}": -1}


def test_minimal_images(bench: MysqlBench) -> None:
    """With binlog_row_image=MINIMAL, an insert has defaults that are not in the log; elsewhere columns are absent."""
    start = reader(bench).ensure_start()
    bench.run(
        "CREATE TABLE m (a int, id int, b int DEFAULT 7, c int, PRIMARY KEY (id))",
        "SET SESSION binlog_row_image = MINIMAL",
    )
    bench.execute(
        "INSERT INTO m (id, a) VALUES (1, NULL)",
        "UPDATE m SET c = 2",
        "UPDATE m SET id = 3",
        "DELETE FROM m",
    )

    taken = take(bench, start, whole(4), source=reader(bench))

    changes = [
        [row["op"], *(row[n] and json.loads(str(row[n])) for n in ("before", "after", "key"))]
        for row in taken.rows
    ]
    assert changes == [
        ["c", None, {"a": None, "id": 1, "b": 7, "c": None}, {"id": 1}],
        ["u", {"id": 1}, {"c": 2}, {"id": 1}],
        ["u", {"id": 1}, {"id": 3}, {"id": 3}],
        ["d", {"id": 3}, None, {"id": 3}],
    ]


def test_images_without_blobs(bench: MysqlBench) -> None:
    """With binlog_row_image=NOBLOB, texts that an update did not touch are absent, not null."""
    start = reader(bench).ensure_start()
    bench.run(
        "CREATE TABLE m (id int PRIMARY KEY, n int, t text)",
        "SET SESSION binlog_row_image = NOBLOB",
    )
    bench.execute(
        "INSERT INTO m VALUES (1, 2, 'x')",
        "UPDATE m SET n = 3",
        "UPDATE m SET t = NULL",
        "DELETE FROM m",
    )

    taken = take(bench, start, whole(4), source=reader(bench))

    changes = [
        [row["op"], *(row[n] and json.loads(str(row[n])) for n in ("before", "after", "key"))]
        for row in taken.rows
    ]
    assert changes == [
        ["c", None, {"id": 1, "n": 2, "t": "x"}, {"id": 1}],
        ["u", {"id": 1, "n": 2}, {"id": 1, "n": 3}, {"id": 1}],
        ["u", {"id": 1, "n": 3}, {"id": 1, "n": 3, "t": None}, {"id": 1}],
        ["d", {"id": 1, "n": 3}, None, {"id": 1}],
    ]


def test_minimal_images_without_a_key(bench: MysqlBench) -> None:
    """A table without a key has its whole old row in the log, whatever binlog_row_image says."""
    start = reader(bench).ensure_start()
    bench.run("CREATE TABLE m (a int, b text)", "SET SESSION binlog_row_image = MINIMAL")
    bench.execute("INSERT INTO m VALUES (1, 'x')", "UPDATE m SET a = 2", "DELETE FROM m")

    taken = take(bench, start, whole(3), source=reader(bench))

    images = [(row["before"], row["after"], row["key"]) for row in taken.rows]
    assert images == [
        (None, '{"a":1,"b":"x"}', None),
        ('{"a":1,"b":"x"}', '{"a":2}', None),
        ('{"a":2,"b":"x"}', None, None),
    ]


def test_generated_columns(bench: MysqlBench) -> None:
    """Generated columns are in the images, stored or not, and may be part of the key."""
    start = reader(bench).ensure_start()
    bench.run(
        "CREATE TABLE g (a int, s int AS (a + 1) STORED, v varchar(10) AS (concat('v', a)) VIRTUAL,"
        " PRIMARY KEY (s))"
    )
    bench.execute("INSERT INTO g (a) VALUES (1)", "UPDATE g SET a = 2")

    taken = take(bench, start, whole(2), source=reader(bench))

    assert [(row["after"], row["key"]) for row in taken.rows] == [
        ('{"a":1,"s":2,"v":"v1"}', '{"s":2}'),
        ('{"a":2,"s":3,"v":"v2"}', '{"s":3}'),
    ]


@pytest.mark.soak("versions")
@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
def test_what_newer_servers_have(
    mysql_version: Callable[[str], MysqlServer], metadata: str
) -> None:
    """VECTOR, invisible columns and the key that the server makes by itself, of MySQL 9."""
    with MysqlBench(mysql_version("9.7").create_database()) as bench:
        bench.run(
            "SET SESSION sql_generate_invisible_primary_key = ON",
            f"SET GLOBAL binlog_row_metadata = {metadata}",
            "CREATE TABLE v (v vector(3), t text, i int INVISIBLE DEFAULT 5)",
        )
        start = reader(bench).ensure_start()
        bench.execute(
            "INSERT INTO v (v, t) VALUES (string_to_vector('[1,2.5,-0.1]'), 'x')",
            "UPDATE v SET t = 'y', v = NULL",
        )
        taken = take(bench, start, whole(2), source=reader(bench))
        bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")

    assert [(row["after"], row["key"]) for row in taken.rows] == [
        ('{"my_row_id":1,"v":[1.0,2.5,-0.1],"t":"x","i":5}', '{"my_row_id":1}'),
        ('{"my_row_id":1,"v":null,"t":"y","i":5}', '{"my_row_id":1}'),
    ]


def test_a_value_larger_than_a_packet(bench: MysqlBench) -> None:
    """An event of several packets, with a value of 40 MB, is decoded whole."""
    start = reader(bench).ensure_start()
    bench.execute(
        "INSERT INTO orders VALUES (1, 'before')",
        "INSERT INTO orders VALUES (2, repeat('0123456789', 4000000))",
        "INSERT INTO orders VALUES (3, 'after')",
    )

    taken = take(bench, start, whole(3), source=reader(bench))

    values = [json.loads(str(row["after"]))["v"] for row in taken.rows]
    assert values == ["before", "0123456789" * 4_000_000, "after"]
    assert [row["tx_end"] for row in taken.rows] == [False, False, True]


@pytest.mark.soak("large")
@pytest.mark.parametrize("kind", ["longtext", "longblob"])
def test_a_value_of_a_gigabyte(start_mysql: Callable[..., MysqlServer], kind: str) -> None:
    """The largest values that MySQL has are decoded, in about four times their size of memory."""
    size = 1_000_000_000
    server = start_mysql({"max_allowed_packet": str(1 << 30)})
    with MysqlBench(server.create_database()) as bench:
        start = reader(bench).ensure_start()
        bench.run(f"CREATE TABLE big (id int PRIMARY KEY, v {kind})")
        bench.execute(f"INSERT INTO big VALUES (1, repeat('0123456789', {size // 10}))")

        taken = take(bench, start, whole(1), source=reader(bench), seconds=240)

    text = str(taken.rows[0]["after"])
    digits = "0123456789" if kind == "longtext" else base64.b64encode(b"0123456789" * 3).decode()
    assert text.startswith('{"id":1,"v":')
    assert text.count(digits) == size // (10 if kind == "longtext" else 30)
