"""Builds the sinks that a pipeline file declares."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from deltaforge_dagster.config.sinks.base import SinkBlock
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.faulty import VARIABLE, FaultySink
from deltaforge_dagster.sinks.registry import SinkContext, sink_types


def build_sink(declared: Iterable[SinkBlock], sink_id: str, context: SinkContext) -> Sink:
    """Return the sink with this id, not yet open.

    Args:
        declared: The sinks of a pipeline file.
        sink_id: Id of one of them.
        context: The pipeline.

    Raises:
        NotAllowed: The pipeline has no such sink.
        SpecError: The sink's configuration cannot work.
    """
    sinks = {one.config.id: one for one in declared}
    if sink_id not in sinks:
        raise NotAllowed(f"{context.pipeline}: there is no sink {sink_id!r}")
    block = sinks[sink_id]
    sink = sink_types()[block.type].build(block.config, context)
    faults = os.environ.get(VARIABLE)
    return FaultySink(sink, sink_id, Path(faults)) if faults else sink
