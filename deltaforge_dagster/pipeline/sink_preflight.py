"""Is each sink as a pipeline needs it: can it be reached, and is what it sends to there?

Asks with the pipeline's own credentials, and writes nothing: no message, no topic, no folder. Nor is there a
producer of transactions, which would end the one that is at work. So what only sending shows is not
seen: whether Redis lets the user write a stream, NATS publish to a subject, Kafka use a transactional id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    AdminClient,
    ConfigResource,
    ResourceType,
    TopicDescription,
)

from deltaforge_dagster.config import sinks
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.counted import counted
from deltaforge_dagster.sinks.build import make_sink
from deltaforge_dagster.sinks.kafka_client import LOG
from deltaforge_dagster.sinks.kafka_errors import error_of, translated
from deltaforge_dagster.sinks.kafka_settings import Settings
from deltaforge_dagster.sinks.nats_endpoint import addresses
from deltaforge_dagster.sources.findings import Finding

_CONNECT_SECONDS = 5.0
"""For one of the five tries to connect; a run is more patient."""

_KAFKA_SECONDS = 15.0
"""For each answer of Kafka's brokers."""


def preflight(
    declared: Sequence[sinks.Sink], pipeline: str, destinations: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """Return what is found at each sink, in the file's order; they are asked beside each other.

    Args:
        declared: The sinks, as the file has them.
        pipeline: Whose; part of their names on servers.
        destinations: By a sink's id where its messages go; what depends on changes is a template.
    """
    with ThreadPoolExecutor(max(1, len(declared)), "preflight") as threads:
        looks = [
            threads.submit(_look, sink, pipeline, destinations[sink.config.id]) for sink in declared
        ]
        return [finding for look in looks for finding in look.result()]


def _look(declared: sinks.Sink, pipeline: str, names: Sequence[str]) -> list[Finding]:
    config = declared.config
    subject = f"sink {config.id}"
    try:
        if isinstance(config, sinks.FileConfig):
            return [_folder(subject, config)]
        if isinstance(config, sinks.KafkaConfig):
            # Without transactions: to begin them would end the run that is at work.
            brief = {"send_timeout_secs": _KAFKA_SECONDS, "exactly_once": False}
        else:
            brief = {"connect_timeout_secs": min(_CONNECT_SECONDS, config.connect_timeout_secs)}
        hasty = declared.model_copy(update={"config": config.model_copy(update=brief)})
        sink = make_sink(hasty, pipeline, brief=True)
        try:
            sink.open()
        finally:
            sink.close()
        found = [Finding(subject, "ok", _reached(config))]
        if isinstance(config, sinks.KafkaConfig):
            found += _topics(subject, config, names)
    except DeltaforgeError as error:
        return [Finding(subject, "error", str(error).removeprefix(f"{subject}: "))]
    return found


def _reached(config: sinks.KafkaConfig | sinks.NatsConfig | sinks.RedisConfig) -> str:
    """Return where the sink is, without who we are there."""
    if isinstance(config, sinks.KafkaConfig):
        return f"kafka at {config.brokers} answers"
    if isinstance(config, sinks.NatsConfig):
        servers = ", ".join(map(str, addresses(config.id, config.url.get_secret_value())))
        if config.stream is None:
            return f"{servers} answers; without `stream` nothing is stored there"
        return f"{servers} answers; stream {config.stream!r} takes {config.subject!r}"
    place = config.uri.get_secret_value().rpartition("@")[2].rpartition("://")[2]
    return f"redis at {place.partition('?')[0]} answers"


def _folder(subject: str, config: sinks.FileConfig) -> Finding:
    """Say whether the first run can make the files; what the template begins with is known."""
    literal = compile_template(config.path).parts[0]
    wanted = Path(os.path.abspath(os.path.dirname(literal if isinstance(literal, str) else "")))  # noqa: PTH100, PTH120 - resolves no links
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not there.is_dir():
        return Finding(subject, "error", f"{there} is no directory", "correct the sink's path")
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"user {os.geteuid()} may not write in {there}"
        return Finding(subject, "error", text, f"chown {os.geteuid()} {there}")
    made = "" if there == wanted else " will be made"
    return Finding(subject, "ok", f"files in {wanted}{made}")


def _topics(subject: str, config: sinks.KafkaConfig, names: Sequence[str]) -> list[Finding]:
    """Look for the topics, as far as the file says which they are."""
    topics = [name for name in names if not compile_template(name).variables]
    found: list[Finding] = []
    if len(topics) < len(names):
        text = f"topics {config.topic!r} depend on the changes: whether they are there is not known"
        found.append(Finding(subject, "note", text))
    if not topics:
        return found
    secrets = {name: value.get_secret_value() for name, value in config.client_conf.items()}
    settings = Settings(config.id, config.brokers, secrets, _KAFKA_SECONDS, _KAFKA_SECONDS)
    try:
        admin = AdminClient(settings.connection(), logger=LOG)
        asked = admin.describe_topics(
            TopicCollection(topics),
            include_authorized_operations=True,
            request_timeout=_KAFKA_SECONDS,
        )
    except KafkaException as error:
        raise translated(subject, error_of(error)) from None
    return found + [_topic(admin, subject, topic, answer) for topic, answer in asked.items()]


def _topic(
    admin: AdminClient, subject: str, topic: str, answer: Future[TopicDescription]
) -> Finding:
    try:
        described = answer.result()
    except KafkaException as exception:
        error = error_of(exception)
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return _missing_topic(admin, subject, topic)
        return Finding(subject, "error", str(translated(f"topic {topic!r}", error)))
    allowed = described.authorized_operations
    if allowed is not None and AclOperation.WRITE not in allowed:
        text = f"topic {topic!r} is there, but the Kafka user may not write it"
        mend = f"kafka-acls --add --allow-principal User:... --operation Write --topic {topic}"
        return Finding(subject, "error", text, mend)
    count = len(described.partitions)
    partitions = counted(count, "partition")
    return Finding(subject, "ok", f"topic {topic!r} is there, with {partitions}")


def _missing_topic(admin: AdminClient, subject: str, topic: str) -> Finding:
    """Say who has to make the topic: the brokers may do it, and may not tell."""
    text = f"topic {topic!r} does not exist"
    mend = f"kafka-topics --create --topic {topic}"
    made = _brokers_make_topics(admin)
    if made is None:
        text += (
            "; whether the brokers make it (auto.create.topics.enable) they do not tell this user"
        )
        return Finding(subject, "warning", text, mend)
    if made:
        return Finding(subject, "note", f"{text} yet; the brokers make it with the first message")
    return Finding(subject, "error", f"{text}, and the brokers do not make topics", mend)


def _brokers_make_topics(admin: AdminClient) -> bool | None:
    """Say whether `auto.create.topics.enable` is on; None when we may not ask."""
    try:
        nodes = admin.describe_cluster(request_timeout=_KAFKA_SECONDS).result().nodes
        broker = ConfigResource(ResourceType.BROKER, str(nodes[0].id))
        asked = admin.describe_configs([broker], request_timeout=_KAFKA_SECONDS)
        setting = asked[broker].result()["auto.create.topics.enable"]
    except (KafkaException, KeyError, IndexError):
        return None
    return bool(setting.value == "true")
