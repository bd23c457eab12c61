"""Tests of the Connect server: one per home, shared, and stopped on request, when idle, or after a crash."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from deltaforge_dagster.errors import SettingsError, SparkUnavailable
from deltaforge_dagster.installation import java
from deltaforge_dagster.installation.lake_jars import LAKE_JARS
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_lab.servers.maven import fetch
from tests.fix_spark import connected, unix_sockets
from tests.pipeline.lake.lake_tables import FORMATS, Lake, Staging

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home directory whose server, if any, is stopped afterwards; its name needs escaping in URLs."""
    made = tmp_path / "100% my home? #1"
    yield made
    if (made / "spark" / "server.json").exists():
        SparkServer.ensure(made).stop()


def state(home: Path) -> dict[str, int]:
    """Return the content of the watcher's state file."""
    return dict(json.loads((home / "spark" / "server.json").read_bytes()))


def alive(pid: int) -> bool:
    """Return whether a process is running (a zombie is not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # the process is gone, perhaps since just now
        return False


def java_of(watcher: int) -> int:
    """Return the pid of the watcher's server."""
    children = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    names = {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children}
    (java,) = [child for child, name in names.items() if name == "java"]
    return java


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Wait until a condition holds; a process releases its locks a moment before it is gone."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Return whether a port of this machine accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_life_of_a_server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent starts yield one server, on loopback and with a token; `stop` leaves nothing behind."""
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    found: list[SparkServer] = []
    threads = [
        threading.Thread(target=lambda: found.append(SparkServer.ensure(home))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    first, second = found
    assert first.remote == second.remote
    assert stat.S_IMODE((home / "spark" / "server.json").stat().st_mode) == 0o600
    session = connected(first.remote)
    session.range(3).write.saveAsTable("numbers")
    assert session.table("numbers").count() == 3
    # The path of this home is too long for them, which only costs time.
    assert not unix_sockets(session)
    session.stop()
    assert list(elsewhere.iterdir()) == []
    assert (home / "spark" / "work" / "spark_connect_model_cache").exists()  # by default in /tmp

    with socket.socket() as outside:
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            assert outside.connect_ex((address, state(home)["port"])) != 0
    stranger = connected(first.remote.replace("token=", "token=x"))
    with pytest.raises(PySparkException, match=r"(?i)token|unauthenticated"):
        stranger.range(1).collect()
    stranger.client.close()  # else it retries a dead server for minutes when Python exits

    watcher = state(home)["pid"]
    java = java_of(watcher)
    first.stop()
    second.stop()
    wait_for(lambda: not alive(watcher) and not alive(java))
    assert not (home / "spark" / "server.json").exists()


def test_idle_server_ends(home: Path) -> None:
    """A server stays while it has a client, and ends a while after the last one left."""
    server = SparkServer.ensure(home, idle_seconds=2)
    watcher = state(home)["pid"]
    time.sleep(4)
    assert alive(watcher)

    server.release()

    wait_for(lambda: not alive(watcher))
    assert not (home / "spark" / "server.json").exists()


@pytest.mark.soak("faults")
def test_a_server_that_lacks_jars_is_replaced(home: Path) -> None:
    """Jars that were installed meanwhile come with a new server, once only the process that needs them uses it."""
    jars = fetch(LAKE_JARS)
    other, ours = SparkServer.ensure(home), SparkServer.ensure(home, jars=jars)
    assert ours.remote == other.remote
    for format_ in FORMATS:
        lake = Lake(format_, home, ours.remote)
        with pytest.raises(SettingsError, match="deltaforge lake install"):
            lake.writer().commit(Staging(lake, "current").table(), 0, lambda: None)
        lake.close()
    ours.release()
    other.release()

    server = SparkServer.ensure(home, jars=jars)

    assert server.remote != other.remote
    assert SparkServer.ensure(home).remote == server.remote


def test_killed_server_is_replaced(home: Path) -> None:
    """A killed Java ends its watcher, a killed watcher ends Java, and a hanging one is killed."""
    first = SparkServer.ensure(home)
    watcher, port = state(home)["pid"], state(home)["port"]
    java = java_of(watcher)
    os.kill(java, signal.SIGKILL)
    wait_for(lambda: not alive(java) and not listens(port))  # threads of dead processes end later

    second = SparkServer.ensure(home)
    assert second.remote != first.remote
    ended = watcher
    wait_for(lambda: not alive(ended))

    watcher = state(home)["pid"]
    java = java_of(watcher)
    os.kill(watcher, signal.SIGKILL)
    wait_for(lambda: not alive(java))
    third = SparkServer.ensure(home)
    assert third.remote != second.remote

    for server in (first, second):
        server.release()
    watcher = state(home)["pid"]
    java = java_of(watcher)
    os.kill(java, signal.SIGSTOP)
    third.stop()
    wait_for(lambda: not alive(watcher) and not alive(java))


def test_a_process_that_is_stopped_while_it_looks(home: Path) -> None:
    """Whoever starts, replaces or stops the server keeps the lock for that; a server that runs can be used meanwhile."""
    first = SparkServer.ensure(home)
    with (home / "spark" / "start.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = SparkServer.ensure(home)  # would wait for ever
    assert second.remote == first.remote


def test_server_that_cannot_start(home: Path) -> None:
    """A server that ends at once is one error that names its log, and leaves no process."""
    with pytest.raises(SparkUnavailable, match=r"did not start: .*log: .*server\.log"):
        SparkServer.ensure(home, heap="1k")

    assert not (home / "spark" / "server.json").exists()


def test_no_java(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a usable Java the error says where it was looked for and how to get one."""
    monkeypatch.setattr(java, "NEWEST", 0)

    with pytest.raises(SettingsError, match=r"Spark and Kafka need Java 17 to 0: .*is Java \d"):
        SparkServer.ensure(home)


def test_a_server_that_is_still_starting_is_stopped(tmp_path: Path) -> None:
    """A starting server whose starter was killed is stopped at once by the next one."""
    folder, java_home = tmp_path / "spark", tmp_path / "java"
    folder.mkdir()
    (java_home / "bin").mkdir(parents=True)
    never_ready = java_home / "bin" / "java"
    never_ready.write_text("#!/bin/sh\nexec sleep 3600\n")
    never_ready.chmod(0o700)
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "deltaforge_dagster.installation.spark_server"]
    options = {"heap": "1g", "idle_seconds": 900, "jars": [], "class_list": None}
    command += [str(folder), str(java_home), str(writing), json.dumps(options)]
    with subprocess.Popen(command, pass_fds=[writing]) as watcher:
        try:
            lock = folder / "watcher.lock"
            wait_for(lambda: lock.exists() and lock.read_text() == str(watcher.pid))
            assert not (folder / "server.json").exists()

            SparkServer(folder, "sc://localhost", os.open(os.devnull, os.O_RDONLY)).stop()

            assert watcher.wait(60) == 0
        finally:
            watcher.kill()
            os.close(reading)
            os.close(writing)
