"""Inspect a Kafka cluster before a run: topics, rights, and what transactions need.

Nothing is written: no topic is created, and no transaction begins, because that would fence the
producer of an active run. If only sending could show whether the user has a right, the finding says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

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

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.kafka.client import KafkaClientSettings
from deltaforge_dagster.sinks.kafka.librdkafka import LOGGER, error_of, translated
from deltaforge_dagster.sinks.kafka.sink_type import KafkaSinkConfig
from deltaforge_dagster.sinks.registry import not_known
from deltaforge_dagster.sources.findings import Finding

_NO_TOPIC = "no such topic"
"""The name of no topic: Kafka allows no spaces in names."""

SECONDS = 15.0
"""Timeout of each request to the brokers."""


def findings(
    config: KafkaSinkConfig, names: Sequence[str], transactional_id: str | None
) -> list[Finding]:
    """Return the findings for a sink's topics, and for its transactional id if it has one.

    Args:
        config: The sink.
        names: Its topics; those that depend on changes are templates.
        transactional_id: Its transactional id, also the name of the group that holds its position;
            None without transactions.

    Raises:
        DeltaforgeError: The client library refuses the settings.
    """
    subject = f"sink {config.id}"
    topics = [name for name in names if not compile_template(name).variables]
    report: list[Finding] = []
    if len(topics) < len(names):
        unknown = set(names) - set(topics)
        report.append(not_known(subject, "topics", unknown, "are there and may be written"))
    if not topics and transactional_id is None:
        return report
    secrets = {name: value.get_secret_value() for name, value in config.client_conf.items()}
    settings = KafkaClientSettings(config.id, config.brokers, secrets, SECONDS, SECONDS)
    try:
        admin = AdminClient(settings.connection(), logger=LOGGER)
        asked = {}
        if topics:
            asked = admin.describe_topics(
                TopicCollection(topics),
                include_authorized_operations=True,
                request_timeout=SECONDS,
            )
    except KafkaException as error:
        raise translated(subject, error_of(error)) from None
    report += [_topic(admin, subject, topic, answer) for topic, answer in asked.items()]
    if transactional_id is not None:
        report += _transactions(admin, subject, transactional_id)
    return report


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
    partitions = f"{count:,} partition{'' if count == 1 else 's'}"
    return Finding(subject, "ok", f"topic {topic!r} is there, with {partitions}")


def _missing_topic(admin: AdminClient, subject: str, topic: str) -> Finding:
    """Return the finding for a missing topic, which the brokers may create automatically."""
    text = f"topic {topic!r} does not exist"
    remedy = f"kafka-topics --create --topic {topic}"
    automatic = _brokers_make_topics(admin)
    if automatic is None:
        text += (
            "; whether the brokers make it (auto.create.topics.enable) they do not tell this user"
        )
        return Finding(subject, "warning", text, remedy)
    if automatic:
        return _topic_to_make(admin, subject, topic, text)
    return Finding(subject, "error", f"{text}, and the brokers do not make topics", remedy)


def _topic_to_make(admin: AdminClient, subject: str, topic: str, text: str) -> Finding:
    """Return the finding for a topic that the brokers create automatically.

    Creates no topic (`validate_only`).
    """
    asked = admin.create_topics([NewTopic(topic)], validate_only=True, request_timeout=SECONDS)
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
    """Return the findings for the transactional id and the group that holds the sink's position.

    The right to use the transactional id cannot be checked without beginning a transaction.
    """
    text = f"whether the Kafka user may use transactional id {name!r} only a transaction would show"
    remedy = (
        "kafka-acls --add --allow-principal User:... --operation Write --operation Describe"
        f" --transactional-id {name}"
    )
    report = [Finding(subject, "note", text, remedy)]
    if _may_not_commit(admin, name):
        text = f"the Kafka user may not keep the sink's position in consumer group {name!r}"
        remedy = (
            "kafka-acls --add --allow-principal User:... --operation Read --operation Describe"
            f" --group {name}"
        )
        report.append(Finding(subject, "error", text, remedy))
    return report


def _may_not_commit(admin: AdminClient, group: str) -> bool:
    """Return whether the user lacks the rights to commit offsets of a group.

    Tries to commit an offset for an invalid topic name. Brokers refuse that in any case, but check
    the rights on the group first. Neither group nor offset is created.
    """
    offsets = ConsumerGroupTopicPartitions(group, [TopicPartition(_NO_TOPIC, 0, 0)])
    asked = admin.alter_consumer_group_offsets([offsets], request_timeout=SECONDS)
    try:
        partitions = asked[group].result().topic_partitions
    except KafkaException as exception:
        return error_of(exception).code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    return any(
        partition.error is not None
        and partition.error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        for partition in partitions
    )


def _brokers_make_topics(admin: AdminClient) -> bool | None:
    """Return whether `auto.create.topics.enable` is on; None if the user may not read it."""
    try:
        nodes = admin.describe_cluster(request_timeout=SECONDS).result().nodes
        broker = ConfigResource(ResourceType.BROKER, str(nodes[0].id))
        asked = admin.describe_configs([broker], request_timeout=SECONDS)
        setting = asked[broker].result()["auto.create.topics.enable"]
    except (KafkaException, KeyError, IndexError):
        return None
    return bool(setting.value == "true")
