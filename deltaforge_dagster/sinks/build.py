"""From a pipeline file to a sink."""

from __future__ import annotations

import os
from pathlib import Path

from deltaforge_dagster.config import model
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import NotAllowed, SpecError
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.faulty import VARIABLE, FaultySink
from deltaforge_dagster.sinks.file import FileSink
from deltaforge_dagster.sinks.kafka import KafkaSink
from deltaforge_dagster.sinks.redis import RedisSink


def build_sink(spec: model.PipelineSpec, sink_id: str) -> Sink:
    """Return the sink of that id, not yet open.

    Raises:
        NotAllowed: The pipeline has no such sink.
    """
    declared = {sink.config.id: sink for sink in spec.spec.sinks}
    if sink_id not in declared:
        raise NotAllowed(f"{spec.metadata.name}: there is no sink {sink_id!r}")
    sink = _build(declared[sink_id], spec.metadata.name, spec.spec.engine.run)
    faults = os.environ.get(VARIABLE)
    return FaultySink(sink, sink_id, Path(faults)) if faults else sink


def problems(spec: model.PipelineSpec) -> list[str]:
    """Return what is wrong with a pipeline's sinks that their libraries know without connecting."""
    found = []
    for declared in spec.spec.sinks:
        sink = _build(declared, spec.metadata.name, spec.spec.engine.run)
        if isinstance(sink, KafkaSink):
            try:
                sink.check()
            except SpecError as error:
                found.append(str(error))
    return found


def _build(declared: model.Sink, pipeline: str, run: model.RunLimits) -> Sink:
    config = declared.config
    if isinstance(config, model.KafkaConfig):
        return KafkaSink(
            config.id,
            config.brokers,
            {name: value.get_secret_value() for name, value in config.client_conf.items()},
            send_timeout=config.send_timeout_secs,
            lease_seconds=run.lease_seconds - run.renew_seconds,
            transactional_id=f"deltaforge-{pipeline}-{config.id}" if config.exactly_once else None,
        )
    if isinstance(config, model.FileConfig):
        return FileSink(config.id, compile_template(config.path))
    return RedisSink(
        config.id,
        config.uri.get_secret_value(),
        connect_timeout=config.connect_timeout_secs,
        send_timeout=config.send_timeout_secs,
        batch_timeout=config.batch_timeout_secs,
        position_key=f"deltaforge:position:{pipeline}:{config.id}" if config.exactly_once else None,
        name=f"deltaforge:{pipeline}:{config.id}",
    )
