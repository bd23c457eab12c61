"""The sinks as data sources of Spark: what arrives, what is refused, and what Spark may show."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.spark import register
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from deltaforge_lab.servers.redis import RedisServer
from tests.fix_kafka import read_topic
from tests.fix_nats import Admin

pytestmark = pytest.mark.spark


def uri_of(server: RedisServer) -> tuple[str, str]:
    """Return a server's URI with `${PW}` for its password, and that."""
    password = urlsplit(server.uri).password or ""
    return server.uri.replace(password, "${PW}"), password


def write(rows: DataFrame, kind: str, **options: str) -> None:
    """Write rows."""
    rows.write.format(f"deltaforge_{kind}").options(**options).mode("append").save()


@pytest.mark.redis
def test_rows_arrive_in_redis(
    spark: SparkSession, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    """Every column is where a pipeline's message has it; ids are of job, partition and row."""
    uri, password = uri_of(redis_server)
    register(spark, secrets={"PW": password})
    rows = spark.range(0, 25_000, 1, 2).selectExpr(
        "cast(id AS string) AS value",
        "concat('k', id % 7) AS key",
        "if(id % 2 = 0, NULL, 'odd') AS destination",
        "if(id < 2, map('h', 'ä'), NULL) AS headers",
    )
    write(rows, "redis", uri=uri, stream="even", job="j1", send_timeout_secs="20")

    found: Any = redis_client.xrange("even")
    even = [fields for _, fields in found]
    assert sorted(int(one["df-event"]) for one in even) == list(range(0, 25_000, 2))
    for half in (range(0, 12_500, 2), range(12_500, 25_000, 2)):  # a partition is in order
        assert [n for one in even if (n := int(one["df-event"])) in half] == list(half)
    first = next(one for one in even if one["df-event"] == "0")
    assert first == {
        "event_id": "j1-0-0",
        "idempotency_key": "j1-0-0",
        "df-event": "0",
        "df-key": "k0",
        "df-headers": '{"h":"ä"}',
    }
    assert len({one["event_id"] for one in even}) == 12_500
    assert redis_client.xlen("odd") == 12_500


@pytest.mark.kafka
def test_rows_arrive_in_kafka(spark: SparkSession, kafka_server: KafkaServer) -> None:
    """Once for each job's name, tombstones and headers too: written again nothing is sent again."""
    topic = f"df_{secrets.token_hex(6)}"
    kafka_server.create_topic(topic)
    register(spark)
    rows = spark.range(0, 1000, 1, 2).selectExpr(
        "concat('k', id) AS key",
        "if(id = 3, NULL, cast(id AS string)) AS value",
        """if(id = 3, '{"h":"x"}', NULL) AS headers""",
        "concat('e', id) AS event_id",
    )
    options = {"brokers": kafka_server.brokers, "topic": topic, "client_conf.linger.ms": "1"}
    for job in ("a", "a", "b"):
        write(rows, "kafka", job=f"{topic}-{job}", exactly_once="true", **options)

    found = read_topic(kafka_server.brokers, topic)
    assert len(found) == 2_000
    tombstones = [one for one in found if one.value is None]
    assert [one.key for one in tombstones] == [b"k3", b"k3"]
    assert tombstones[0].headers == (("h", b"x"),)


@pytest.mark.nats
def test_rows_arrive_in_nats(
    spark: SparkSession, nats_server: NatsServer, nats_admin: Admin, nats_stream: str
) -> None:
    """A job written again under its name is the same messages to the stream: it drops them."""
    parts = urlsplit(nats_server.url)
    secret = parts.password or parts.username or ""
    register(spark, secrets={"PW": secret})
    url = nats_server.url.replace(secret, "${PW}") if secret else nats_server.url
    rows = spark.range(0, 1000, 1, 2).selectExpr(
        "cast(id AS string) AS value", f"if(id < 500, NULL, '{nats_stream}.b') AS destination"
    )
    for _ in range(2):
        options = {"url": url, "subject": f"{nats_stream}.a", "stream": nats_stream}
        write(rows, "nats", job="j", **options)

    assert nats_admin.values(nats_stream, f"{nats_stream}.a") == [str(n) for n in range(500)]
    assert len(nats_admin.values(nats_stream)) == 1000


@pytest.mark.parametrize(
    ("query", "options", "said"),
    [
        ("'x' AS value", {}, "option 'uri' is required"),
        ("'x' AS value", {"uri": "${URI}"}, "option 'stream' or a column 'destination' is needed"),
        ("'x' AS value", {"stream": "s", "strean": "s"}, "option 'strean' is unknown"),
        ("'x' AS value", {"stream": "s", "key": "k"}, "option 'key' is unknown"),
        ("'x' AS value", {"stream": "s", "job": "a b"}, "option 'job' must be 1 to 100 letters"),
        ("'x' AS v", {"stream": "s"}, "column 'v' is unknown"),
        ("id AS value", {"stream": "s"}, "column 'value' is bigint; it must be string"),
        (
            "'x' AS value; map('a', 1) AS headers",
            {"stream": "s"},
            "must be map<string,string> or string",
        ),
        (
            "cast(NULL AS string) AS value",
            {"stream": "s", "uri": "${URI}"},
            "row 0 .* has no value",
        ),
        ("'x' AS value", {"stream": "${source.table}", "uri": "${URI}"}, "rows are not events"),
        (
            "'x' AS value",
            {"stream": "s", "uri": "${URI}", "send_timeout_secs": "soon"},
            "option 'send_timeout_secs'",
        ),
        ("'x' AS value", {"stream": "s", "uri": "redis://${NONE}"}, "environment variable NONE"),
    ],
)
def test_mistakes_are_named(
    spark: SparkSession, query: str, options: dict[str, str], said: str
) -> None:
    """What is wrong with options and columns is one sentence at the end of Spark's error."""
    register(spark, secrets={"URI": "redis://127.0.0.1:1/0"})
    if "uri" not in options and options:
        options = {"uri": "${URI}", **options}
    if not options:
        options = {"stream": "s"}
    with pytest.raises(PySparkException, match=rf"deltaforge_redis: .*{said}"):
        write(spark.range(1).selectExpr(*query.split(";")), "redis", **options)


def test_appended_only(spark: SparkSession) -> None:
    """Overwriting is refused: it would mean to delete streams."""
    register(spark)
    rows = spark.range(1).selectExpr("'x' AS value").write.format("deltaforge_redis")
    with pytest.raises(PySparkException, match="only appended"):
        rows.options(stream="s", uri="redis://h").mode("overwrite").save()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("redis", {"uri": "redis://:sesame@127.0.0.1:1/0"}),
        ("redis", {"uri": "redis://a:${X}sesame@127.0.0.1:1/0"}),
        ("kafka", {"brokers": "b", "client_conf.sasl.password": "sesame"}),
        ("nats", {"url": "nats://sesame@127.0.0.1:1", "subject": "s"}),
        ("nats", {"url": "nats://h", "subject": "s", "token": "sesame"}),
    ],
)
def test_literal_secrets_are_refused(
    spark: SparkSession, kind: str, options: dict[str, str]
) -> None:
    """A password that Spark would show is refused, with where to put it, and not repeated."""
    register(spark)
    rows = spark.range(1).selectExpr("'x' AS value", "'d' AS destination")
    with pytest.raises(PySparkException, match="holds a secret") as caught:
        write(rows, kind, **options)
    assert "sesame" not in str(caught.value)


@pytest.mark.redis
def test_a_sinks_error_is_shown_without_its_secret(
    spark: SparkSession, redis_server: RedisServer
) -> None:
    """Spark's error has the sentence of the sink; a wrong password fails at once, unseen."""
    uri, _ = uri_of(redis_server)
    register(spark, secrets={"PW": "sesame"})
    with pytest.raises(PySparkException, match=r"AuthFailed: sink partition-\d+: ") as caught:
        write(spark.range(1).selectExpr("'x' AS value"), "redis", uri=uri, stream="s")
    assert "sesame" not in str(caught.value)
