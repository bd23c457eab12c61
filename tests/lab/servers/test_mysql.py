"""Our own MySQL server."""

from __future__ import annotations

from pathlib import Path

import pymysql
import pytest

from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.installation.process import Account, remove_directory, temporary_directory
from deltaforge_lab.servers import mysql_programs
from deltaforge_lab.servers.mysql import MysqlServer, connect, execute
from deltaforge_lab.servers.mysql_programs import Version
from tests.fix_mysql import FAST, MysqlVersion, StartMysql
from tests.installation.test_process import gone

pytestmark = pytest.mark.mysql


def variable(dsn: str, name: str) -> str:
    """Return a system variable."""
    return str(execute(dsn, f"SELECT @@{name}")[0][0])


def test_the_packaged_server_logs_rows_with_transaction_ids() -> None:
    """What MySQL needs to be replicated from is on, and a password is asked for."""
    with MysqlServer.start(settings=FAST, origins=["package"]) as server:
        dsn = server.create_database("app")
        for name, value in (
            ("log_bin", "1"),
            ("binlog_format", "ROW"),
            ("binlog_row_image", "FULL"),
            ("gtid_mode", "ON"),
        ):
            assert variable(dsn, name) == value
        assert server.version == "8.0.15"
        with pytest.raises(pymysql.OperationalError, match="Access denied"):
            connect(dsn.replace("root:", "root:x"))


@pytest.mark.soak("faults")
def test_data_outlives_a_kill(start_mysql: StartMysql) -> None:
    """After a kill and a restart the same DSN has what was committed, and changed settings."""
    server = start_mysql({"innodb_flush_log_at_trx_commit": "1", "gtid_mode": "OFF"})
    dsn = server.create_database()
    assert variable(dsn, "gtid_mode") == "OFF"
    execute(dsn, "CREATE TABLE t (x INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    server.stop(immediate=True)
    server.restart({"max_connections": "77"})

    assert execute(dsn, "SELECT x FROM t") == [(1,)]
    assert variable(dsn, "max_connections") == "77"


@pytest.mark.soak("faults")
def test_a_paused_server_hangs_goes_on_and_can_be_stopped(start_mysql: StartMysql) -> None:
    """Pausing looks like a hung server to clients; closing never waits for a frozen process."""
    server = start_mysql()
    pid = server.pid
    with connect(server.dsn) as connection:
        server.pause()
        connection._sock.settimeout(0.3)
        connection._read_timeout = 0.3
        with pytest.raises(pymysql.OperationalError), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    server.resume()
    assert execute(server.dsn, "SELECT 1") == [(1,)]
    server.pause()
    server.close()

    assert gone(pid)


def test_close_leaves_only_a_given_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, no temporary file; what a caller asked to keep is kept.

    A TMPDIR that is closed to the server's account is not asked for anything.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = temporary_directory("test", Account.ordinary())
    server = MysqlServer.start(directory / "data", FAST)
    pid = server.pid
    temporary = server._temporary
    server.close()
    server.close()

    assert gone(pid)
    assert temporary
    assert not temporary.exists()
    assert (directory / "data" / "ibdata1").exists()
    remove_directory(directory)


def test_an_attached_server_is_only_used(mysql_server: MysqlServer) -> None:
    """Databases made there go again; the server is not touched."""
    attached = MysqlServer.attach(mysql_server.dsn)
    dsn = attached.create_database()
    with pytest.raises(NotAllowed):
        attached.restart()
    attached.close()

    with pytest.raises(pymysql.OperationalError, match="Unknown database"):
        connect(dsn)
    assert mysql_server.version


def test_mariadb_is_not_mysql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's `mysqld` is MariaDB, whose log is another one: then there is no MySQL."""
    program = tmp_path / "mysqld"
    program.write_text("#!/bin/sh\necho 'mysqld  Ver 10.11.14-MariaDB-0+deb12u2'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

    with pytest.raises(SettingsError) as caught:
        MysqlServer.start(origins=["installed"])

    assert str(caught.value) == mysql_programs.HOW_TO_GET


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("5.7", "5.7.22-log"),
        ("mariadb", "11.4.5-MariaDB-log"),
        pytest.param("mariadb 11.8", "11.8.", marks=pytest.mark.soak("versions")),
        pytest.param("mariadb 10.11", "10.11.5-MariaDB", marks=pytest.mark.soak("versions")),
        pytest.param("mariadb 10.5", "10.5.", marks=pytest.mark.soak("versions")),
        pytest.param("9.7", "9.", marks=pytest.mark.soak("versions")),
    ],
)
def test_other_versions_log_rows_too(
    version: Version, says: str, mysql_version: MysqlVersion
) -> None:
    """Each version can be had, asks for a password, and logs rows in full."""
    server = mysql_version(version)
    dsn = server.create_database()

    assert server.version.startswith(says)
    assert variable(dsn, "log_bin") == "1"
    assert variable(dsn, "binlog_format") == "ROW"
    assert variable(dsn, "binlog_row_image") == "FULL"
    with pytest.raises(pymysql.OperationalError, match="Access denied"):
        connect(dsn.replace("root:", "root:x"))
    execute(dsn, "CREATE TABLE t (x INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    server_log = execute(dsn, "SHOW BINARY LOGS")
    assert any(
        row[2] in {"Write_rows", "Write_rows_v1"}
        for row in execute(dsn, f"SHOW BINLOG EVENTS IN '{server_log[-1][0]}'")
    )
    assert mysql_version(version) is server
