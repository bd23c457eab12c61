"""Builds the sinks for messages that a pipeline file declares."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from deltaforge_dagster.config.sinks import AvroEncoding, MessageSinkConfig, SinkBlock
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.registry import MessageSinkType, SinkContext, sink_types


def build_sink(declared: Iterable[SinkBlock], sink_id: str, context: SinkContext) -> Sink:
    """Return the sink with this id, not yet open.

    An entry point of the group `deltaforge.sink_wrappers` is named after an environment variable.
    Where that is set, the entry point's function wraps the sink, given the sink, its id and the
    variable's value.

    Args:
        declared: The sinks of a pipeline file.
        sink_id: Id of one of them.
        context: The pipeline.

    Raises:
        NotAllowed: The pipeline has no such sink, or it gets no messages.
        SpecError: The sink's configuration cannot work.
    """
    sinks = {sink_block.config.id: sink_block for sink_block in declared}
    if sink_id not in sinks:
        raise NotAllowed(f"{context.pipeline}: there is no sink {sink_id!r}")
    block = sinks[sink_id]
    kind = sink_types()[block.type]
    if not isinstance(kind, MessageSinkType):
        raise NotAllowed(
            f"sink {sink_id}: nothing can be sent to it, because {kind.name} sinks write tables"
        )
    assert isinstance(block.config, MessageSinkConfig)
    sink: Sink = kind.build(block.config, context)
    for wrapper in _wrappers():
        if value := os.environ.get(wrapper.name):
            sink = wrapper.load()(sink, sink_id, value)
    encoding = block.config.encoding
    if isinstance(encoding, AvroEncoding):
        # Imported here: most sinks need no registry.
        from deltaforge_dagster.sinks.schema_registry.client import (  # noqa: PLC0415
            SchemaRegistryClient,
        )
        from deltaforge_dagster.sinks.schema_registry.sink import AvroSink  # noqa: PLC0415

        sink = AvroSink(sink, SchemaRegistryClient(sink_id, encoding), encoding)
    return sink


@functools.cache
def _wrappers() -> tuple[EntryPoint, ...]:
    """Return the entry points that wrap sinks.

    Looking for them reads a file of each installed package.
    """
    return tuple(entry_points(group="deltaforge.sink_wrappers"))
