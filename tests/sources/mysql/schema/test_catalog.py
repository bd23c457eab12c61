"""The catalog of a real server, against what it is told and what the log needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.schema.catalog import MysqlCatalog
from deltaforge_dagster.sources.mysql.schema.columns import labels
from deltaforge_dagster.tables import ColumnDetails
from deltaforge_dagster.testing.sources import (
    Versions,
    insert,
    take,
    whole,
)
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

TYPES = ("int", "longtext")


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other`."""
    with MysqlBench(mysql_dsn) as made:
        yield made


class Counted(MysqlSourceServer):
    """A server that counts the connections made to it."""

    asked = 0

    def query(self, seconds: float):  # type: ignore[no-untyped-def] # noqa: ANN201
        """Count, and connect."""
        Counted.asked += 1
        return super().query(seconds)


@pytest.fixture
def catalog(bench: MysqlBench) -> MysqlCatalog:
    """The catalog of the bench's database."""
    Counted.asked = 0
    server = Counted.from_dsn(bench.dsn, "deltaforge/t")
    return MysqlCatalog(server, Versions(), bench.head(), bench.server_id + 1)


def test_all_tables_are_read_at_once(bench: MysqlBench, catalog: MysqlCatalog) -> None:
    """One connection answers for every table, one more how names compare; then statements do."""
    here = bench.head()
    for table in ("orders", "items", "other"):
        found = catalog.table(bench.database, table, TYPES, here)
        assert isinstance(found, CatalogTable)
        assert [column.name for column in found.columns] == ["id", "v"]
        assert found.primary_key == ("id",)
    assert Counted.asked == 1

    catalog.statement(bench.database, "GRANT SELECT ON *.* TO u", here)
    catalog.statement(bench.database, "ALTER TABLE items ADD INDEX (id)", here)
    catalog.statement(bench.database, "ALTER TABLE items ADD COLUMN x int FIRST", here)
    found = catalog.table(bench.database, "items", ("int", *TYPES), here)
    assert isinstance(found, CatalogTable)
    assert [column.name for column in found.columns] == ["x", "id", "v"]
    catalog.table(bench.database, "orders", TYPES, here)
    assert Counted.asked == 2


def test_a_table_made_later_is_found(bench: MysqlBench, catalog: MysqlCatalog) -> None:
    """What was not there at the first question is asked for by itself."""
    catalog.table(bench.database, "orders", TYPES, bench.head())
    bench.run("CREATE TABLE fresh (a bigint unsigned, b int, PRIMARY KEY (b, a))")

    found = catalog.table(bench.database, "fresh", ("bigint unsigned", "int"), bench.head())

    assert isinstance(found, CatalogTable)
    assert [column.name for column in found.columns] == ["a", "b"]
    assert found.primary_key == ("b", "a")


def test_a_change_after_the_row_is_found_whatever_was_looked_at_before(
    bench: MysqlBench, catalog: MysqlCatalog
) -> None:
    """The log is looked through up to where the catalog was read, for every table."""
    here = bench.head()
    bench.execute(insert("other", 1))
    catalog.table(bench.database, "orders", TYPES, here)
    between = bench.head()
    bench.run("RENAME TABLE items TO items_old", "CREATE TABLE items (a int, b longtext)")

    # Read before the change: right for rows before it.
    known = catalog.table(bench.database, "items", TYPES, between)
    assert isinstance(known, CatalogTable)
    assert known.primary_key == ("id",)
    fresh = MysqlCatalog(
        MysqlSourceServer.from_dsn(bench.dsn, "t"), Versions(), between, bench.server_id + 1
    )
    found = fresh.table(bench.database, "items", TYPES, between)
    assert isinstance(found, Unknown)
    assert "changed it since" in found.reason


@pytest.mark.parametrize(
    "types",
    [("int",), ("int", "longtext", "int"), ("bigint", "longtext"), ("int unsigned", "longtext")],
)
def test_other_types_are_refused(
    bench: MysqlBench, catalog: MysqlCatalog, types: tuple[str, ...]
) -> None:
    """Columns that are not those of the log belong to another version of the table."""
    found = catalog.table(bench.database, "orders", types, bench.head())
    assert isinstance(found, Unknown)
    assert "are not those of the catalog" in found.reason


