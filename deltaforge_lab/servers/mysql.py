"""Run a real MySQL or MariaDB server in a temporary directory, configured for replication.

`mysql_programs` provides the programs, by default of MySQL 8.0. The
server listens on a free port of 127.0.0.1. Its user is `root`, with a password, and with
`caching_sha2_password` as in any new MySQL 8. The binary log is on: rows, full images, GTIDs.

MySQL refuses to run as root: in a process of root, the server runs as an ordinary account.
"""

from __future__ import annotations

import functools
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import pymysql

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import (
    Account,
    ServerProcess,
    run_as,
    temporary_directory,
)
from deltaforge_lab.servers import mysql_programs
from deltaforge_lab.servers.base import OneProcessServer, Origin
from deltaforge_lab.servers.mysql_programs import Programs, Version

_USER = "root"
_SETTINGS = {
    "bind_address": "127.0.0.1",
    "server_id": "1",
    "log_bin": "binlog",
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "performance_schema": "OFF",  # 200 MB of memory
    "skip_name_resolve": "ON",
    "max_allowed_packet": "67108864",  # as in MySQL 8, for other versions
}
_START_SECONDS = 120.0


class MysqlServer(OneProcessServer):
    """A MySQL server, created by `start` or `attach`."""

    _stop_seconds = 20.0

    def __init__(self, dsn: str) -> None:
        super().__init__("MySQL")
        self._dsn = dsn
        self._created: list[str] = []
        self._programs = Programs(())
        self._account: Account | None = None

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        version: Version | None = None,
        origins: Sequence[Origin] = ("package", "installed"),
        copy_of: MysqlServer | None = None,
    ) -> Self:
        """Create a data directory and start a server on it.

        Args:
            data_dir: The data directory, empty or new, which `close` keeps; None for a temporary
                one.
            settings: Server settings that override the defaults (binary log of rows, GTIDs on), by
                the names of system variables: `{"gtid_mode": "OFF", "binlog_row_metadata":
                "FULL"}`.
            version: The version to download; None for the default one, from the package or
                installed.
            origins: The search order for the program without a `version`.
            copy_of: The server whose data and accounts it gets; that one is restarted. The copy is
                another server for its replicas and readers.

        Raises:
            SettingsError: The program was not found, or the server did not start.
        """
        server = cls("")
        server._account = Account.ordinary()
        server._temporary = temporary_directory("mysql", server._account)
        try:
            server._programs = mysql_programs.find(version, origins, server._temporary)
            server._data = (data_dir or server._temporary / "data").absolute()
            server._settings = {
                **_SETTINGS,
                **server._programs.settings,
                "datadir": str(server._data),
                "socket": str(server._temporary / "socket"),
                "tmpdir": str(
                    server._temporary
                ),  # not TMPDIR, which the account may be unable to read
                **(settings or {}),
            }
            password = server._copy(copy_of) if copy_of else server._initialize()
            server._run_on_free_port(functools.partial(server._listen, password))
        except BaseException:
            server.close()
            raise
        return server

    def restart_at(self, port: int) -> None:
        """Restart the server on another port."""
        self._own()
        self.stop()
        self._listen(urlsplit(self._dsn).password or "", port)
        self._run()

    @classmethod
    def attach(cls, dsn: str) -> Self:
        """Use an external server; the user in `dsn` needs all privileges.

        The server is never stopped; `close` drops the databases created by `create_database`.
        """
        return cls(dsn)

    @property
    def dsn(self) -> str:
        """`mysql://user:password@host:port/database` of root."""
        return self._dsn

    @property
    def data_directory(self) -> Path:
        """Where the server keeps its data."""
        return self._data

    @property
    def version(self) -> str:
        """The server's version, such as `8.0.15`."""
        return str(execute(self._dsn, "SELECT version()")[0][0])

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database, by default under a random name, and return its DSN."""
        name = name or f"df_{secrets.token_hex(6)}"
        execute(self._dsn, f"CREATE DATABASE `{name}`")
        self._created.append(name)
        return urlunsplit(urlsplit(self._dsn)._replace(path="/" + quote(name, safe="")))

    def close(self) -> None:
        """Stop the server and remove its temporary directory. Safe to call twice."""
        if self._process is None and self._dsn and self._temporary is None:
            for name in self._created:
                execute(self._dsn, f"DROP DATABASE IF EXISTS `{name}`")
            self._created.clear()
        super().close()

    def _listen(self, password: str, port: int) -> None:
        self._settings["port"] = str(port)
        self._dsn = f"mysql://{_USER}:{password}@127.0.0.1:{port}/mysql"

    def _copy(self, other: MysqlServer) -> str:
        """Copy the data of another server; return the user's password."""
        other.stop()
        shutil.copytree(other.data_directory, self._data, dirs_exist_ok=True)
        other.restart()
        (self._data / "auto.cnf").unlink()  # the identity
        if self._account:
            for path in (self._data, *self._data.rglob("*")):
                shutil.chown(path, self._account.uid, self._account.gid)
        return urlsplit(other.dsn).password or ""

    def _initialize(self) -> str:
        """Create the data directory and the user; return the user's password."""
        password = secrets.token_urlsafe(12)
        assert self._temporary
        self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        first = self._temporary / "first.sql"
        first.touch(mode=0o600)
        begin = self._system_tables()
        # One statement per line: the server reads this file line by line.
        first.write_text(
            f"{begin}CREATE USER '{_USER}'@'%' IDENTIFIED BY '{password}';\n"
            f"GRANT ALL ON *.* TO '{_USER}'@'%' WITH GRANT OPTION;\n"
            f"DROP USER IF EXISTS 'root'@'localhost';\n"
        )
        if self._account:
            for path in (self._data, first):
                shutil.chown(path, self._account.uid, self._account.gid)
        how = ["--bootstrap"] if begin else ["--initialize-insecure", f"--init-file={first}"]
        outcome = run_as(
            [*self._command(), *how], self._account, self._temporary, first if begin else None
        )
        first.unlink()
        if outcome.returncode:
            lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
            raise SettingsError(
                f"MySQL cannot create its files: {' / '.join(lines) or 'no message'}"
            )
        return password

    def _system_tables(self) -> str:
        """Return the statements that create MariaDB's system tables, without accounts for root."""
        statements = "".join(script.read_text() for script in self._programs.scripts)
        if not statements:
            return ""
        # Until the accounts are loaded (FLUSH PRIVILEGES), everything is allowed except GRANT.
        cleanup = "DELETE FROM global_priv WHERE User = 'root';\nFLUSH PRIVILEGES;\n"
        return f"CREATE DATABASE mysql;\nUSE mysql;\n{statements}{cleanup}"

    def _command(self) -> list[str]:
        command = [*self._programs.command, "--no-defaults"]
        return command + [f"--{name}={value}" for name, value in self._settings.items()]

    def _run(self) -> None:
        assert self._temporary
        self._process = ServerProcess(
            "MySQL",
            self._command(),
            directory=self._temporary,
            account=self._account,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            connect(self._dsn).close()
        except pymysql.OperationalError:
            return False
        return True


def connect(dsn: str) -> pymysql.Connection[Any]:
    """Open a connection in autocommit mode.

    With `ssl-mode` in the DSN it is encrypted, and nothing is verified.
    """
    parts = urlsplit(dsn)
    host = parts.hostname or "127.0.0.1"
    # A local connection needs no TLS unless it is asked for, and creating a TLS context takes 10
    # ms.
    asked = "ssl-mode" in parts.query
    return pymysql.connect(
        host=host,
        ssl_disabled=host == "127.0.0.1" and not asked,
        ssl={"verify_mode": "none", "check_hostname": False} if asked else None,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.strip("/")) or None,
        autocommit=True,
        connect_timeout=5,
    )


def execute(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, each in its own transaction; return the rows of the last one."""
    with connect(dsn) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall())


def installed_version(origins: Sequence[Origin] = ("package", "installed")) -> str:
    """Return the version that `start` would start, or how to get one; downloads nothing."""
    return mysql_programs.describe(origins)
