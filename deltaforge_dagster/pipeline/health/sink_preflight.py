"""Is each sink as a pipeline needs it: can it be reached, and is what it sends to there?

Asks with the pipeline's own credentials, and writes nothing. Where only sending would show whether the user has
a right, or the file alone does not say where messages go, the finding says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deltaforge_dagster.config.sinks.base import SinkBlock
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sinks.registry import SinkContext, sink_types
from deltaforge_dagster.sources.findings import Finding


def preflight(
    declared: Sequence[SinkBlock], pipeline: str, destinations: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """Return what is found at each sink, in the file's order; they are asked beside each other.

    Args:
        declared: The sinks, as the file has them.
        pipeline: Whose; part of their names on servers.
        destinations: By a sink's id where its messages go; what depends on changes is a template.
    """
    with ThreadPoolExecutor(max(1, len(declared)), "preflight") as threads:
        looks = [
            threads.submit(_preflight, sink, pipeline, destinations[sink.config.id])
            for sink in declared
        ]
        return [finding for look in looks for finding in look.result()]


def _preflight(declared: SinkBlock, pipeline: str, names: Sequence[str]) -> list[Finding]:
    kind, config = sink_types()[declared.type], declared.config
    try:
        return kind.preflight(config, SinkContext(pipeline, brief=True), names)
    except DeltaforgeError as error:
        subject = f"sink {config.id}"
        return [Finding(subject, "error", str(error).removeprefix(f"{subject}: "))]
