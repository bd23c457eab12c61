"""Beginning where another reader of the log stands, which may be inside a transaction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltaforge_dagster.errors import PositionLost
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.testing.sources import (
    insert,
    inserts,
    take,
    whole,
)
from tests.fix_mysql import MysqlVersion
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql


@pytest.fixture(params=["8.0", "mariadb"])
def bench(request: pytest.FixtureRequest) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other`."""
    if request.param == "8.0":
        dsn = request.getfixturevalue("mysql_dsn")
    else:
        version: MysqlVersion = request.getfixturevalue("mysql_version")
        dsn = version(request.param).create_database()
    with MysqlBench(dsn) as made:
        yield made


def test_inside_a_transaction(bench: MysqlBench) -> None:
    """The whole transaction is read again: its GTID must not count before it has ended."""
    bench.execute(insert("orders", 1))
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 2), insert("items", 3), insert("orders", 4))
    end = bench.source().ensure_start()
    bench.execute(insert("items", 5))

    for pos in (start.pos + 1, (start.pos + end.pos) // 2, end.pos - 1):
        found = bench.source().ensure_start(BinlogPosition(start.file, pos))
        assert found == start
    assert take(bench, found, whole(2)).changes == [
        *inserts("orders", 2), *inserts("items", 3), *inserts("orders", 4), *inserts("items", 5),
    ]  # fmt: skip


def test_between_transactions(bench: MysqlBench) -> None:
    """The end of a transaction is where it goes on, with every GTID up to there."""
    bench.execute(insert("orders", 1))
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 2))
    end = bench.source().ensure_start()
    bench.execute(insert("items", 3))

    for at in (start, end):
        assert bench.source().ensure_start(BinlogPosition(at.file, at.pos)) == at
        assert bench.source().ensure_start(at) == at


def test_what_the_log_has_no_more(bench: MysqlBench) -> None:
    """A file that was purged, or never was, stops with the reason."""
    start = bench.source().ensure_start()
    with pytest.raises(PositionLost, match="ends before position"):
        bench.source().ensure_start(BinlogPosition(start.file, start.pos + 10_000_000))
    with pytest.raises(PositionLost, match="was purged"):
        bench.source().ensure_start(BinlogPosition("gone-bin.000001", 4))
