"""Builds the sinks that a pipeline file declares."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from deltaforge_dagster.config.engine.engine import RunLimits
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import sinks
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import NotAllowed, SpecError
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.sinks.nats.endpoint import Login
from deltaforge_dagster.sinks.nats.sink import NatsSink, subject_pattern
from deltaforge_dagster.sinks.redis.cluster import common_tag
from deltaforge_dagster.sinks.redis.sink import RedisSink

_WEEK = 7 * 24 * 3600


def build_sink(spec: PipelineSpec, sink_id: str) -> Sink:
    """Return the sink with this id, not yet open.

    An entry point of the group `deltaforge.sink_wrappers` is named after an environment variable. Where that is
    set, the entry point's function wraps the sink, given the sink, its id and the variable's value.

    Raises:
        NotAllowed: The pipeline has no such sink.
    """
    declared = {sink.config.id: sink for sink in spec.spec.sinks}
    if sink_id not in declared:
        raise NotAllowed(f"{spec.metadata.name}: there is no sink {sink_id!r}")
    sink = make_sink(declared[sink_id], spec.metadata.name, spec.spec.engine.run)
    for wrapper in entry_points(group="deltaforge.sink_wrappers"):
        if value := os.environ.get(wrapper.name):
            sink = wrapper.load()(sink, sink_id, value)
    return sink


def problems(spec: PipelineSpec) -> list[str]:
    """Return the configuration errors that the sinks' client libraries find without connecting."""
    found = []
    for declared in spec.spec.sinks:
        sink = make_sink(declared, spec.metadata.name, spec.spec.engine.run)
        if isinstance(sink, KafkaSink):
            try:
                sink.check()
            except SpecError as error:
                found.append(str(error))
    return found


def transactional_id(pipeline: str, sink_id: str) -> str:
    """Return a sink's transactional id in Kafka, also the name of the group that holds its position.

    The separator is a colon because both names may contain hyphens, but no colons.
    """
    return f"deltaforge-{pipeline}:{sink_id}"


def position_key(pipeline: str, sink_id: str) -> str:
    """Return the Redis key that holds a sink's position."""
    return f"deltaforge:position:{pipeline}:{sink_id}"


def make_sink(
    declared: sinks.Sink, pipeline: str, run: RunLimits | None = None, *, brief: bool = False
) -> Sink:
    """Return a sink of a pipeline, not yet open.

    Args:
        declared: The sink's part of the pipeline file.
        pipeline: Name of the pipeline; part of the names that the sink uses on servers.
        run: Limits of the runs that send with the sink; None for the defaults.
        brief: For a job that ends and of which several may run at once: a position in Redis expires
            after a week (Kafka's always does by default), and connections to Redis have no name.
    """
    run = run or RunLimits()
    config = declared.config
    if isinstance(config, sinks.KafkaConfig):
        return KafkaSink(
            config.id,
            config.brokers,
            {name: value.get_secret_value() for name, value in config.client_conf.items()},
            send_timeout=config.send_timeout_secs,
            lease_seconds=run.lease_seconds - run.renew_seconds,
            transactional_id=transactional_id(pipeline, config.id) if config.exactly_once else None,
        )
    if isinstance(config, sinks.NatsConfig):
        login = Login(
            config.credentials_file,
            config.username,
            None if config.password is None else config.password.get_secret_value(),
            None if config.token is None else config.token.get_secret_value(),
        )
        return NatsSink(
            config.id,
            config.url.get_secret_value(),
            subject_pattern(compile_template(config.subject)),
            login,
            stream=config.stream,
            exactly_once=config.exactly_once,
            name=f"deltaforge:{pipeline}:{config.id}",
            connect_timeout=config.connect_timeout_secs,
            send_timeout=config.send_timeout_secs,
            batch_timeout=config.batch_timeout_secs,
        )
    if isinstance(config, sinks.FileConfig):
        return FileSink(config.id, compile_template(config.path))
    return RedisSink(
        config.id,
        config.uri.get_secret_value(),
        connect_timeout=config.connect_timeout_secs,
        send_timeout=config.send_timeout_secs,
        batch_timeout=config.batch_timeout_secs,
        position_key=position_key(pipeline, config.id) if config.exactly_once else None,
        hash_tag=common_tag(compile_template(config.stream)),
        event_field=config.event_field,
        position_seconds=_WEEK if brief else None,
        name=None if brief else f"deltaforge:{pipeline}:{config.id}",
    )