def test_labels_are_those_of_the_table(bench: MysqlBench) -> None:
    """Quotes, commas, backslashes and line ends inside labels."""
    wanted = ("a", "b'c", "d,e", "f\\g", "h\ni", "", "(", "ß€", 'j"k')
    written = ", ".join(
        "'" + label.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n") + "'"
        for label in wanted
    )
    bench.run(f"CREATE TABLE odd (e enum({written}), s set('x','y''z'), v varchar(10))")
    rows = bench.rows(
        "SELECT COLUMN_TYPE FROM information_schema.COLUMNS WHERE TABLE_NAME = 'odd'"
        f" AND TABLE_SCHEMA = '{bench.database}' ORDER BY ORDINAL_POSITION"
    )

    assert [labels(row[0]) for row in rows] == [wanted, ("x", "y'z"), ()]


def test_every_type_agrees_with_the_log(bench: MysqlBench) -> None:
    """The catalog's words for each type are compared with the log's, and no type is in the way."""
    columns = [
        "tinyint", "tinyint(1)", "smallint unsigned", "mediumint(5) zerofill", "int", "bigint unsigned",
        "decimal(10,2)", "decimal(5) unsigned", "float", "double", "float(7,3)", "double unsigned",
        "bit(5)", "year", "date", "time", "time(3)", "datetime", "datetime(6)", "timestamp NULL",
        "timestamp(2) NULL", "char(3)", "varchar(20)", "varchar(300)", "binary(4)", "varbinary(9)",
        "tinytext", "text", "mediumtext", "longtext", "tinyblob", "blob", "mediumblob", "longblob",
        "enum('a','b')", "set('a','b')", "json", "point", "geometry", "char(9) CHARACTER SET latin1",
        "char(70) CHARACTER SET utf8mb4", "text CHARACTER SET latin1", "varchar(9) CHARACTER SET binary",
    ]  # fmt: skip
    listed = ", ".join(f"c{number} {type_}" for number, type_ in enumerate(columns))
    bench.run(f"CREATE TABLE every (id int PRIMARY KEY, {listed})")
    reader = bench.source(tables=(f"{bench.database}.every",))
    start = reader.ensure_start()
    bench.run("INSERT INTO every (id) VALUES (1)")

    taken = take(bench, start, whole(1), source=reader)
    assert str(taken.rows[0]["after"]).startswith('{"id":1,"c0":null,')


def details_of_many(bench: MysqlBench) -> Mapping[str, ColumnDetails]:
    """Make a table with a column of each kind; return what the catalog says of them, once the rest is proved."""
    bench.run(
        "CREATE TABLE many (id int AUTO_INCREMENT PRIMARY KEY,"
        " at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,"
        " word varchar(9) NOT NULL DEFAULT 'NULL', blank varchar(9) DEFAULT '', n int,"
        " g int AS (n + 1) STORED) ENGINE InnoDB CHARACTER SET latin1"
    )
    source = bench.source(tables=(f"{bench.database}.many",))

    details = source.details(f"{bench.database}.many")

    assert (details.engine, details.charset, details.collation) == (
        "InnoDB", "latin1", "latin1_swedish_ci",
    )  # fmt: skip
    with pytest.raises(SourceMisconfigured, match="there is no table"):
        source.details(f"{bench.database}.nothing")
    return details.columns


def test_details_come_from_the_catalog(bench: MysqlBench) -> None:
    """What the log does not say: defaults as the server writes them, how values are made, and the table's text."""
    assert details_of_many(bench) == {
        "id": ColumnDetails(False, None, "auto_increment"),
        "at": ColumnDetails(
            False, "CURRENT_TIMESTAMP", "DEFAULT_GENERATED on update CURRENT_TIMESTAMP"
        ),
        "word": ColumnDetails(False, "NULL", ""),
        "blank": ColumnDetails(True, "", ""),
        "n": ColumnDetails(True, None, ""),
        "g": ColumnDetails(True, None, "STORED GENERATED"),
    }
