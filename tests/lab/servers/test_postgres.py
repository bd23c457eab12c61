"""Our own PostgreSQL server."""

from __future__ import annotations

import secrets
from pathlib import Path

import psycopg
import pytest

from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.installation.process import (
    Account,
    package_directory,
    remove_directory,
    temporary_directory,
)
from deltaforge_lab.servers import postgres_programs
from deltaforge_lab.servers.base import Origin
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_postgres import FAST, POSTGRES_VERSIONS, PostgresVersion, StartPostgres
from tests.installation.test_process import gone

pytestmark = pytest.mark.postgres


def show(dsn: str, setting: str) -> str:
    """Return a server setting."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
    assert row
    return str(row[0])


@pytest.mark.parametrize("origin", ["installed", "package"])
def test_each_origin_serves_logical_replication(origin: Origin) -> None:
    """Installed or packaged: pgoutput is there and slots can be made."""
    try:
        server = PostgresServer.start(settings=FAST, origins=[origin])
    except SettingsError as error:
        assert str(error) == postgres_programs.HOW_TO_GET  # noqa: PT017
        assert origin == "installed"
        return  # this machine has none; the package is always there
    with server, psycopg.connect(server.create_database("app"), autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")

        assert show(server.dsn, "wal_level") == "logical"
        assert show(server.dsn, "max_replication_slots") == "20"


def test_a_wrong_password_is_refused(postgres_server: PostgresServer) -> None:
    """The server asks for passwords, so a wrong DSN in a test behaves as at users'."""
    wrong = psycopg.conninfo.make_conninfo(postgres_server.dsn, password="wrong")

    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)


def test_restart_keeps_data_and_port_and_changes_settings(start_postgres: StartPostgres) -> None:
    """After a crash and a restart the same DSN has what was committed."""
    server = start_postgres({"synchronous_commit": "on"})
    dsn = server.dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS x")
    server.stop(immediate=True)
    server.restart({"wal_level": "replica"})

    assert server.dsn == dsn
    assert show(dsn, "wal_level") == "replica"
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT x FROM t").fetchall() == [(1,)]


def test_close_leaves_nothing() -> None:
    """No process, no file."""
    server = PostgresServer.start(settings=FAST)
    pid = server.pid
    directory = server._temporary
    server.close()
    server.close()

    assert gone(pid)
    assert directory
    assert not directory.exists()


def test_a_given_data_directory_stays() -> None:
    """What a caller asked to keep is kept."""
    directory = temporary_directory("test", Account.ordinary())
    with PostgresServer.start(directory / "data", FAST):
        pass

    assert (directory / "data" / "PG_VERSION").exists()
    remove_directory(directory)


def test_an_attached_server_is_only_used(postgres_server: PostgresServer) -> None:
    """Databases made there go again, the server and its slots' databases are not touched."""
    attached = PostgresServer.attach(postgres_server.dsn)
    dsn = attached.create_database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        slot = f"gone_{secrets.token_hex(4)}"
        connection.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    with pytest.raises(NotAllowed):
        attached.restart()
    attached.close()

    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(dsn)
    assert postgres_server.version


def test_a_missing_server_is_one_line_that_says_how_to_get_it() -> None:
    """The error is for the reader, and needs no second look."""
    with pytest.raises(SettingsError) as caught:
        PostgresServer.start(origins=[])

    assert str(caught.value).count("\n") == 0
    assert "pip install 'deltaforge-dagster[lab]'" in str(caught.value)
    assert "apt-get install postgresql" in str(caught.value)


def test_a_package_in_a_closed_directory_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below /root works for root: the account gets a copy of the package."""
    package = package_directory("pgserver")
    assert package
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for part in ("pgserver", "pgserver.libs"):
        (closed / part).symlink_to(package.parent / part)
    monkeypatch.setattr(postgres_programs, "package_directory", lambda _name: closed / "pgserver")

    with PostgresServer.start(settings=FAST, origins=["package"]) as server:
        assert server.version.startswith("16.")


def install(directory: Path, version: str) -> Path:
    """Make programs in a directory that know their version and nothing else."""
    directory.mkdir()
    for name in ("initdb", "postgres"):
        program = directory / name
        program.write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        program.chmod(0o755)
    return directory


def test_an_installed_server_is_one_that_is_supported_and_can_be_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest is taken, through links; not one that is too old, or closed to its account."""
    account = Account.ordinary()
    scratch = temporary_directory("test", account)
    new, old = install(scratch / "new", "99.1"), install(scratch / "old", "11.22")
    (scratch / "links").mkdir()
    (scratch / "links" / "postgres").symlink_to(new / "postgres")

    def installed(on_path: Path) -> Path | None:
        monkeypatch.setenv("PATH", f"{on_path}:/bin")
        return postgres_programs._installed(account, scratch)

    assert installed(scratch / "links") == new
    assert installed(old) != old
    (new / "initdb").chmod(0)
    assert installed(new) != new
    remove_directory(scratch)


@pytest.mark.parametrize("version", POSTGRES_VERSIONS)
def test_each_version_serves_logical_replication(
    version: int, postgres_version: PostgresVersion
) -> None:
    """Every supported major version can be had, with pgoutput and its extensions."""
    server = postgres_version(version)
    with psycopg.connect(server.create_database(), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION hstore")
        slot = f"v_{secrets.token_hex(4)}"
        connection.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        connection.execute(f"SELECT pg_drop_replication_slot('{slot}')")

    assert server.version.startswith(f"{version}.")
    assert postgres_version(version) is server


def test_a_version_that_is_not_pinned_is_refused() -> None:
    """Only what was tried is fetched."""
    with pytest.raises(SettingsError, match="no pinned PostgreSQL 11: only 12, 13"):
        PostgresServer.start(version=11)
