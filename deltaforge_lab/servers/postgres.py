"""Run a real PostgreSQL server in a temporary directory, configured for logical replication.

The programs come from this machine, or from builds of each major version (see `postgres_programs`).
The server listens on a free port of 127.0.0.1, with passwords (SCRAM), and its superuser is
`postgres`.

PostgreSQL refuses to run as root: in a process of root, the server runs as an ordinary account, and
the package is copied if that account cannot read it (a virtual environment below `/root`).
"""

from __future__ import annotations

import functools
import secrets
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
from psycopg import conninfo, sql

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import (
    Account,
    ServerProcess,
    remove_directory,
    run_as,
    temporary_directory,
)
from deltaforge_lab.servers import postgres_programs
from deltaforge_lab.servers.base import Origin, Server

_USER = "postgres"
_SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_connections": "200",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
}
_START_SECONDS = 120.0


class PostgresServer(Server):
    """A PostgreSQL server, created by `start` or `attach`."""

    _stop_seconds = 20.0
    _stop_signal = signal.SIGINT  # fast shutdown: connections are closed, then a checkpoint
    _crash_signal = signal.SIGQUIT  # immediate shutdown: no checkpoint

    def __init__(self, dsn: str) -> None:
        super().__init__("PostgreSQL")
        self._dsn = dsn
        self._created: list[str] = []
        self._programs = Path()
        self._account: Account | None = None

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        version: int | None = None,
        origins: Sequence[Origin] = ("installed", "package"),
    ) -> Self:
        """Create a database cluster and start it.

        Args:
            data_dir: The data directory, empty or new, which `close` keeps; None for a temporary
                one.
            settings: Server settings that override the defaults (`wal_level=logical`, 20 slots and
                senders), by their names in postgresql.conf. Tests turn `fsync` off. One without a
                value is left to the configuration files.
            version: A major version, 12 to 18, whose pinned build is downloaded; None for the
                version of this machine or of the package.
            origins: The search order for the programs without a `version`.

        Raises:
            SettingsError: The programs were not found, or the server did not start.
        """
        server = cls("")
        server._account = Account.ordinary()
        server._temporary = temporary_directory("postgres", server._account)
        try:
            server._programs = (
                postgres_programs.find(origins, server._account, server._temporary)
                if version is None
                else postgres_programs.of_version(version, server._temporary)
            )
            server._data = (data_dir or server._temporary / "data").absolute()
            server._settings = {**_SETTINGS, **(settings or {})}
            password = server._initialize()
            server._run_on_free_port(functools.partial(server._listen, password))
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def attach(cls, dsn: str) -> Self:
        """Use an external server; `dsn` names a superuser and a database.

        The server is never stopped; `close` drops the databases created by `create_database`.
        """
        return cls(dsn)

    @property
    def dsn(self) -> str:
        """`postgres://user:password@host:port/database` of the superuser."""
        return self._dsn

    @property
    def version(self) -> str:
        """The server's version, such as `16.2`."""
        with psycopg.connect(self._dsn) as connection:
            return str(connection.info.parameter_status("server_version"))

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database, by default under a random name, and return its DSN."""
        name = name or f"df_{secrets.token_hex(6)}"
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self._created.append(name)
        return urlunsplit(urlsplit(self._dsn)._replace(path="/" + quote(name, safe="")))

    def standby(self, settings: Mapping[str, str] | None = None) -> PostgresServer:
        """Start a standby that follows this server through the physical slot `standby`.

        This server is restarted for it. Close the standby before this server, whose programs it
        uses.

        Args:
            settings: Settings of the standby that differ from those of this server.
        """
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_create_physical_replication_slot('standby', true)")
        other = PostgresServer("")
        try:
            other._follow(self, settings or {})
        except BaseException:
            other.close()
            raise
        return other

    def close(self) -> None:
        """Stop the server and remove its temporary directory. Safe to call twice."""
        if self._process is None and self._dsn and self._temporary is None:
            self._drop_created()
        super().close()

    def _follow(self, primary: PostgresServer, settings: Mapping[str, str]) -> None:
        """Copy the files of a primary, which stops for that, and follow it."""
        self._account, self._programs = primary._account, primary._programs
        self._temporary = temporary_directory("postgres", self._account)
        self._data = self._temporary / "data"
        primary.stop()
        shutil.copytree(primary._data, self._data)
        (self._data / "standby.signal").touch()
        for path in (self._data, *self._data.rglob("*")):
            if self._account:
                shutil.chown(path, self._account.uid, self._account.gid)
        primary._run()
        self._settings = {
            **primary._settings,
            "primary_conninfo": conninfo.make_conninfo(primary.dsn, dbname="postgres"),
            "primary_slot_name": "standby",
            "hot_standby_feedback": "on",
            **settings,
        }
        password = urlsplit(primary.dsn).password or ""
        self._run_on_free_port(functools.partial(self._listen, password))

    def _listen(self, password: str, port: int) -> None:
        self._settings["port"] = str(port)
        self._dsn = f"postgres://{_USER}:{password}@127.0.0.1:{port}/postgres"

    def _initialize(self) -> str:
        """Run initdb; return the superuser's password."""
        password = secrets.token_urlsafe(12)
        assert self._temporary
        self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        password_file = self._temporary / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(password)
        if self._account:
            for path in (self._data, password_file):
                shutil.chown(path, self._account.uid, self._account.gid)
        outcome = run_as(
            [
                str(self._programs / "initdb"), "--pgdata", str(self._data), "--no-sync",
                "--username", _USER, "--pwfile", str(password_file), "--auth", "scram-sha-256",
                "--encoding", "UTF8", "--locale", "C",
            ],
            self._account,
            self._temporary,
        )  # fmt: skip
        password_file.unlink()
        if outcome.returncode:
            raise SettingsError(f"PostgreSQL cannot create its files: {_one_line(outcome.stderr)}")
        return password

    def _run(self) -> None:
        assert self._temporary
        command = [str(self._programs / "postgres"), "-D", str(self._data)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"] if value else []
        self._process = ServerProcess(
            "PostgreSQL",
            command,
            directory=self._temporary,
            account=self._account,
            quick_signal=signal.SIGQUIT,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._dsn, connect_timeout=10).close()
        except psycopg.OperationalError:
            return False
        return True

    def _drop_created(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            for name in self._created:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    [name],
                )
                connection.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                    " WHERE database = %s",
                    [name],
                )
                connection.execute(
                    sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
                )
        self._created.clear()


def installed_version(origins: Sequence[Origin] = ("installed", "package")) -> str:
    """Return the version that `start` starts, `postgres (PostgreSQL) 16.2`, or how to get it."""
    account = Account.ordinary()
    scratch = temporary_directory("postgres", account)
    try:
        programs = postgres_programs.find(origins, account, scratch)
        return run_as([str(programs / "postgres"), "--version"], account, scratch).stdout.strip()
    except SettingsError as error:
        return str(error)
    finally:
        remove_directory(scratch)


def _one_line(text: str) -> str:
    return " / ".join(line.strip() for line in text.splitlines() if line.strip()) or "no message"
