"""Check that each sink can be reached, and that the destinations of its messages exist.

Uses the pipeline's own credentials, and writes nothing. If only sending could prove a permission,
or if destinations depend on the changes, the finding says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deltaforge_dagster.config.sinks import AvroEncoding, MessageSinkConfig, SinkBlock
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sinks.registry import SinkContext, sink_types
from deltaforge_dagster.sinks.schema_registry import preflight as schema_registry
from deltaforge_dagster.sources.findings import Finding


def preflight(
    declared: Sequence[SinkBlock], context: SinkContext, destinations: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """Return the findings for each sink, in the file's order; sinks are checked concurrently.

    Args:
        declared: The sinks, as in the file.
        context: The pipeline; `brief` must be set.
        destinations: By sink id, the destinations of its messages; a template if they depend on
            changes.
    """
    with ThreadPoolExecutor(max(1, len(declared)), "preflight") as threads:
        futures = [
            threads.submit(_preflight, sink, context, destinations[sink.config.id])
            for sink in declared
        ]
        return [finding for future in futures for finding in future.result()]


def _preflight(declared: SinkBlock, context: SinkContext, names: Sequence[str]) -> list[Finding]:
    kind, config = sink_types()[declared.type], declared.config
    try:
        findings = kind.preflight(config, context, names)
    except DeltaforgeError as error:
        subject = f"sink {config.id}"
        findings = [Finding(subject, "error", str(error).removeprefix(f"{subject}: "))]
    if isinstance(config, MessageSinkConfig) and isinstance(config.encoding, AvroEncoding):
        findings = [*findings, *schema_registry.findings(config.id, config.encoding, names)]
    return findings
