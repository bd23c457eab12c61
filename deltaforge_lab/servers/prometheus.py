"""Run a real Prometheus in a temporary directory, and its checker `promtool`.

The programs come from an installation (`PATH`), or from Debian (see `debian`). The server listens
on a free port of 127.0.0.1 and keeps the scraped data until it is closed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.process import ServerProcess, temporary_directory
from deltaforge_lab.servers import debian
from deltaforge_lab.servers.base import OneProcessServer, Origin

_RELEASE = "bookworm"
_PACKAGES = ("prometheus", "libc6")
_START_SECONDS = 120.0
_CHECK_SECONDS = 120.0
_STYLE = 3
"""Exit code of `promtool` if the input is valid but violates naming conventions."""


class PrometheusServer(OneProcessServer):
    """A Prometheus server, created by `start`."""

    _stop_seconds = 10.0

    def __init__(self) -> None:
        super().__init__("Prometheus")
        self._programs: dict[str, tuple[str, ...]] = {}
        self._config = Path()
        self._address = ""

    @classmethod
    def start(cls, config: Path, *, origins: Sequence[Origin] = ("installed", "package")) -> Self:
        """Start a server.

        Args:
            config: Its configuration file; paths in it are relative to its folder.
            origins: The search order for the programs.

        Raises:
            SettingsError: The programs were not found, or the server did not start.
        """
        server = cls()
        server._temporary = temporary_directory("prometheus", None)
        server._data = server._temporary / "data"
        server._config = config.absolute()
        try:
            server._programs = _find_programs(origins, server._temporary / "programs")
            server._run_on_free_port(server._listen)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def url(self) -> str:
        """The base URL of its pages and its API."""
        return f"http://{self._address}"

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an API response, such as that of `query`; raises if there is none."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(  # noqa: S310
            f"{self.url}/api/v1/{path}?{query}", timeout=30
        ) as answer:
            return json.load(answer)["data"]

    def check(self, *arguments: str, text: str = "") -> str:
        """Run `promtool check` and return its output, including remarks on naming conventions.

        Args:
            arguments: What to check, such as `rules` and a file.
            text: Its standard input.

        Raises:
            SettingsError: The input is invalid.
        """
        done = subprocess.run(
            [*self._programs["promtool"], "check", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
        output = (done.stdout + done.stderr).strip()
        if done.returncode not in {0, _STYLE}:
            raise SettingsError(f"promtool check {arguments[0]}: {output}")
        return output

    def _listen(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"

    def _run(self) -> None:
        assert self._temporary
        self._process = ServerProcess(
            "prometheus",
            [
                *self._programs["prometheus"],
                f"--config.file={self._config}",
                f"--storage.tsdb.path={self._data}",
                f"--web.listen-address={self._address}",
            ],
            directory=self._temporary,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10):  # noqa: S310
                return True
        except OSError:
            return False


def _find_programs(origins: Sequence[Origin], directory: Path) -> dict[str, tuple[str, ...]]:
    """Return the command of each program, which may be preceded by its loader."""
    for origin in origins:
        if origin == "installed":
            paths = {name: shutil.which(name) for name in ("prometheus", "promtool")}
            installed: dict[str, tuple[str, ...]] = {
                name: (program,) for name, program in paths.items() if program
            }
            if len(installed) == len(paths):
                return installed
        else:
            loader = debian.unpack("prometheus", _RELEASE, directory, only=_PACKAGES)
            programs = directory / "usr/bin"
            return {name: (*loader, str(programs / name)) for name in ("prometheus", "promtool")}
    raise SettingsError("prometheus is missing: install it, or allow it to come from Debian")
