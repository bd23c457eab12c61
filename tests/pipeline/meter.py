"""What a run uses: processes, files, threads and connections, here and on the servers."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import redis

from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed


@dataclass(frozen=True)
class Usage:
    """What is in use, here and on the servers."""

    spark_processes: int
    open_files: int
    threads: tuple[str, ...]
    postgres_connections: int
    redis_connections: int
    encoded_files: int


class Meter:
    """Counts what a feed uses, from when the meter was made.

    The feed's Spark server is nobody else's: the Python processes of other sessions come and go.
    """

    def __init__(self, feed: Feed, spark: SparkAddress) -> None:
        self._feed = feed
        token = re.search(r"token=([^;]+)", spark.remote)
        self._marker = b"" if token is None else token[1].encode()

    def settled(self) -> Usage:
        """Return the usage once it has stayed the same for a second."""
        before, same = self._usage(), 0
        deadline = time.monotonic() + 60
        while same < 4 and time.monotonic() < deadline:
            time.sleep(0.25)
            now = self._usage()
            same = same + 1 if now == before else 0
            before = now
        return before

    def _usage(self) -> Usage:
        gc.collect()
        shop = self._feed.shop
        with psycopg.connect(shop.dsn) as connection:
            (backends,) = connection.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone() or (0,)
        with redis.Redis.from_url(shop.redis_uri) as client:
            clients = len(client.client_list()) - 1
        prepared = self._feed.opened.settings.home / "journal" / "feed" / "prepared"
        return Usage(
            spark_processes=len(self._spark_processes()),
            open_files=sum(1 for _ in _open_files()),
            threads=tuple(sorted(_threads())),
            postgres_connections=backends,
            redis_connections=clients,
            encoded_files=sum(len(files) for *_, files in os.walk(prepared)),
        )

    def _spark_processes(self) -> set[int]:
        """Return the Python processes that the server has started: parents and workers."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes()
                if b"spark_daemon" in command and self._marker in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
            except OSError:
                continue
        return found


def _open_files() -> Iterator[str]:
    """Yield what this process has open, but for the state store's files and the Spark server's lock.

    Each connection of the store's pool has two, and the pool grows to its bound when threads happen to
    meet, whatever the number of ranges. A run says with the lock that its process needs the
    server, until the process ends.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # the one that listed the directory
            continue
        if not target.endswith("/clients.lock") and "/state.db" not in target:
            yield target


def _threads() -> Iterator[str]:
    """Yield the names of our threads; those of gRPC and PySpark come and go."""
    for thread in threading.enumerate():
        if not thread.name.startswith(("Dummy-", "ThreadPoolExecutor-")):
            yield thread.name
