"""Build the chain of processors of a pipeline file, and find what keeps it from being built."""

from __future__ import annotations

from deltaforge_dagster.config.model import Batch, PipelineSpec
from deltaforge_dagster.pipeline.encode.messages import source_origin
from deltaforge_dagster.processors.chain import CALL_BYTES, CALL_ROWS, ChainSpec
from deltaforge_dagster.processors.code import code_of
from deltaforge_dagster.sinks.registry import SinkContext, sink_types


def chain_of(spec: PipelineSpec) -> ChainSpec:
    """Return the chain of a pipeline's processors."""
    batch = spec.spec.batch or Batch()
    return ChainSpec(
        spec.spec.processors,
        source_origin(spec),
        max_rows=batch.max_events or CALL_ROWS,
        max_bytes=batch.max_bytes or CALL_BYTES,
        code=code_of(spec.spec.processors),
    )


def build_problems(spec: PipelineSpec) -> list[str]:
    """Return what keeps a pipeline's sinks or processors from being built, one line each.

    Has the sinks' client libraries validate their settings, parses scripts, and imports Python
    functions.
    """
    context = SinkContext(spec.metadata.name, spec.spec.engine.run)
    problems = [
        problem
        for sink in spec.spec.sinks
        for problem in sink_types()[sink.type].problems(sink.config, context)
    ]
    for number, problem in chain_of(spec).problems():
        problems.append(f"spec.processors[{number}]: {problem}")
    return problems
