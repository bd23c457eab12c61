"""Another server in the place of the one before: where reading continues, and how its tables differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deltaforge_dagster.errors import PositionLost, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.pipeline.failover import differences
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.testing.sources import LIMITS, Versions
from deltaforge_lab.servers.mysql import MysqlServer
from tests.fix_mysql import MYSQL_VERSIONS, StartMysql
from tests.sources.mysql.bench import MysqlBench
from tests.sources.mysql.test_source import as_user

pytestmark = pytest.mark.mysql

TYPES = (
    "tinyint(1)", "smallint unsigned zerofill", "mediumint", "int(5) unsigned", "bigint", "float(7,3)",
    "double unsigned", "decimal(10,3)", "bit(13)", "date", "time(3)", "datetime", "timestamp(6) NULL",
    "year", "char(7)", "varchar(300) CHARACTER SET utf8mb4", "varchar(9) CHARACTER SET latin1",
    "binary(3)", "varbinary(300)", "tinytext", "text", "mediumblob", "longtext", "json",
    "enum('a','b''c','d,e') CHARACTER SET latin1", "set('x','y')", "geometry", "point",
)  # fmt: skip
OF_MARIADB = ("uuid", "inet4", "inet6")


@pytest.mark.parametrize("version", [*MYSQL_VERSIONS, "mariadb"])
def test_a_table_is_as_its_rows_are_registered(
    mysql_version: Callable[[str], MysqlServer], version: str
) -> None:
    """Columns, types and key from the catalog are those from the log; an altered column differs."""
    with MysqlBench(mysql_version(version).create_database()) as bench:
        types = TYPES + OF_MARIADB * bench.is_mariadb
        columns = ", ".join(f"c{number} {type_}" for number, type_ in enumerate(types))
        bench.run(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
        reader = bench.source(tables=(f"{bench.database}.*",))
        start, notes = reader.ensure_start(), Versions()
        notes.define(reader.definitions(start), start)
        bench.execute("INSERT INTO t (id) VALUES (1)")
        next(batch for batch in reader.read(start, LIMITS, notes) if batch.rows)
        reader.close()
        (((registered, _)),) = notes.registered

        name = f"{bench.database}.t"
        now = bench.source().schema(name)
        assert {column.name: column.data_type for column in now.columns} == {
            column.name: column.data_type for column in registered.columns
        }
        assert differences(registered, now) == []

        bench.run("ALTER TABLE t MODIFY c4 int unsigned, MODIFY c24 enum('a'), DROP COLUMN c6")
        altered = bench.source().schema(name)
        assert differences(registered, altered) == [
            "column_dropped c6",
            "column_type_changed c4",
            "column_type_changed c24",
        ]
        with pytest.raises(SourceMisconfigured, match="there is no table"):
            bench.source().schema(f"{bench.database}.nothing")


@contextmanager
def read_only(bench: MysqlBench) -> Iterator[None]:
    """Let the server be one that is not the primary, or not yet."""
    bench.run("SET GLOBAL read_only = ON")
    try:
        yield
    finally:
        bench.run("SET GLOBAL read_only = OFF")


@pytest.mark.parametrize("version", ["8.0", "mariadb"])
def test_a_server_that_is_no_primary_proves_no_loss(
    mysql_version: Callable[[str], MysqlServer], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a failover a replica may answer that has not caught up, or has no place for a file's offset: both pass."""
    monkeypatch.setattr(server_log, "_EXECUTED_SECONDS", 0.2)
    more = "9-9-9" if version == "mariadb" else "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5"
    with MysqlBench(mysql_version(version).create_database()) as bench:
        dsn = as_user(bench, "SELECT", "REPLICATION SLAVE", "REPLICATION CLIENT")
        source = bench.source(dsn=dsn)
        ahead = BinlogPosition("binlog.000001", 4, more)
        elsewhere = BinlogPosition("other.000001", 4)
        with read_only(bench):
            with pytest.raises(SourceUnavailable, match="may not have caught up yet"):
                source.has_changes(ahead)
            for position in (ahead, elsewhere):
                with pytest.raises(SourceUnavailable):
                    source.relocate(position, "another")
            with pytest.raises(SourceUnavailable, match="a failover is not over yet"):
                source.relocate(elsewhere, "another")
        for position in (ahead, elsewhere):
            with pytest.raises(PositionLost):
                source.relocate(position, "another")


def test_only_a_run_says_that_a_replica_has_lost_the_position(mysql_server: MysqlServer) -> None:
    """A tick does not know whether it has reached the server that was read; a run of that server does."""
    with MysqlBench(mysql_server.create_database()) as bench:
        source = bench.source()
        gone = BinlogPosition("other.000001", 4)
        with read_only(bench):
            assert source.has_changes(gone), "so that a run looks"
            assert source.maintain(gone) == []
            assert source.snapshots().guard(gone) == [], "a snapshot is not cancelled"
            source.identity()
            with pytest.raises(PositionLost, match=r"other\.000001 was purged"):
                next(source.read(gone, LIMITS, Versions()))
        assert source.snapshots().guard(gone)[0].level == "error"
        for ask in (source.has_changes, source.maintain):
            with pytest.raises(PositionLost):
                ask(gone)


def test_another_server_between_two_connections(start_mysql: StartMysql) -> None:
    """Without GTIDs a file of the same name may be there: only the server that was asked is read."""
    server = start_mysql({"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"})
    with MysqlBench(server.create_database()) as bench:
        source = bench.source()
        start = source.ensure_start()
        bench.execute("INSERT INTO orders VALUES (1, 'x')")
        before = source.identity()
        server.stop()
        (server.data_directory / "auto.cnf").unlink()
        server.restart()
        bench.reconnect()
        with pytest.raises(SourceUnavailable, match="another server has taken its place"):
            next(source.read(start, LIMITS, Versions()))
        with pytest.raises(SourceUnavailable, match="another server has taken its place"):
            source._open_at(start, 7)

        assert source.identity() != before
        with pytest.raises(PositionLost, match="the log has no GTIDs"):
            source.relocate(start, before)
