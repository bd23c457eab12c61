"""The look at sinks that `deltaforge check` takes, against real servers."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from pydantic import TypeAdapter

from deltaforge_dagster.config.model import Sink
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.pipeline.health.preflight import preflight_sinks
from deltaforge_dagster.sinks import registry as of_all
from deltaforge_dagster.sinks.build import build_sink
from deltaforge_dagster.sinks.kafka import preflight as of_kafka
from deltaforge_dagster.sinks.nats.stream import USER_INFO
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.testing.sinks import ORIGIN, allow, messages
from deltaforge_lab.servers.http import HttpServer
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.deployment import eventually
from tests.fix_kafka import StartKafka, read_topic
from tests.fix_nats import Admin, StartNats


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a busy machine take their time."""
    monkeypatch.setattr(of_all, "_CONNECT_SECONDS", 120.0)
    monkeypatch.setattr(of_kafka, "SECONDS", 300.0)


def declared(kind: str, **config: Any) -> SinkBlock:
    """Return a sink as a pipeline file has it."""
    adapter: TypeAdapter[SinkBlock] = TypeAdapter(Sink)
    return adapter.validate_python({"type": kind, "config": {"id": "out", **config}})


def preflight_of(kind: str, **config: Any) -> list[Finding]:
    """Return what is found at one sink."""
    one = declared(kind, **config)
    found = preflight_sinks(
        [one], SinkContext("shop", brief=True), {"out": [one.config.destination]}
    )
    assert {one.subject for one in found} == {"sink out"}
    return found


def levels(found: list[Finding]) -> list[str]:
    """Return how bad each point is."""
    return [one.level for one in found]


@pytest.mark.kafka
def test_a_topic_that_is_there_and_one_that_the_brokers_make(
    kafka_server: KafkaServer, kafka_topic: str
) -> None:
    """The first is as needed. The second is something to know, and the look does not make it."""
    missing = f"df_{secrets.token_hex(6)}"

    there = preflight_of("kafka", brokers=kafka_server.brokers, topic=kafka_topic)
    to_make = preflight_of("kafka", brokers=kafka_server.brokers, topic=missing)
    unknown = preflight_of("kafka", brokers=kafka_server.brokers, topic="cdc.${source.table}")

    assert levels(there) == ["ok", "ok"]
    assert there[1].text == f"topic {kafka_topic!r} is there, with 1 partition"
    assert levels(to_make) == ["ok", "note"]
    assert "the brokers make it with the first message" in to_make[1].text
    assert levels(unknown) == ["ok", "note"]
    admin = AdminClient({"bootstrap.servers": kafka_server.brokers})
    assert missing not in admin.list_topics(timeout=300).topics


