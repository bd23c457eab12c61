"""A server that behaves like Amazon RDS for MySQL: what a look says there, and that its remedies are accepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pymysql
import pytest
from pydantic import SecretStr

from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.mysql import preflight
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import may_catch_up
from deltaforge_dagster.sources.mysql.connection.service import service_of
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.sources.mysql.source_type import MysqlSourceConfig
from deltaforge_lab.servers.mysql_service import MysqlServiceServer
from tests.fix_mysql import FAST
from tests.sinks.certificates import certificate
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

AS_DOCUMENTED = {
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "binlog_row_metadata": "FULL",
    "gtid_mode": "ON",
    "enforce_gtid_consistency": "ON",
}
"""The parameter group of docs/managed-databases.md."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MysqlServiceServer]:
    """An instance with the documented parameters, whose log is not kept; nobody may read it yet."""
    cert, key = certificate(tmp_path_factory.mktemp("tls"), for_old=True)
    with MysqlServiceServer.start(cert, key, FAST | AS_DOCUMENTED) as started:
        started.execute("CREATE DATABASE shop")
        yield started


def look(service: MysqlServiceServer) -> dict[str, Finding]:
    """Return what a look by the user `deltaforge` finds, by subject."""
    with MysqlBench(service.dsn(database="shop")) as bench:
        dsn = service.dsn("deltaforge", "geheim")
        found = bench.source(dsn=dsn, tables=("shop.*",)).preflight(None, None)
        bench.run("DROP TABLE orders", "DROP TABLE items", "DROP TABLE other")
    return {one.subject: one for one in found}


def test_remedies_are_those_of_the_service(service: MysqlServiceServer) -> None:
    """From a user without rights on, each statement that is printed is accepted, until nothing is left to say."""
    service.execute("CALL mysql.rds_set_configuration('binlog retention hours', NULL)")
    service.execute("CREATE USER deltaforge IDENTIFIED BY 'geheim'")
    service.execute("GRANT SELECT ON shop.* TO deltaforge")
    said: dict[tuple[str, ...], Finding] = {}
    while bad := [one for one in look(service).values() if one.bad]:
        said |= {one.commands: one for one in bad}
        assert len(said) < 9, said
        service.execute(*bad[0].commands)

    assert [(one.level, one.commands) for one in said.values()] == [
        ("error", ("GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'deltaforge'@'%'",)),
        ("warning", ("GRANT SELECT ON mysql.rds_configuration TO 'deltaforge'@'%'",)),
        ("error", ("CALL mysql.rds_set_configuration('binlog retention hours', 168)",)),
    ]
    found = look(service)
    assert found["connection"].text.endswith(", Amazon RDS for MySQL, version 8.0.15")
    assert found["retention"].text == "log files are removed after 168 hours"
    assert {one.level for one in found.values()} == {"ok"}


@pytest.mark.parametrize("statement", ["SET GLOBAL", "SET PERSIST"])
def test_the_service_refuses_statements_that_change_it(
    service: MysqlServiceServer, statement: str
) -> None:
    """Which is why no remedy may be one."""
    with pytest.raises(pymysql.OperationalError, match="Access denied"):
        service.execute(f"{statement} binlog_expire_logs_seconds = 604800")


def test_a_snapshot_of_a_log_that_is_not_kept(service: MysqlServiceServer) -> None:
    """It may be read as long as the stream keeps up: a warning."""
    service.execute("CALL mysql.rds_set_configuration('binlog retention hours', NULL)")
    config = MysqlSourceConfig(id="shop", dsn=SecretStr(service.dsn()), tables=("shop.*",))
    with contextlib.closing(MysqlSource(config, "shop")) as source:
        (found,) = source.snapshots().preflight(None, 1)
    assert (found.subject, found.level) == ("retention", "warning")
    assert "Amazon RDS for MySQL removes log files as soon as" in found.text


def test_connections_without_tls_are_refused(service: MysqlServiceServer) -> None:
    """The error names the option of the DSN, and nothing else of it."""
    dsn = service.dsn().partition("?")[0] + "?ssl-mode=DISABLED"
    server = MysqlSourceServer.from_dsn(dsn, "deltaforge/t")
    with (
        pytest.raises(SourceMisconfigured, match="see ssl-mode of the DSN") as caught,
        server.query(10),
    ):
        pass
    assert str(caught.value) == (
        f"MySQL 127.0.0.1:{service.address[1]}: the server takes only encrypted connections; see ssl-mode of the DSN"
        " (error 3159)"
    )


def test_a_retention_that_is_short(service: MysqlServiceServer) -> None:
    """Less than a day is a warning; more than the service offers is never asked for."""
    dsn = service.dsn()
    with MysqlSourceServer.from_dsn(dsn, "deltaforge/t").query(10) as session:
        for hours, level, remedy in (
            (5, "warning", "CALL mysql.rds_set_configuration('binlog retention hours', 168)"),
            (24, "ok", None),
        ):
            session.rows(f"CALL mysql.rds_set_configuration('binlog retention hours', {hours})")
            found = preflight._retention(session, service_of(session), 0)
            assert (found.level, found.remedy) == (level, remedy)
        session.rows("CALL mysql.rds_set_configuration('binlog retention hours', 168)")
        found = preflight._retention(session, service_of(session), 160 * 3600)
        assert (found.level, found.remedy) == ("error", None)
        assert found.text.endswith("; Amazon RDS for MySQL keeps it no longer")


@pytest.mark.soak("managed")
def test_a_replica_that_accepts_writes(service: MysqlServiceServer) -> None:
    """What it lacks proves no loss while it applies another server's log, even if it is not read-only."""
    service.add_standby()
    with MysqlSourceServer.from_dsn(service.standby_dsn, "deltaforge/t").query(10) as session:
        session.rows("SET GLOBAL read_only = OFF")
        assert may_catch_up(session)
        session.rows("STOP SLAVE")
        assert not may_catch_up(session)
