"""Preview: what a changed chain of processors would make of a range that is in the journal.

Spark's tasks run the chain over the captured rows, and compare its output with the recorded rows
that sinks get. Nothing is delivered, written or moved, and no lease is needed.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deltaforge_dagster.pipeline.control.closed_ranges import closed_range
from deltaforge_dagster.pipeline.process.chain_jobs import run_job
from deltaforge_dagster.pipeline.process.stages import read_report
from deltaforge_dagster.pipeline.replay.comparison import PreviewJob, ReplayDifference
from deltaforge_dagster.pipeline.replay.replay import check_contiguous
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.processors.chain import ChainSpec

_TASKS = 16


@dataclass(frozen=True, slots=True)
class Preview:
    """The result of a preview.

    Attributes:
        range: The range.
        events_in: Number of captured events.
        events_out: Number of events that the chain makes of them.
        processors: The counts of each processor, in the chain's order.
        difference: How the output differs from what sinks get of the range.
    """

    range: int
    events_in: int
    events_out: int
    processors: dict[str, Counter[str]]
    difference: ReplayDifference


def preview(
    context: RunContext,
    pipeline: str,
    number: int,
    chain: ChainSpec,
    *,
    sample: int = 5,
    values: bool = False,
) -> Preview:
    """Run a chain over a closed range, and compare its output with what sinks get of the range.

    Segments that were not processed (yet, or because the file had no processors then) are compared
    with what was captured.

    Args:
        context: The installation; a separate Spark session is used.
        pipeline: Name of the pipeline.
        number: The range.
        chain: The processors to try.
        sample: Maximum number of events of each kind to show.
        values: Whether to show their values.

    Raises:
        NotAllowed: There is no such range, or it is open.
        JournalDamaged: Files of the range are gone.
        ProcessorFailed: A processor failed.
        SpecError: A processor cannot be built.
        SparkUnavailable: Spark failed.
    """
    row = closed_range(context.store, pipeline, number)
    segments = context.store.segments.read(pipeline, first=row.first_segment, last=row.last_segment)
    check_contiguous(row, segments)
    paths = [(segment.path, segment.delivered.path) for segment in segments]
    job = PreviewJob(chain, str(uuid.uuid4()), context.journal.url, paths, sample, values)
    tasks = min(len(paths), _TASKS)
    with context.replay_sessions() as sessions:
        report = run_job(sessions, job, len(paths), tasks, f"range {number}")
    counts: dict[str, Counter[str]] = {processor.id: Counter() for processor in chain.processors}
    difference = ReplayDifference()
    for segment_report in read_report(report):
        for name, more in segment_report["processors"].items():
            counts[name].update(more)
        difference.add(segment_report["tables"], segment_report["fields"], segment_report["sample"])
    difference.sample = _first_of_each(difference.sample, sample)
    per_table = difference.tables.values()
    out = sum(tally["same"] + tally["changed"] + tally["added"] for tally in per_table)
    return Preview(number, row.rows, out, counts, difference)


def _first_of_each(sample: Sequence[dict[str, object]], most: int) -> list[dict[str, object]]:
    """Return the first events of each kind."""
    seen: Counter[object] = Counter()
    chosen = []
    for event in sample:
        seen[event["kind"]] += 1
        if seen[event["kind"]] <= most:
            chosen.append(event)
    return chosen
