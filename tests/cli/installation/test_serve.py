"""Tests of what `deltaforge serve` refuses at its start; `tests/api` tests what it serves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app


def refusal(*arguments: object) -> str:
    """Return the error message of a `serve` that does not start."""
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2
    return result.output


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without a token and without pipelines."""
    monkeypatch.delenv("DELTAFORGE_API_TOKEN", raising=False)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipelines"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
@pytest.mark.parametrize("token", [None, " "])
def test_other_machines_need_a_token(
    monkeypatch: pytest.MonkeyPatch, host: str, token: str | None
) -> None:
    """An address that other machines can reach is refused without a token; an empty token counts as none."""
    if token is not None:
        monkeypatch.setenv("DELTAFORGE_API_TOKEN", token)
    assert "set DELTAFORGE_API_TOKEN" in refusal("--host", host)


@pytest.mark.parametrize("option", [("--host", "0.0.0.0"), ("--metrics-addr", "0.0.0.0:0")])
def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch, option: tuple[str, str]) -> None:
    """A token that can be guessed is as none on such an address; only on this machine it may be short."""
    monkeypatch.setenv("DELTAFORGE_STATE_URL", "memory")  # what is refused next
    monkeypatch.setenv("DELTAFORGE_API_TOKEN", "fifteen letters")
    assert refusal("--port", 0, *option) == (
        f"error: {' '.join(option)}: other machines can reach it, and DELTAFORGE_API_TOKEN has fewer than 16 "
        "characters; make one with: openssl rand -hex 32\n"
    )
    assert "DELTAFORGE_STATE_URL" in refusal("--port", 0, "--metrics-addr", "127.0.0.1:0")
    monkeypatch.setenv("DELTAFORGE_API_TOKEN", "sixteen letters!")
    assert "DELTAFORGE_STATE_URL" in refusal("--port", 0, *option)


def test_a_port_that_is_taken() -> None:
    """The error names the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal("--port", port, "--metrics-addr", "none")
    assert (
        said == f"error: --host 127.0.0.1 --port {port}: Address already in use; choose another\n"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "example.org"])
def test_metrics_for_other_machines_need_a_token(host: str) -> None:
    """The metrics address is refused without a token as the API's address is."""
    said = refusal("--port", 0, "--metrics-addr", f"{host}:0")
    assert f"--metrics-addr {host}:0: other machines can reach it, so a token is needed" in said


def test_a_port_of_metrics_that_is_taken() -> None:
    """The error names the option and its alternatives."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal("--port", 0, "--metrics-addr", address)
    assert said == (
        f"error: --metrics-addr {address}: Address already in use; "
        "choose another address, or `none`\n"
    )


@pytest.mark.parametrize("text", ["9000", ":9000", "localhost", "localhost:many", "::1:65536", ""])
def test_what_is_no_address(text: str) -> None:
    """The metrics address must have a host and a port."""
    assert "must be HOST:PORT" in refusal("--port", 0, "--metrics-addr", text)


def test_a_state_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state store in memory is refused, since no other process could read it."""
    monkeypatch.setenv("DELTAFORGE_STATE_URL", "memory")
    assert "DELTAFORGE_STATE_URL is memory" in refusal("--port", 0)


def test_without_the_directory_of_pipelines() -> None:
    """The error names the missing directory."""
    said = refusal("--port", 0, "--metrics-addr", "none")
    assert "DELTAFORGE_PIPELINES" in said
    assert "does not exist" in said


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    """Ctrl-C stops the server cleanly, with exit code 0 and no output."""
    (tmp_path / "pipelines").mkdir()
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "deltaforge_dagster",
            "serve",
            "--port",
            "0",
            "--metrics-addr",
            "none",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DELTAFORGE_HOME": str(tmp_path / "home"), "DELTAFORGE_LOG": "warn"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{address}/health", timeout=60):
            server.send_signal(signal.SIGINT)

        assert server.communicate(timeout=60) == ("", "")
    assert server.returncode == 0
