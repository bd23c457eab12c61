"""The Kafka sink as a kind of sink."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deltaforge_dagster.config.owned import CapturedTables, OwnedResource
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.kafka.sink_type import KafkaSinkConfig
from deltaforge_dagster.sinks.registry import MessageSinkType, SinkContext, SparkOptions
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # it needs the client library
    from deltaforge_dagster.sinks.kafka.sink import KafkaSink


class KafkaSinkType(MessageSinkType[KafkaSinkConfig]):
    """Topics of a Kafka cluster."""

    name = "kafka"
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
