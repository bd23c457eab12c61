"""A small program that `deltaforge bench pg-redis --peer` can measure: it adds each inserted row to a Redis stream.

It has its own slot, which remembers its place, and ends on SIGTERM, after it has sent what it has read.
"""

from __future__ import annotations

import os
import signal
import threading

import psycopg
import redis

NAME = "a_peer"

stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
table = os.environ["DELTAFORGE_BENCH_TABLE"]
destination = os.environ["DELTAFORGE_BENCH_DESTINATION"]

with (
    psycopg.connect(os.environ["DELTAFORGE_BENCH_SOURCE"], autocommit=True) as source,
    redis.Redis.from_url(os.environ["DELTAFORGE_BENCH_SINK"]) as sink,
):
    known = source.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [NAME])
    if known.fetchone() is None:
        source.execute(f"CREATE PUBLICATION {NAME} FOR TABLE {table}")
        source.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [NAME])
    while not stopped.wait(0.01):
        changes = source.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, 1, "
            "'proto_version', '1', 'publication_names', %s)",
            [NAME, NAME],
        )
        with sink.pipeline(transaction=False) as commands:
            for (message,) in changes:
                if message[:1] == b"I":
                    commands.xadd(destination, {"insert": message})
            commands.execute()
