"""The data sources in a classic session, a process of its own: the manual's example, and retries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from deltaforge_dagster.installation.java import find_java
from deltaforge_lab.servers.redis import RedisServer

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.soak("versions")]

MANUAL = Path(__file__).parents[2] / "docs" / "spark.md"
ROWS = 20_000

SESSION = """
import sys
from pyspark.sql import SparkSession
(
    SparkSession.builder.master("local[2,4]")  # a task may fail three times
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.eventLog.enabled", "true")
    .config("spark.eventLog.compress", "false")
    .config("spark.eventLog.dir", sys.argv[1])
    .config("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
    .getOrCreate()
)
"""

RETRIED = f"""
import time
import redis
from pyspark import TaskContext


def once(batches):
    for number, batch in enumerate(batches):
        if number == 6 and TaskContext.get().attemptNumber() == 0:
            with redis.Redis.from_url(f"redis://:{{password}}@{{host}}/0", socket_timeout=None) as client:
                deadline = time.monotonic() + 60
                while not client.xlen(stream) and time.monotonic() < deadline:
                    time.sleep(0.05)
            raise RuntimeError("the first attempt")
        yield batch


host, password = os.environ["REDIS_HOST"], os.environ["REDIS_PASSWORD"]
for stream, exactly_once in (("least", "false"), ("once", "true")):
    rows = spark.range(0, {ROWS}, 1, 2).selectExpr("lpad(id, 400, '0') AS value")
    (
        rows.mapInArrow(once, "value string").write.format("deltaforge_redis")
        .options(uri=f"redis://:${{{{REDIS_PASSWORD}}}}@{{host}}/0", stream=stream)
        .options(exactly_once=exactly_once, job=f"job-{{stream}}")
        .mode("append").save()
    )
"""


@pytest.mark.timeout(600)
def test_in_a_classic_session(
    redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """The manual's example runs; tasks that failed amid their rows repeat, exactly once nothing.

    No password is in what Spark logs or records of its plans.
    """
    (example,) = re.findall(r"```python\n(import os.*?)```", MANUAL.read_text(), re.DOTALL)
    script, events = tmp_path / "job.py", tmp_path / "events"
    script.write_text(SESSION + example + RETRIED)
    events.mkdir()
    address = urlsplit(redis_server.uri)
    assert address.password
    outcome = subprocess.run(
        [sys.executable, str(script), str(events)],
        env={
            **os.environ,
            "JAVA_HOME": str(find_java()),
            "PYSPARK_PYTHON": sys.executable,  # else workers take the first python3 of the path
            "REDIS_HOST": f"{address.hostname}:{address.port}",
            "REDIS_PASSWORD": address.password,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]

    def entries(stream: str) -> list[dict[str, str]]:
        found: Any = redis_client.xrange(stream)
        return [fields for _, fields in found]

    assert len(entries("orders")) == 1000
    for stream in ("least", "once"):
        sent = entries(stream)
        ids = Counter(one["event_id"] for one in sent)
        assert len(ids) == ROWS
        assert all(
            len({one["df-event"] for one in sent if one["event_id"] == id_}) == 1
            for id_ in list(ids)[:20]
        )
        for half in (range(ROWS // 2), range(ROWS // 2, ROWS)):
            arrived = [n for one in sent if (n := int(one["df-event"])) in half]
            assert list(dict.fromkeys(arrived)) == list(half)
        assert (len(sent) > ROWS) == (stream == "least")
    assert 0 < redis_client.ttl("deltaforge:position:spark-job-once:partition-0") <= 7 * 24 * 3600

    recorded = "".join(path.read_text() for path in events.rglob("*") if path.is_file())
    assert "the first attempt" in recorded
    for text in (recorded, outcome.stdout, outcome.stderr):
        assert address.password not in text
