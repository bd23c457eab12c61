"""The Kafka sink as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.owned import CapturedTables, OwnedResource
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.registry import MessageSinkType, SinkContext, SparkOptions
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # it needs the client library
    from deltaforge_dagster.sinks.kafka.sink import KafkaSink
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    SecretStr,
    field_serializer,
    model_validator,
)

from deltaforge_dagster.config.blocks import (
    AlsoAccepts,
    Seconds,
    TemplateText,
    Text,
    setting_text,
)
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks import MessageSinkConfig
from deltaforge_dagster.config.templates import compile_template

_BROKER = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@,\[\]]+)(?::(?P<port>\d{1,9}))?"
)

IS_TRUE = frozenset({"true", "t", "1"})
"""What librdkafka takes for true, in small letters."""
_IDEMPOTENT: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "acks": ("all", lambda text: text.lower() in {"all", "-1"}),
    "max.in.flight": ("at most 5", lambda text: not text.isdecimal() or int(text) <= 5),
    "retries": ("more than 0", lambda text: text != "0"),
}
"""What properties must be while the producer is idempotent, as librdkafka requires.

librdkafka itself names other mistakes in them.
"""
_ALIASES = {
    "request.required.acks": "acks",
    "max.in.flight.requests.per.connection": "max.in.flight",
    "message.send.max.retries": "retries",
}


def _brokers(text: str) -> str:
    for broker in text.split(","):
        match = _BROKER.fullmatch(broker.strip())
        if match is None or int(match["port"] or 1) not in range(1, 65_536):
            raise ValueError(
                "is not a list of Kafka brokers (write host:port,host:port; TLS and users stand "
                "under client_conf)"
            )
    return text


def _topic(text: str) -> str:
    for part in compile_template(text).parts:
        if isinstance(part, str) and not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            raise ValueError(
                "is not the name of a Kafka topic (only letters, digits, `.`, `_` and `-` are "
                "allowed)"
            )
    return text


class KafkaSinkConfig(MessageSinkConfig):
    """How to write to Kafka."""

    destination_field = "topic"
    takes_bytes = True

    brokers: Annotated[Text, AfterValidator(_brokers)]
    """`host:port,host:port`: some brokers of the cluster."""
    topic: Annotated[TemplateText, AfterValidator(_topic)]
    """Template of the topic's name.

    An event for which a variable cannot be resolved makes the sink fail until the file is changed.
    """
    tombstones: bool = False
    """Whether each delete is followed by a message with its key and no value, so that a topic with
    `cleanup.policy=compact` removes the row.
    """
    exactly_once: bool = False
    """Whether every batch is a transaction that also contains the sink's position: consumers with
    `isolation.level=read_committed` then see every change exactly once
    ([guarantees](guarantees.md#exactly-once)).
    """
    send_timeout_secs: Seconds = 30.0
    """How long the brokers may take to acknowledge messages."""
    client_conf: Mapping[
        str,
        Annotated[
            SecretStr,
            BeforeValidator(setting_text),
            AlsoAccepts({"type": ["number", "boolean"]}),
        ],
    ] = {}
    """[Properties of
    librdkafka](https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md):
    [users, passwords and certificates](kafka.md#logging-in), and [what the producer is set
    to](kafka.md#what-the-producer-is-set-to). They override what the sink sets itself.
    `message.timeout.ms` is never longer than the lease allows.
    """

    @model_validator(mode="after")
    def _check_idempotence(self) -> KafkaSinkConfig:
        conf = {name: value.get_secret_value() for name, value in self.client_conf.items()}
        idempotent = conf.get("enable.idempotence", "true").lower() in IS_TRUE
        if not idempotent and self.exactly_once:
            raise ValueError(
                "client_conf.enable.idempotence: must be true with `exactly_once` (leave it out)"
            )
        for name, text in conf.items() if idempotent else ():
            must, fits = _IDEMPOTENT.get(_ALIASES.get(name, name), ("", bool))
            if must and not fits(text):
                instead = (
                    "the order of messages needs it"
                    if self.exactly_once
                    else (
                        "or set `enable.idempotence: false` beside it, "
                        "if brokers may lose or reorder messages"
                    )
                )
                raise ValueError(f"client_conf.{name}: must be {must} (leave it out; {instead})")
        return self

    @field_serializer("client_conf")
    def _mask_client_conf(self, conf: Mapping[str, SecretStr]) -> dict[str, str]:
        return {
            name: "***" if SECRET_NAME.search(name) else mask(value.get_secret_value())
            for name, value in conf.items()
        }


class KafkaSinkType(MessageSinkType[KafkaSinkConfig]):
    """Topics of a Kafka cluster."""

    name = "kafka"
    sample: Mapping[str, Any] = {
        "brokers": "{{ env.KAFKA_BROKERS }}",
        "topic": "NAME.${source.table}",
    }
    summary = "A Kafka sink: each message is a record of a topic."
    config = KafkaSinkConfig
    destinations = "topics"
    default_key = "row"
    takes_tombstones = True
    where = frozenset({"brokers", "topic"})
    form = frozenset({"tombstones"})
    timing = frozenset({"send_timeout_secs"})
    spark = SparkOptions(without=frozenset({"tombstones"}))

    def build(self, config: KafkaSinkConfig, context: SinkContext) -> KafkaSink:
        """Return a sink, not yet open."""
        from deltaforge_dagster.sinks.kafka.sink import KafkaSink  # noqa: PLC0415 - client library

        name = _transactional_id(context.pipeline, config.id) if config.exactly_once else None
        return KafkaSink(
            config.id,
            config.brokers,
            {name: value.get_secret_value() for name, value in config.client_conf.items()},
            send_timeout=config.send_timeout_secs,
            lease_seconds=context.run.lease_seconds - context.run.renew_seconds,
            transactional_id=name,
        )

    def problems(self, config: KafkaSinkConfig, context: SinkContext) -> list[str]:
        """Return the properties in `client_conf` that the client library refuses."""
        try:
            self.build(config, context).check()
        except SpecError as error:
            return [str(error)]
        return []

    def exactly_once(self, config: KafkaSinkConfig) -> bool:
        """Return whether batches are transactions that contain the sink's position."""
        return config.exactly_once

    def traffic(self, config: KafkaSinkConfig) -> frozenset[str]:
        """Return what librdkafka reports, and transactions if there are any."""
        return frozenset({"retries"} | ({"commits", "aborts"} if config.exactly_once else set()))

    def tombstones(self, config: KafkaSinkConfig) -> bool:
        """Return whether a delete is followed by a record without a value."""
        return config.tombstones

    def preflight(
        self, config: KafkaSinkConfig, context: SinkContext, names: Sequence[str]
    ) -> list[Finding]:
        """Check that brokers answer, topics exist and may be written, and transaction rights."""
        from deltaforge_dagster.sinks.kafka import preflight  # noqa: PLC0415 - client library

        # Without transactions: initializing them would fence the producer of an active run.
        hasty = {"send_timeout_secs": preflight.SECONDS, "exactly_once": False}
        with contextlib.closing(self.build(config.model_copy(update=hasty), context)) as sink:
            sink.open()
        name = _transactional_id(context.pipeline, config.id) if config.exactly_once else None
        reached = Finding(f"sink {config.id}", "ok", f"kafka at {config.brokers} answers")
        return [reached, *preflight.findings(config, names, name)]

    def names(self, config: KafkaSinkConfig, pipeline: str) -> Mapping[str, str]:
        """Return the transactional id, which also names the group that holds the position."""
        name = _transactional_id(pipeline, config.id)
        return {"transactional id, group": name} if config.exactly_once else {}

    def owned(
        self,
        config: KafkaSinkConfig,
        pipeline: str,
        tables: CapturedTables,  # noqa: ARG002
    ) -> Sequence[OwnedResource]:
        """Return the transactional id: a producer that takes it over fences the other one."""
        cluster = ",".join(sorted(config.brokers.replace(" ", "").lower().split(",")))
        return OwnedResource.of_pipeline(self.names(config, pipeline), cluster)


def _transactional_id(pipeline: str, sink_id: str) -> str:
    """Return a sink's transactional id.

    The separator is a colon because both names may contain hyphens, but no colons.
    """
    return f"deltaforge-{pipeline}:{sink_id}"


KAFKA = KafkaSinkType()
