"""Our own NATS server."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_lab.servers.nats import NatsServer, installed_version
from tests.fix_nats import StartNats

pytestmark = pytest.mark.nats


def install(directory: Path, version: str) -> None:
    """Make a program in a directory that knows its version and nothing else."""
    program = directory / "nats-server"
    program.write_text(f"#!/bin/sh\necho 'nats-server: v{version}'\n")
    program.chmod(0o755)


def test_an_installed_server_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_nats: StartNats
) -> None:
    """Debian's cannot do all that the sink can: then the package is taken, whose server starts."""
    install(tmp_path, "2.10.27")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

    assert start_nats()._program == str(Path(sysconfig.get_path("scripts")) / "nats-server")
    with pytest.raises(SettingsError, match=r"nats-server 2\.11 or newer is missing: pip install"):
        NatsServer.start(origins=["installed"])


def test_an_installed_server_that_is_new_enough_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a server of their own tries that one."""
    install(tmp_path, "2.11.0-RC.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

    assert installed_version() == "nats-server: v2.11.0-RC.1"
