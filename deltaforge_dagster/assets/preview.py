"""A preview as tables: for the terminal, and as an observation of the previewed range.

The observation names the events that would differ, and the fields. It contains no values of rows,
since Dagster's event log is visible to all its users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

from deltaforge_dagster.assets.names import asset_key, partition_key
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES, processor_metrics
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.replay.preview import Preview

KINDS = ("same", "changed", "added", "dropped", "moved")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table to display: its headings, and rows of text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.headings, tuple("---" for _ in self.headings), *self.rows]
        return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def processors(preview: Preview) -> Grid:
    """Return the counts and the latency of each processor, in the order of the chain."""
    rows = []
    for name, counts in preview.processors.items():
        other_counts = {counter: n for counter, n in counts.items() if counter not in _SHOWN}
        latency = counts["busy_us"] / max(counts["calls"], 1) / 1000
        rows.append(
            (
                name,
                f"{counts['events_in']:,}",
                f"{counts['events_out']:,}",
                f"{latency:.1f} ms",
                ", ".join(
                    f"{counter} {count:,}" for counter, count in sorted(other_counts.items())
                ),
            )
        )
    return Grid(("processor", "in", "out", "per call", "counted"), tuple(rows))


def tables(preview: Preview) -> Grid:
    """Return the number of events of each table, by kind of difference."""
    return Grid(
        ("table", *KINDS),
        tuple(
            (name, *(f"{counts[kind]:,}" for kind in KINDS))
            for name, counts in sorted(preview.difference.tables.items())
        ),
    )


def fields(preview: Preview) -> Grid:
    """Return, for each table and field, the number of changed events in which the field differs."""
    return Grid(
        ("table", "field", "events"),
        tuple(
            (table, name, f"{count:,}")
            for table, counts in sorted(preview.difference.fields.items())
            for name, count in counts.most_common()
        ),
    )


def sample(preview: Preview) -> Grid:
    """Return the events of the sample, without their values."""
    return Grid(
        ("event", "table", "op", "", "fields"),
        tuple(
            (
                event["event_id"],
                event["table"],
                event["op"],
                event["kind"],
                ", ".join(event["fields"]),
            )
            for event in preview.difference.sample
        ),
    )


def sentence(preview: Preview) -> str:
    """Return the result of a preview in one sentence."""
    summary = (
        f"range {preview.range}: {pluralize(preview.events_in, 'event')} in, "
        f"{preview.events_out:,} out"
    )
    if preview.difference.equal:
        return f"{summary}; the same as sinks get"
    total = totals(preview)
    kinds = ", ".join(f"{total[kind]:,} {kind}" for kind in KINDS[1:] if total[kind])
    return f"{summary}; unlike what sinks get: {kinds}"


def totals(preview: Preview) -> Mapping[str, int]:
    """Return the number of events of all tables, by kind of difference."""
    per_table = preview.difference.tables.values()
    return {kind: sum(counts[kind] for counts in per_table) for kind in KINDS}


def observation(pipeline: str, preview: Preview) -> dg.AssetObservation:
    """Return a preview as an observation of the range's `changes`."""
    return dg.AssetObservation(
        asset_key(pipeline, CHANGES),
        partition=partition_key(preview.range),
        description=f"preview of {sentence(preview)}",
        metadata={
            **{f"preview/{kind}": count for kind, count in totals(preview).items()},
            **{f"preview/{name}": n for name, n in processor_metrics(preview.processors).items()},
            "preview": dg.MetadataValue.md(
                "\n\n".join(
                    grid.markdown()
                    for grid in (
                        processors(preview),
                        tables(preview),
                        fields(preview),
                        sample(preview),
                    )
                    if grid.rows
                )
            ),
        },
    )


_SHOWN = {"events_in", "events_out", "calls", "busy_us"}


def _plain(text: str) -> str:
    """Return text escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
