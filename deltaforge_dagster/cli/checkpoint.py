"""`deltaforge checkpoint`: how far each sink has acknowledged, and setting that by hand."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltaforge_dagster.cli.output import moment, position
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.records import CheckpointRow
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)

PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline.")]


@app.callback()
def checkpoint() -> None:
    """Show how far sinks have acknowledged, or set it."""


@app.command()
def show(pipeline: PipelineArgument) -> None:
    """Show each sink's checkpoint: everything up to it, and nothing known beyond, has arrived."""
    table = Table(box=None, pad_edge=False)
    for heading in ("sink", "segment", "row", "source position", "last moved"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "row" else "left")
    with opened_store() as store:
        known_pipeline(store, pipeline)
        for one in store.checkpoints(pipeline).values():
            row = "all" if one.complete else f"{one.ordinal:,}"
            table.add_row(
                one.sink,
                f"{one.segment:,}",
                row,
                position(one.source_position),
                moment(one.updated_at),
            )
    Console(highlight=False).print(table)


@app.command()
def reset(
    pipeline: PipelineArgument,
    *,
    sink: Annotated[str, typer.Option(help="The sink whose checkpoint is set.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="oldest|tail|range:N",
            help="Go on with the oldest segment of the journal, with what is captured next "
            "(skipping everything before), or with the first segment of a range.",
        ),
    ],
) -> None:
    """Let a sink go on somewhere else in the journal; no run may hold the pipeline.

    Going back delivers again, unmarked. Going forward skips: what lies between never arrives.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        before = store.checkpoints(pipeline).get(sink)
        if before is None:
            names = ", ".join(store.checkpoints(pipeline)) or "none"
            raise NotAllowed(f"pipeline {pipeline!r} has no sink {sink!r} (there is: {names})")
        after = store.reset_checkpoint(pipeline, sink, _first_segment(store, pipeline, to) - 1)
    typer.echo(f"{sink} goes on with segment {after.segment + 1:,}: {_change(before, after)}.")


def _first_segment(store: StateStore, pipeline: str, to: str) -> int:
    """Return the segment that `--to` means."""
    kind, _, number = to.partition(":")
    if to == "oldest":
        oldest = store.segments(pipeline, limit=1)
        return oldest[0].segment if oldest else known_pipeline(store, pipeline).next_segment
    if to == "tail":
        return known_pipeline(store, pipeline).next_segment
    if kind == "range" and number.isdecimal():
        found = store.range(pipeline, int(number))
        if found is None:
            raise NotAllowed(f"pipeline {pipeline!r} has no range {int(number)}")
        return found.first_segment
    raise NotAllowed(f"--to {to}: write oldest, tail or range:N")


def _change(before: CheckpointRow, after: CheckpointRow) -> str:
    was = before.segment + before.complete
    distance = after.segment + 1 - was
    count = f"{abs(distance):,} segment{'' if abs(distance) == 1 else 's'}"
    if distance > 0:
        return f"skips {count}, from {was:,} on"
    if distance < 0:
        return f"delivers {count} again, up to {was - 1:,}"
    return "begins that segment again" if not before.complete else "as before"
