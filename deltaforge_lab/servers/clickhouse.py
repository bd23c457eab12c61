"""Run ClickHouse's engine in a temporary directory, behind its HTTP interface (`clickhouse_http`).

The engine comes from the package `chdb` of the extra `lab`. The server listens on a free port of
127.0.0.1 and requires a password. Its data survive a restart.
"""

from __future__ import annotations

import functools
import http.client
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import ServerProcess, temporary_directory
from deltaforge_lab.servers.base import OneProcessServer
from deltaforge_lab.servers.clickhouse_http import PASSWORD_VARIABLE, USER

HOW_TO_GET = "ClickHouse's engine is missing: pip install 'deltaforge-dagster[lab]'"

_START_SECONDS = 120.0


class ClickhouseServer(OneProcessServer):
    """A server with ClickHouse's engine, created by `start`."""

    _stop_seconds = 10.0

    def __init__(self) -> None:
        super().__init__("ClickHouse")
        self.user = USER
        self.password = secrets.token_urlsafe(12)
        self.port = 0

    @classmethod
    def start(cls, settings: Mapping[str, str] | None = None) -> Self:
        """Start a server.

        Args:
            settings: Must be empty; the server has no settings.

        Raises:
            SettingsError: The engine was not found, or the server did not start.
        """
        assert not settings
        if not available():
            raise SettingsError(HOW_TO_GET)
        server = cls()
        server._temporary = temporary_directory("clickhouse", None)
        server._data = server._temporary / "data"
        try:
            server._run_on_free_port(functools.partial(setattr, server, "port"))
        except BaseException:
            server.close()
            raise
        return server

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://127.0.0.1:{self.port}"

    def query(self, query: str, form: str = "TabSeparated", data: bytes = b"") -> bytes:
        """Return the answer to a query.

        Args:
            query: The query.
            form: Format of the answer.
            data: Rows of an INSERT, in the format that it names.

        Raises:
            SettingsError: The server refuses it.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_SECONDS)
        try:
            headers = {"X-ClickHouse-User": self.user, "X-ClickHouse-Key": self.password}
            path = "/?" + urlencode({"default_format": form, "query": query})
            connection.request("POST", path, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise SettingsError(content.decode(errors="replace"))
        return content

    def _run(self) -> None:
        assert self._temporary
        folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        self._process = ServerProcess(
            "clickhouse",
            [
                sys.executable,
                "-m",
                "deltaforge_lab.servers.clickhouse_http",
                str(self.port),
                str(self._data),
            ],
            directory=self._temporary,
            remove=self._temporary,
            environment={
                **os.environ,
                PASSWORD_VARIABLE: self.password,
                "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            },
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            return self.query("SELECT 1") == b"1\n"
        except (OSError, http.client.HTTPException):
            return False


def available() -> bool:
    """Return whether the engine is installed."""
    return importlib.util.find_spec("chdb") is not None