@pytest.mark.kafka
def test_topics_that_cannot_be_written(
    start_kafka: StartKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody makes, one that may not be written, seen or made are errors."""
    server = start_kafka(
        {
            "auto.create.topics.enable": "false",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        }
    )
    for topic in ("read-only", "unseen"):
        server.create_topic(topic)
    rule(server, "read-only", ResourceType.TOPIC, AclPermissionType.ALLOW)
    rule(server, "unseen", ResourceType.TOPIC, AclPermissionType.DENY)

    missing = preflight_of("kafka", brokers=server.brokers, topic="nobodys")
    refused = preflight_of("kafka", brokers=server.brokers, topic="read-only")
    unseen = preflight_of("kafka", brokers=server.brokers, topic="unseen")

    assert levels(missing) == ["ok", "error"], missing
    assert missing[1].remedy == "kafka-topics --create --topic nobodys"
    assert levels(refused) == ["ok", "error"], refused
    assert "--operation Write --topic read-only" in str(refused[1].remedy)
    assert levels(unseen)[-1] == "error"
    assert "topic 'unseen'" in unseen[-1].text

    rule(server, "deltaforge-shop:out", ResourceType.GROUP, AclPermissionType.ALLOW)
    described = preflight_of(
        "kafka", brokers=server.brokers, topic="cdc.${source.table}", exactly_once=True
    )
    assert levels(described) == ["ok", "note", "note", "error"]
    assert "--operation Read" in str(described[-1].remedy)
    rule(server, "deltaforge-shop:out", ResourceType.GROUP, AclPermissionType.DENY)
    kept = preflight_of(
        "kafka", brokers=server.brokers, topic="cdc.${source.table}", exactly_once=True
    )
    assert levels(kept) == ["ok", "note", "note", "error"]
    assert "--operation Describe --group deltaforge-shop:out" in str(kept[-1].remedy)

    # As if these brokers made topics: whether they would, for this user, they are asked themselves.
    monkeypatch.setattr(of_kafka, "_brokers_make_topics", lambda _: True)
    rule(server, "forbidden", ResourceType.TOPIC, AclPermissionType.ALLOW)
    cluster = ("kafka-cluster", ResourceType.BROKER)
    rule(server, *cluster, AclPermissionType.ALLOW, AclOperation.ALL)
    rule(server, *cluster, AclPermissionType.DENY, AclOperation.CREATE)
    to_make = preflight_of("kafka", brokers=server.brokers, topic="nobodys")
    forbidden = preflight_of("kafka", brokers=server.brokers, topic="forbidden")
    assert levels(to_make) == ["ok", "note"], to_make
    assert levels(forbidden) == ["ok", "error"], forbidden
    assert "--operation Create --topic forbidden" in str(forbidden[1].remedy)
    topics = AdminClient({"bootstrap.servers": server.brokers}).list_topics(timeout=300).topics
    assert not {"nobodys", "forbidden"} & set(topics)


def rule(
    server: KafkaServer,
    name: str,
    kind: ResourceType,
    permission: AclPermissionType,
    operation: AclOperation = AclOperation.DESCRIBE,
) -> None:
    """Let everybody do one thing with something, and nothing else, or not even that."""
    admin = AdminClient({"bootstrap.servers": server.brokers})
    named = (kind, name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*")
    acl = AclBinding(*named, operation, permission)
    admin.create_acls([acl])[acl].result()
    wanted = AclBindingFilter(*named, operation, permission)
    eventually(lambda: admin.describe_acls(wanted).result())


@pytest.mark.kafka
def test_whoever_sends_exactly_once_goes_on(kafka_server: KafkaServer, kafka_topic: str) -> None:
    """A look at its sink does not end a producer of transactions."""
    config = {"brokers": kafka_server.brokers, "topic": kafka_topic, "exactly_once": True}
    pipeline = f"p{secrets.token_hex(6)}"
    sink = build_sink([declared("kafka", **config)], "out", SinkContext(pipeline))
    sink.open()
    sink.position()
    sink.send(messages([(kafka_topic, "{}")], origin=ORIGIN), allow)

    found = preflight_sinks(
        [declared("kafka", **config)], SinkContext(pipeline, brief=True), {"out": [kafka_topic]}
    )
    sink.send(messages([(kafka_topic, "{}")], first=1, origin=ORIGIN), allow)

    sink.close()
    assert levels(found) == ["ok", "ok", "note"]
    assert f"transactional id 'deltaforge-{pipeline}:out' only a transaction" in found[2].text
    assert len(read_topic(kafka_server.brokers, kafka_topic)) == 2


@pytest.mark.redis
def test_a_redis_server(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    """It answers, and nothing is written; a wrong password is an error that does not show it."""
    found = preflight_of("redis", uri=redis_server.uri, stream="orders", exactly_once=True)
    wrong = re.sub(r"//.*@", "//:geheim@", redis_server.uri)
    refused = preflight_of("redis", uri=wrong, stream="orders")

    assert levels(found) == ["ok", "ok"]
    assert found[1].text == "the Redis user may write orders"
    assert not redis_client.keys()
    assert "geheim" not in str(refused)
    if wrong != redis_server.uri:
        assert levels(refused) == ["error"]


@pytest.mark.redis
def test_streams_that_may_not_be_written(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    """The server looks at the command, at each stream and at the position's key, and writes nothing."""
    user = f"u{secrets.token_hex(4)}"
    uri = re.sub(r"//(.*@)?", f"//{user}:geheim@", redis_server.uri)
    position = "~deltaforge:position:* +watch +unwatch +get"

    def given(*rules: str, **config: Any) -> list[Finding]:
        redis_client.execute_command(
            "ACL", "SETUSER", user, "reset", "on", ">geheim", *" ".join(rules).split()
        )
        return preflight_of("redis", uri=uri, **config)

    sending = "~orders +multi +exec +hello"
    try:
        command = given(sending, stream="orders")
        stream = given(sending, "+xadd", stream="customers")
        may = given(sending, "+xadd", stream="orders")
        kept = given(sending, "+xadd", position, stream="orders", exactly_once=True)
        keeps = given(sending, "+xadd +set", position, stream="orders", exactly_once=True)
        unknown = given(sending, "+xadd", stream="cdc.${source.table}")
    finally:
        redis_client.execute_command("ACL", "DELUSER", user)

    assert levels(command) == levels(stream) == levels(kept) == ["error"]
    assert "ACL SETUSER <user> +xadd" in command[0].text
    assert "ACL SETUSER <user> ~customers" in stream[0].text
    assert "ACL SETUSER <user> +set" in kept[0].text
    assert levels(may) == levels(keeps) == ["ok", "ok"]
    assert levels(unknown) == ["ok", "note"]
    assert "'cdc.${source.table}' depend on the changes" in unknown[1].text
    assert not redis_client.keys()


@pytest.mark.nats
def test_streams_of_nats(nats_server: NatsServer, nats_admin: Admin, nats_stream: str) -> None:
    """One that takes the subject is as needed; none, and one that does not take it, are errors."""
    missing = f"df_{secrets.token_hex(6)}"

    there = preflight_of(
        "nats", url=nats_server.url, subject=f"{nats_stream}.a", stream=nats_stream
    )
    gone = preflight_of("nats", url=nats_server.url, subject=f"{missing}.a", stream=missing)
    other = preflight_of("nats", url=nats_server.url, subject=f"{missing}.a", stream=nats_stream)
    core = preflight_of("nats", url=nats_server.url, subject=f"{missing}.a")

    assert levels(there) == ["ok", "ok"]
    assert nats_admin.values(nats_stream) == []
    assert levels(gone) == ["error"]
    assert f"nats stream add {missing}" in gone[0].text
    assert levels(other) == ["error"]
    assert f"does not take '{missing}.a'" in other[0].text
    assert levels(core) == ["ok", "ok"]
    assert "nothing is stored" in core[0].text


USERS = f"""{{
  users: [
    {{ user: some, password: p, permissions: {{ publish: ["s.a", "t.>", "{USER_INFO}"], subscribe: "_INBOX.>" }} }}
    {{ user: but, password: p, permissions: {{ publish: {{ deny: ["t.secret.>"] }} }} }}
    {{ user: mute, password: p, permissions: {{ publish: "s.>", subscribe: "_INBOX.>" }} }}
  ]
}}"""


@pytest.mark.nats
def test_subjects_that_may_not_be_published_to(start_nats: StartNats) -> None:
    """The server tells who may ask it; of others only a message would show, and none is sent."""
    server = start_nats({"authorization": USERS})

    def given(user: str, subject: str) -> Finding:
        login = {"username": user, "password": "p"}
        reached, rights = preflight_of("nats", url=server.url, subject=subject, **login)
        assert reached.level == "ok"
        return rights

    assert given("some", "s.a").level == "ok"
    assert given("some", "t.${source.table}").level == "ok"
    assert given("some", "s.b").level == "error"
    assert given("some", "s.b").remedy == "allow it to publish to s.b"
    assert given("some", "u.${source.table}").remedy == "allow it to publish to u.>"
    assert given("some", "s.${source.table}").level == "warning"
    assert given("but", "t.${source.table}").level == "warning"
    assert given("but", "t.secret.${source.table}").level == "error"
    assert given("but", "anything").level == "ok"
    assert given("mute", "s.a").level == "note"
    assert "only a message would show" in given("mute", "s.a").text


def test_servers_that_are_not_there() -> None:
    """Each sink has its finding, in the file's order, whatever the others are."""
    given = [
        declared("redis", uri="redis://me:geheim@127.0.0.1:1", stream="s"),
        declared("nats", url="nats://geheim@127.0.0.1:1", subject="s"),
    ]
    found = preflight_sinks(given, SinkContext("shop", brief=True), {"out": ["s"]})

    assert levels(found) == ["error", "error"]
    assert "redis" in found[0].text
    assert "nats" in found[1].text
    assert "geheim" not in str(found)


def test_folders_of_files(tmp_path: Path) -> None:
    """The folder is there or can be made, and is not made; a file in its place is an error."""
    (tmp_path / "file").write_text("")

    there = preflight_of("file", path=f"{tmp_path}/a.jsonl")
    to_make = preflight_of("file", path=f"{tmp_path}/new/deep/${{source.table}}.jsonl")
    wrong = preflight_of("file", path=f"{tmp_path}/file/a.jsonl")

    assert [*levels(there), *levels(to_make), *levels(wrong)] == ["ok", "ok", "error"]
    assert to_make[0].text == f"files in {tmp_path}/new/deep will be made"
    assert not (tmp_path / "new").exists()
    assert wrong[0].text == f"{tmp_path}/file is no directory"


def test_an_http_server(http_server: HttpServer) -> None:
    """It is connected to, and no request is made; what is not known is said."""
    found = preflight_of("http", url=f"{http_server.url}/hooks/${{source.table}}")

    assert levels(found) == ["ok", "note"]
    assert found[0].text == f"{http_server.url} answers"
    assert "none was made" in found[1].text
    assert http_server.received == []
    anywhere = preflight_of("http", url="https://${tenant_id}.example.com/")
    assert levels(anywhere) == ["note"]
    nobody = preflight_of("http", url=f"http://127.0.0.1:{free_port()}/")
    assert levels(nobody) == ["error"]
    assert "refused" in nobody[0].text


def test_a_private_server_of_a_posted_pipeline(http_server: HttpServer) -> None:
    """It may be checked no more than called."""
    one = declared("http", url=http_server.url)
    context = SinkContext("shop", brief=True, posted=True)

    (found,) = preflight_sinks([one], context, {"out": [http_server.url]})

    assert found.level == "error"
    assert "allow_private: true" in found.text
