"""PgBouncer, the connection pooler, before a PostgreSQL server.

The program comes from an installation (`PATH`), or from Debian (see `debian`). It pools by
transaction, as services have it, and logs in for its clients with the passwords that it is given.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psycopg
from psycopg import conninfo

from deltaforge_dagster.installation.process import (
    Account,
    ServerProcess,
    temporary_directory,
)
from deltaforge_lab.servers import debian
from deltaforge_lab.servers.base import OneProcessServer

_RELEASE = "trixie"
_START_SECONDS = 60.0


class PgBouncer(OneProcessServer):
    """A running PgBouncer, created by `start`.

    Attributes:
        port: Where it listens, on 127.0.0.1.
    """

    _stop_seconds = 20.0

    def __init__(self) -> None:
        super().__init__("PgBouncer")
        self.port = 0
        self._program: tuple[str, ...] = ()
        self._account: Account | None = None
        self._target = ""
        self._users: dict[str, str] = {}

    @classmethod
    def start(
        cls,
        dsn: str,
        users: Mapping[str, str],
        settings: Mapping[str, str] | None = None,
        *,
        release: str = _RELEASE,
    ) -> Self:
        """Start a pooler.

        Args:
            dsn: A URL of the server, which must offer TLS.
            users: The passwords of the roles that may log in.
            settings: Settings of the section `pgbouncer`.
            release: The Debian release whose version is taken, if none is installed.

        Raises:
            SettingsError: The program is not available, or did not start.
        """
        pooler = cls()
        pooler._account = Account.ordinary()
        pooler._temporary = temporary_directory("pgbouncer", pooler._account)
        address = urlsplit(dsn)
        pooler._target = f"host={address.hostname} port={address.port}"
        pooler._users = dict(users)
        pooler._settings = {
            "listen_addr": "127.0.0.1",
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": str(pooler._temporary / "users"),
            "pool_mode": "transaction",
            "server_tls_sslmode": "prefer",
            **(settings or {}),
        }
        try:
            pooler._program = pooler._find_program(release)
            pooler._run_on_free_port(pooler._listen)
        except BaseException:
            pooler.close()
            raise
        return pooler

    def dsn(self, database: str, role: str) -> str:
        """Return the DSN of a role through the pooler."""
        return (
            f"postgres://{role}:{self._users[role]}@127.0.0.1:{self.port}/{database}"
            "?sslmode=disable"
        )

    def _find_program(self, release: str) -> tuple[str, ...]:
        installed = shutil.which("pgbouncer")
        if installed:
            return (installed,)
        assert self._temporary
        directory = self._temporary / "programs"
        loader = debian.unpack("pgbouncer", release, directory)
        for path in (directory, *directory.rglob("*")):
            if self._account and not path.is_symlink():
                shutil.chown(path, self._account.uid, self._account.gid)
        return (*loader, str(directory / "usr/sbin/pgbouncer"))

    def _listen(self, port: int) -> None:
        self.port = port
        self._settings["listen_port"] = str(port)

    def _run(self) -> None:
        assert self._temporary
        settings = "".join(f"{name} = {value}\n" for name, value in self._settings.items())
        users = "".join(f'"{role}" "{password}"\n' for role, password in self._users.items())
        self._write("users", users)
        config = self._write(
            "pgbouncer.ini", f"[databases]\n* = {self._target}\n[pgbouncer]\n{settings}"
        )
        self._process = ServerProcess(
            "PgBouncer",
            [*self._program, str(config)],
            directory=self._temporary,
            account=self._account,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _write(self, name: str, text: str) -> Path:
        assert self._temporary
        path = self._temporary / name
        path.write_text(text)
        if self._account:
            shutil.chown(path, self._account.uid, self._account.gid)
        return path

    def _answers(self) -> bool:
        role = next(iter(self._users))
        try:
            psycopg.connect(
                conninfo.make_conninfo(self.dsn("postgres", role), connect_timeout=10)
            ).close()
        except psycopg.OperationalError:
            return False
        return True
