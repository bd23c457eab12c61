"""Inserts that lack columns (`binlog_row_image`), on real servers: they have the values that the rows have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ParkedEvent
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.testing.sources import Taken, Versions, take, whole
from tests.fix_mysql import MysqlVersion
from tests.sources.mysql.bench import PIPELINE, MysqlBench

pytestmark = pytest.mark.mysql

COLUMNS = (
    "id int NOT NULL AUTO_INCREMENT PRIMARY KEY",
    "none_ int",
    "whole_ int DEFAULT -7",
    "big bigint unsigned NOT NULL DEFAULT 18446744073709551615",
    "zero_ int NOT NULL",
    "yes_ bool DEFAULT true",
    "price decimal(8,3) DEFAULT 1.5",
    "price0 decimal(8,3) NOT NULL",
    "half float DEFAULT 1.1",
    "third double NOT NULL DEFAULT 1e-7",
    "double0 double NOT NULL",
    "bits bit(3) DEFAULT b'101'",
    "bits0 bit(9) NOT NULL",
    "word varchar(20) NOT NULL DEFAULT 'it''s \"é\"'",
    "word0 varchar(20) NOT NULL",
    r"slash varchar(20) DEFAULT 'a\\b\n\r\'\"%'",
    "padded char(5) DEFAULT 'a '",
    "latin varchar(5) CHARACTER SET latin1 DEFAULT 'é'",
    "pick enum('p','q') DEFAULT 'q'",
    "pick0 enum('p','q') NOT NULL",
    "picks set('a','b','c') DEFAULT 'c,a'",
    "picks0 set('a','b') NOT NULL",
    "doc text",
    "doc0 text NOT NULL",
    "day date DEFAULT '2020-1-2'",
    "day0 date NOT NULL",
    "moment datetime(3) DEFAULT '2020-01-02 03:04:05.678'",
    "moment0 datetime NOT NULL",
    "span time(2) DEFAULT '-1:2:3.4'",
    "span0 time NOT NULL",
    "stamp0 timestamp NULL DEFAULT NULL",
    "now_ timestamp NULL DEFAULT CURRENT_TIMESTAMP",
    "sum_ int AS (none_ + 1) STORED",
    "year_ year DEFAULT 20",
    "year0 year NOT NULL",
)

SERVERS = [
    ("5.7", None),
    ("8.0", "MINIMAL"),
    ("8.0", "FULL"),
    ("mariadb", "MINIMAL"),
    ("mariadb", "FULL"),
    pytest.param(("9.7", "FULL"), marks=pytest.mark.soak("versions")),
    pytest.param(("mariadb 10.5", "FULL"), marks=pytest.mark.soak("versions")),
]
"""Versions, and how much metadata they log."""


@pytest.fixture(params=SERVERS, ids=str)
def bench(mysql_version: MysqlVersion, request: pytest.FixtureRequest) -> Iterator[MysqlBench]:
    """A database on each server, whose SQL mode is not strict."""
    version, metadata = request.param
    with MysqlBench(mysql_version(version).create_database()) as made:
        made.run("SET SESSION sql_mode = ''")
        if metadata is None:
            yield made
            return
        ((_, before),) = made.rows("SHOW GLOBAL VARIABLES LIKE 'binlog_row_metadata'")
        made.run(f"SET GLOBAL binlog_row_metadata = {metadata}")
        made.reconnect()
        made.run("SET SESSION sql_mode = ''")
        try:
            yield made
        finally:
            made.run(f"SET GLOBAL binlog_row_metadata = {before}")


def reader(bench: MysqlBench) -> MysqlSource:
    """Return a source of a pipeline whose sinks keep rows, of all tables."""
    config = bench.config(tables=(f"{bench.database}.*",))
    source = MysqlSource(config, PIPELINE, whole_inserts=True)
    bench._sources.append(source)
    return source


def held_of(taken: Taken) -> list[ParkedEvent]:
    """Return the events that were held."""
    return [event for batch in taken.batches for event in batch.parked]


def images(taken: Taken, image: str = "after") -> list[Any]:
    """Return the images of all rows."""
    return [row[image] and json.loads(str(row[image])) for row in taken.rows]


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_constants(bench: MysqlBench, image: str) -> None:
    """An insert with nothing and one with everything are the same row, byte for byte."""
    start = reader(bench).ensure_start()
    bench.run(f"CREATE TABLE t ({', '.join(COLUMNS)})")
    for of_session in (image, "FULL"):
        bench.run(f"SET SESSION binlog_row_image = {of_session}")
        bench.execute("SET timestamp = 1700000000", "INSERT INTO t () VALUES ()")

    taken = take(bench, start, whole(2), source=reader(bench), seconds=10)

    lacking, full = (str(row["after"]).replace('"id":2', '"id":1') for row in taken.rows)
    assert lacking == full
    assert [row["key"] for row in taken.rows] == ['{"id":1}', '{"id":2}']


def test_the_default_of_its_time(bench: MysqlBench) -> None:
    """Statements change defaults between the rows; read as it happens, each row has its own."""
    source, versions = reader(bench), Versions()
    position: Position = source.ensure_start()
    bench.run(
        "CREATE TABLE t (id int PRIMARY KEY, a int DEFAULT 1)",
        "SET SESSION binlog_row_image = MINIMAL",
    )
    seen = []
    for number, change in enumerate(
        (
            "ALTER TABLE t COMMENT 'x'",
            "ALTER TABLE t ALTER COLUMN a SET DEFAULT 2",
            "ALTER TABLE t ALTER a SET DEFAULT 3",
            "ALTER TABLE t MODIFY a int DEFAULT 4",
            "ALTER TABLE t CHANGE a b int NOT NULL DEFAULT 5",
            "ALTER TABLE t ADD c varchar(9) DEFAULT 'six'",
            "ALTER TABLE t MODIFY c varchar(9)",
        )
    ):
        bench.run(change)
        bench.execute(f"INSERT INTO t (id) VALUES ({number})")
        taken = take(bench, position, whole(1), source=reader(bench), versions=versions, seconds=10)
        seen += images(taken)
        assert taken.batches[-1].end is not None
        position = taken.batches[-1].end

    assert seen == [
        {"id": 0, "a": 1},
        {"id": 1, "a": 2},
        {"id": 2, "a": 3},
        {"id": 3, "a": 4},
        {"id": 4, "b": 5},
        {"id": 5, "b": 5, "c": "six"},
        {"id": 6, "b": 5, "c": None},
    ]


def test_read_late(bench: MysqlBench) -> None:
    """After further changes of the table: the statements say which constants its rows had."""
    start = reader(bench).ensure_start()
    bench.run(
        "CREATE TABLE t (id int, a int DEFAULT 1, b bigint NOT NULL DEFAULT '17', PRIMARY KEY (id))",
        "SET SESSION binlog_row_image = MINIMAL",
        "INSERT INTO t (id) VALUES (1)",
        "ALTER TABLE t ADD c int NOT NULL",
        "INSERT INTO t (id) VALUES (2)",
        "ALTER TABLE t MODIFY a int DEFAULT 9",
        "INSERT INTO t (id) VALUES (3)",
        "ALTER TABLE t DROP COLUMN a",
    )

    taken = take(bench, start, whole(3), source=reader(bench), seconds=10)

    assert images(taken) == [
        {"id": 1, "a": 1, "b": 17},
        {"id": 2, "a": 1, "b": 17, "c": 0},
        {"id": 3, "a": 9, "b": 17, "c": 0},
    ]


def test_a_key_with_a_default(bench: MysqlBench) -> None:
    """MySQL leaves it out as well; the key is complete. Updates lack what they did before."""
    start = reader(bench).ensure_start()
    bench.run(
        "CREATE TABLE t (id int NOT NULL DEFAULT 3, a int DEFAULT 4, b int, PRIMARY KEY (id))",
        "CREATE TRIGGER r BEFORE INSERT ON t FOR EACH ROW SET NEW.b = NEW.id * 2",
        "SET SESSION binlog_row_image = MINIMAL",
        "INSERT INTO t (a) VALUES (1)",
        "UPDATE t SET b = 5",
    )

    taken = take(bench, start, whole(2), source=reader(bench), seconds=10)

    assert images(taken) == [{"id": 3, "a": 1, "b": 6}, {"b": 5}]
    assert images(taken, "key") == [{"id": 3}, {"id": 3}]


@pytest.mark.parametrize(
    "column",
    ["c timestamp NULL DEFAULT '2020-01-02 03:04:05'", "c binary(3) DEFAULT 'ab'"],
)
def test_what_is_not_certain(bench: MysqlBench, column: str) -> None:
    """Its table is held from there on, and says why; a pipeline without tables gets the insert without the column."""
    start = reader(bench).ensure_start()
    bench.run(
        f"CREATE TABLE t (id int PRIMARY KEY, {column})",
        "INSERT INTO t (id) VALUES (1)",
        "SET SESSION binlog_row_image = MINIMAL",
        "INSERT INTO t (id) VALUES (2)",
        "INSERT INTO orders (id) VALUES (7)",
        "INSERT INTO t VALUES (3, NULL)",
    )

    held = take(
        bench, start, lambda taken: len(held_of(taken)) == 2, source=reader(bench), seconds=10
    )
    tables = (f"{bench.database}.t",)
    sent = take(bench, start, whole(3), source=bench.source(tables=tables))

    assert [(row["table"], json.loads(str(row["key"]))["id"]) for row in held.rows] == [
        ("t", 1),
        ("orders", 7),
    ]
    assert "an insert lacks c (binlog_row_image)" in held_of(held)[0].reason
    assert "deltaforge resync" in held_of(held)[0].reason
    assert images(sent)[1] == {"id": 2}
