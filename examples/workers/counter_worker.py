"""The worker of ecommerce-analytics.yaml: counts events and sales by the hour, as they happen.

    python examples/workers/counter_worker.py redis://localhost:6379

    stats:events:{hour}          how many events of each type; forgotten after 25 hours
    stats:orders:count:{hour}    new orders
    stats:orders:revenue:{hour}  their totals
    stats:orders:channel:{day}   how many came through each channel
    alerts:high_value_orders     the last 100 large orders, newest first

Hours are UTC, `2026:3:9:14`, and those of the changes, not of the counting. An entry is counted in
one transaction with the place in the stream: a worker that is started again goes on where it stood.
The stream has a change at least once; where twice is wrong, set `exactly_once: true` on the sink.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import time
from typing import Any

import redis

COUNT = 100
BLOCK_MS = 1000
SOCKET_SECONDS = 60
EVENTS_SECONDS = 90_000
ALERTS = 100
PLACE = "stats:place"
"""Key of the id of the last entry that is counted."""

logger = logging.getLogger("counter-worker")


def main() -> None:
    """Count until somebody ends the process."""
    parser = argparse.ArgumentParser(description="Count events and sales by the hour.")
    parser.add_argument("uri", help="redis://host:port/database")
    parser.add_argument("--stream", default="analytics:realtime")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # The client itself repeats nothing: a transaction whose answer is lost may have counted.
    client = redis.Redis.from_url(
        arguments.uri, decode_responses=True, socket_timeout=SOCKET_SECONDS, retry=None
    )
    while True:
        try:
            place: Any = client.get(PLACE) or "0"
            answer: Any = client.xread({arguments.stream: place}, count=COUNT, block=BLOCK_MS)
            for _, entries in answer or []:
                for entry_id, fields in entries:
                    with client.pipeline(transaction=True) as steps:
                        count(steps, json.loads(fields["df-event"]))
                        steps.set(PLACE, entry_id)
                        steps.execute()
        except redis.RedisError as error:
            logger.warning("tried again in a second: %s", error)
            time.sleep(1)


def count(steps: redis.client.Pipeline, event: dict[str, Any]) -> None:
    """Add what counts an event to the steps of a transaction."""
    row = event["after"]
    if not row or "_analytics" not in row:
        return
    at = dt.datetime.fromtimestamp(event["ts_ms"] / 1000, dt.UTC)
    day = f"{at.year}:{at.month}:{at.day}"
    hour = f"{day}:{at.hour}"
    analytics = row["_analytics"]
    steps.hincrby(f"stats:events:{hour}", analytics["event_type"], 1)
    steps.expire(f"stats:events:{hour}", EVENTS_SECONDS)
    if analytics["event_type"] == "orders.created":
        steps.incr(f"stats:orders:count:{hour}")
        steps.incrbyfloat(f"stats:orders:revenue:{hour}", analytics["metrics"]["order_total"])
        steps.hincrby(f"stats:orders:channel:{day}", analytics["dimensions"]["channel"], 1)
    if "high_value" in event["tags"]:
        alert = json.dumps({"order_id": row["id"], "total": row["total"]})
        steps.lpush("alerts:high_value_orders", alert)
        steps.ltrim("alerts:high_value_orders", 0, ALERTS - 1)
        logger.info("order %s: %s", row["id"], row["total"])


if __name__ == "__main__":
    main()
