"""Is each sink as a pipeline needs it: can it be reached, and is what it sends to there?

Asks with the pipeline's own credentials, and writes nothing: no message, no topic, no folder. Nor is there a
producer of transactions, which would end the one that is at work. Where only sending would show whether
the user has a right, or the file alone does not say where messages go, the finding says so.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
    TopicDescription,
)

from deltaforge_dagster.config import sinks
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.sinks.build import make_sink, transactional_id
from deltaforge_dagster.sinks.kafka_client import LOG
from deltaforge_dagster.sinks.kafka_errors import error_of, translated
from deltaforge_dagster.sinks.kafka_settings import Settings
from deltaforge_dagster.sinks.nats import NatsSink, subject_pattern
from deltaforge_dagster.sinks.nats_endpoint import addresses
from deltaforge_dagster.sinks.nats_rights import USER_INFO
from deltaforge_dagster.sinks.redis import RedisSink
from deltaforge_dagster.sources.findings import Finding, listed

_CONNECT_SECONDS = 5.0
"""For one of the five tries to connect; a run is more patient."""

_NO_TOPIC = "no such topic"
"""The name of no topic: Kafka allows no spaces in names."""

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
            found = [Finding(subject, "ok", _reached(config))]
            if isinstance(sink, RedisSink):
                found += _streams(subject, sink, names)
            elif isinstance(sink, NatsSink):
                found += _subjects(subject, sink, names)
        finally:
            sink.close()
        if isinstance(config, sinks.KafkaConfig):
            found += _topics(subject, config, pipeline, names)
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


def _streams(subject: str, sink: RedisSink, names: Sequence[str]) -> list[Finding]:
    """Say whether the user may write the streams, as far as the file says which they are."""
    streams = [name for name in names if not compile_template(name).variables]
    sink.rehearse(streams)
    found = []
    if streams:
        found.append(Finding(subject, "ok", f"the Redis user may write {listed(streams)}"))
    if len(streams) < len(names):
        found.append(_not_known(subject, "streams", set(names) - set(streams), "may be written"))
    return found


def _subjects(subject: str, sink: NatsSink, names: Sequence[str]) -> list[Finding]:
    """Say whether the user may publish, as far as the server tells."""
    rights = sink.rights()
    if rights is None:
        text = f"whether the NATS user may publish {listed(names)} only a message would show"
        remedy = f"let the user publish to {USER_INFO}, then the server tells"
        return [Finding(subject, "note", text, remedy)]
    patterns = {name: subject_pattern(compile_template(name)) for name in names}
    shares = {name: rights.of(pattern) for name, pattern in patterns.items()}
    none = [name for name, share in shares.items() if share == "none"]
    some = [name for name, share in shares.items() if share == "some"]
    found = []
    if none:
        text = f"the NATS user may not publish to {listed(none)}"
        remedy = f"allow it to publish to {listed([patterns[name] for name in none])}"
        found.append(Finding(subject, "error", text, remedy))
    if some:
        text = f"the NATS user may publish to some subjects of {listed(some)} only"
        remedy = f"allow it to publish to {listed([patterns[name] for name in some])}"
        found.append(Finding(subject, "warning", text, remedy))
    if not found:
        found.append(Finding(subject, "ok", f"the NATS user may publish to {listed(names)}"))
    return found


def _not_known(subject: str, what: str, names: Collection[str], question: str) -> Finding:
    """Return the finding for destinations that changes decide about."""
    shown = listed([repr(name) for name in sorted(names)])
    text = f"{what} {shown} depend on the changes: whether they {question} is not known"
    return Finding(subject, "note", text)


def _topics(
    subject: str, config: sinks.KafkaConfig, pipeline: str, names: Sequence[str]
) -> list[Finding]:
    """Look for the topics, as far as the file says which they are, and for what transactions need."""
    topics = [name for name in names if not compile_template(name).variables]
    found: list[Finding] = []
    if len(topics) < len(names):
        unknown = set(names) - set(topics)
        found.append(_not_known(subject, "topics", unknown, "are there and may be written"))
    if not topics and not config.exactly_once:
        return found
    secrets = {name: value.get_secret_value() for name, value in config.client_conf.items()}
    settings = Settings(config.id, config.brokers, secrets, _KAFKA_SECONDS, _KAFKA_SECONDS)
    try:
        admin = AdminClient(settings.connection(), logger=LOG)
        asked = {}
        if topics:
            asked = admin.describe_topics(
                TopicCollection(topics),
                include_authorized_operations=True,
                request_timeout=_KAFKA_SECONDS,
            )
    except KafkaException as error:
        raise translated(subject, error_of(error)) from None
    found += [_topic(admin, subject, topic, answer) for topic, answer in asked.items()]
    if config.exactly_once:
        found += _transactions(admin, subject, transactional_id(pipeline, config.id))
    return found


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
        remedy = f"kafka-acls --add --allow-principal User:... --operation Write --topic {topic}"
        return Finding(subject, "error", text, remedy)
    count = len(described.partitions)
    partitions = pluralize(count, "partition")
    return Finding(subject, "ok", f"topic {topic!r} is there, with {partitions}")


def _missing_topic(admin: AdminClient, subject: str, topic: str) -> Finding:
    """Say who has to make the topic: the brokers may do it, and may not tell."""
    text = f"topic {topic!r} does not exist"
    remedy = f"kafka-topics --create --topic {topic}"
    made = _brokers_make_topics(admin)
    if made is None:
        text += (
            "; whether the brokers make it (auto.create.topics.enable) they do not tell this user"
        )
        return Finding(subject, "warning", text, remedy)
    if made:
        return _topic_to_make(admin, subject, topic, text)
    return Finding(subject, "error", f"{text}, and the brokers do not make topics", remedy)


def _topic_to_make(admin: AdminClient, subject: str, topic: str, text: str) -> Finding:
    """Say whether the user may let the brokers make a topic; they look, and make none."""
    asked = admin.create_topics(
        [NewTopic(topic)], validate_only=True, request_timeout=_KAFKA_SECONDS
    )
    try:
        asked[topic].result()
    except KafkaException as exception:
        error = error_of(exception)
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            text += ", and the Kafka user may not have the brokers make it"
            remedy = (
                f"kafka-acls --add --allow-principal User:... --operation Create --topic {topic}"
            )
            return Finding(subject, "error", text, remedy)
        text += f"; the brokers make topics, but would not make this one: {error.str()}"
        return Finding(subject, "warning", text, f"kafka-topics --create --topic {topic}")
    text += (
        " yet; the brokers make it with the first message, which shows whether it may be written"
    )
    return Finding(subject, "note", text)


def _transactions(admin: AdminClient, subject: str, name: str) -> list[Finding]:
    """Say whether the sink's position may be kept; of transactions, only beginning one would tell."""
    text = f"whether the Kafka user may use transactional id {name!r} only a transaction would show"
    remedy = (
        "kafka-acls --add --allow-principal User:... --operation Write --operation Describe"
        f" --transactional-id {name}"
    )
    found = [Finding(subject, "note", text, remedy)]
    if _may_not_commit(admin, name):
        text = f"the Kafka user may not keep the sink's position in consumer group {name!r}"
        remedy = f"kafka-acls --add --allow-principal User:... --operation Read --operation Describe --group {name}"
        found.append(Finding(subject, "error", text, remedy))
    return found


def _may_not_commit(admin: AdminClient, group: str) -> bool:
    """Say whether the user lacks the rights to commit offsets of a group.

    The brokers are asked to keep an offset of a topic that cannot exist. They refuse that in any case, but check
    the rights to the group first. Neither group nor offset is made.
    """
    offsets = ConsumerGroupTopicPartitions(group, [TopicPartition(_NO_TOPIC, 0, 0)])
    asked = admin.alter_consumer_group_offsets([offsets], request_timeout=_KAFKA_SECONDS)
    try:
        kept = asked[group].result().topic_partitions
    except KafkaException as exception:
        return error_of(exception).code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    return any(
        one.error is not None and one.error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        for one in kept
    )


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
