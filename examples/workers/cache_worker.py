"""The worker of cache-invalidation.yaml: deletes the keys that changes have made stale.

    python examples/workers/cache_worker.py redis://localhost:6379

Workers share the stream as members of the consumer group `cache-workers`; start as many as you
like. An entry is acknowledged once its keys are gone; what a worker had and did not acknowledge,
because it died, is taken over after a minute. Deleting a key twice does no harm, so delivery at
least once is enough.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from typing import Any, cast

import redis

GROUP = "cache-workers"
COUNT = 100
BLOCK_MS = 5000
SOCKET_SECONDS = 60
"""Longer than the server may wait, or what it hands out at the last moment is lost on its way."""
ABANDONED_MS = 60_000

Entries = list[tuple[str, dict[str, str] | None]]

logger = logging.getLogger("cache-worker")


def main() -> None:
    """Work until somebody ends the process."""
    parser = argparse.ArgumentParser(description="Delete the keys that changes have made stale.")
    parser.add_argument("uri", help="redis://host:port/database")
    parser.add_argument("--stream", default="cache:invalidations")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    client = redis.Redis.from_url(
        arguments.uri, decode_responses=True, socket_timeout=SOCKET_SECONDS
    )
    consumer = f"worker-{os.getpid()}"
    while True:
        try:
            make_group(client, arguments.stream)
            while True:
                work(client, arguments.stream, consumer)
        except redis.RedisError as error:
            logger.warning("tried again in a second: %s", error)
            time.sleep(1)


def make_group(client: redis.Redis, stream: str) -> None:
    """Make the group, which begins with the stream's first entry, unless it exists."""
    try:
        client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    except redis.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise


def work(client: redis.Redis, stream: str, consumer: str) -> None:
    """Do what has come; when nothing comes, what others have left behind."""
    answer: Any = client.xreadgroup(GROUP, consumer, {stream: ">"}, count=COUNT, block=BLOCK_MS)
    if answer:
        [(_, entries)] = answer
    else:
        claimed: Any = client.xautoclaim(stream, GROUP, consumer, ABANDONED_MS, count=COUNT)
        entries = claimed[1]
    for entry_id, fields in cast("Entries", entries):
        if fields is not None:  # it was trimmed before anybody read it
            invalidate(client, json.loads(fields["df-event"]))
        client.xack(stream, GROUP, entry_id)


def invalidate(client: redis.Redis, event: dict[str, Any]) -> None:
    """Delete the keys that an event names; one with `*` in it stands for all that match."""
    row = event["after"] or event["before"] or {}
    keys = row.get("_cache_keys", [])
    for key in keys:
        if "*" in key:
            for found in client.scan_iter(match=key, count=1000):
                client.delete(found)
        else:
            client.delete(key)
    if keys:
        table, strategy = event["source"]["table"], row["_invalidation_strategy"]
        logger.info("%s %s: %d keys, %s", event["op"], table, len(keys), strategy)


if __name__ == "__main__":
    main()
