"""Character sets of texts whose definition names none, for logs that do not name them either."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable
from deltaforge_dagster.sources.mysql.schema.catalog import read_tables
from deltaforge_dagster.sources.mysql.schema.columns import is_text
from deltaforge_dagster.sources.mysql.schema.definitions import apply, parse_definition, text_of
from deltaforge_dagster.testing.sources import Taken, Versions, take
from deltaforge_lab.servers.mysql_programs import Version
from tests.fix_mysql import EVERY_SERVER, MysqlVersion
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

UNNAMED = "a char(3), b varchar(9) NOT NULL, c text"
STATEMENTS: dict[str, tuple[list[str], str]] = {
    "unnamed": ([f"CREATE TABLE unnamed ({UNNAMED})"], "- - -"),
    "option": ([f"CREATE TABLE `option` ({UNNAMED}) ENGINE InnoDB CHARSET = latin1"], "latin1 latin1 latin1"),
    "collation": ([f"CREATE TABLE collation ({UNNAMED}) COLLATE latin1_bin"], "latin1 latin1 latin1"),
    "commented": ([f"CREATE TABLE commented ({UNNAMED}) COMMENT 'CHARSET latin1'"], "- - -"),
    "own": (
        [("CREATE TABLE own (a nchar(3), b national varchar(3), c char(3) UNICODE, d char(3) ASCII,"
         " e char(3) BINARY, f char(3) COLLATE utf8mb4_bin, g text(99), h long varchar) CHARSET latin1")],
        "- - - - latin1 utf8mb4 - -",
    ),
    "added": (
        [f"CREATE TABLE added ({UNNAMED}) CHARSET latin1",
         "ALTER TABLE added ADD d char(9), CHANGE b e char(5), ADD f char(5) CHARSET utf8mb4 FIRST"],
        "utf8mb4 latin1 latin1 latin1 latin1",
    ),
    "like": (
        [f"CREATE TABLE added_like ({UNNAMED}) CHARSET latin1", "CREATE TABLE `like` LIKE added_like",
         "ALTER TABLE `like` ADD d char(3)"],
        "latin1 latin1 latin1 latin1",
    ),
    "changed": (
        [f"CREATE TABLE changed ({UNNAMED}) CHARSET latin1",
         "ALTER TABLE changed ADD d char(9), DEFAULT CHARACTER SET utf8mb4", "ALTER TABLE changed ADD e char(9)"],
        "latin1 latin1 latin1 - -",
    ),
    "converted": (
        [f"CREATE TABLE converted ({UNNAMED}) CHARSET latin1", "ALTER TABLE converted CONVERT TO CHARACTER SET utf8mb4",
         "ALTER TABLE converted ADD d char(9)"],
        "- - - -",
    ),
    "added_converted": (
        [f"CREATE TABLE added_converted ({UNNAMED}) CHARSET latin1",
         ("ALTER TABLE added_converted ADD d char(9), ADD e char(3) CHARSET latin1, CONVERT TO CHARACTER SET utf8mb4,"
         " MODIFY a char(4), ADD f char(3)")],
        "- - - - - -",
    ),
    "byte": (["CREATE TABLE `byte` (a char(3) BYTE, b char(3)) CHARSET latin1"], "- latin1"),
    "bytes": (["CREATE TABLE bytes (a int, b char(3)) CHARSET binary"], "-"),
}  # fmt: skip
"""Statements that make a table, and for each text column its character set, "-" where it is not known."""


@pytest.fixture(params=EVERY_SERVER)
def bench(request: pytest.FixtureRequest, mysql_version: MysqlVersion) -> Iterator[MysqlBench]:
    """A database on each server, with logs as they are by default."""
    version: Version = request.param
    with MysqlBench(mysql_version(version).create_database()) as made:
        yield made


def charsets(table: CatalogTable | None) -> list[str]:
    """Return the character set of each text column, "-" where it is not known."""
    assert table is not None
    return [column.charset or "-" for column in table.columns if is_text(column.type)]


def named(table: CatalogTable | None) -> dict[str, str]:
    """Return the character set of each column, by its name; "" where it is not known, or there is none."""
    assert table is not None
    return {column.name: column.charset for column in table.columns}


def test_what_is_known_is_what_the_server_has(bench: MysqlBench) -> None:
    """A column has the character set of its table, unless it, or the statement, says otherwise."""
    tables: dict[tuple[str, str], CatalogTable | None] = {}
    for statements, _ in STATEMENTS.values():
        bench.run(*statements)
        for statement in statements:
            apply(tables, statement, bench.database)

    server = MysqlSourceServer.from_dsn(bench.dsn, "deltaforge/t")
    there = {name: table.definition() for name, table in read_tables(server, 30.0).items()}
    for table_name, (_, expected) in STATEMENTS.items():
        name = bench.database, table_name
        assert charsets(tables[name]) == expected.split(), table_name
        known = {column: charset for column, charset in named(tables[name]).items() if charset}
        assert known.items() <= named(there[name]).items(), table_name
        stored = text_of(tables, name)
        assert stored is not None
        assert parse_definition(stored) == tables[name]
    assert there[bench.database, "changed"].charset == "utf8mb4"
    assert there[bench.database, "bytes"].charset == ""


def test_texts_of_an_altered_table_are_read_late(bench: MysqlBench) -> None:
    """Of a table that is altered twice between two runs, and then dropped, no text is held."""
    bench.run("CREATE TABLE people (id int PRIMARY KEY, a char(5)) CHARSET latin1")
    source = bench.source(tables=(f"{bench.database}.%",))
    start = source.ensure_start()
    notes = Versions()
    notes.define(source.definitions(start), start)
    bench.run(
        "ALTER TABLE people ADD b varchar(9), MODIFY a char(7)",
        "INSERT INTO people VALUES (1, 'Zoë', 'Åre')",
        "ALTER TABLE people DROP a",
        "INSERT INTO people VALUES (2, 'Malmö')",
        "DROP TABLE people",
        "INSERT INTO orders VALUES (9, 'last')",
    )

    def is_read(taken: Taken) -> bool:
        return bool(taken.rows) and taken.rows[-1]["table"] == "orders"

    taken = take(bench, start, is_read, source=source, versions=notes)
    assert [event.table for batch in taken.batches for event in batch.parked] == []
    assert [json.loads(str(row["after"])) for row in taken.rows[:-1]] == [
        {"id": 1, "a": "Zoë", "b": "Åre"},
        {"id": 2, "b": "Malmö"},
    ]
