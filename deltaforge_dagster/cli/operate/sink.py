"""`deltaforge sink`: pause and resume one sink, and attach one that a full journal has detached."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.state.records import CheckpointRow

app = typer.Typer(add_completion=False, no_args_is_help=True)

SinkArgument = Annotated[
    str, typer.Argument(metavar="SINK", help="Id of one of the pipeline's sinks.")
]


@app.callback()
def sink() -> None:
    """Pause and resume sinks, or attach detached ones."""


@app.command()
def pause(pipeline: NameArgument, sink: SinkArgument, *, json_output: JsonOption = False) -> None:
    """Stop sending to a sink, even while a run is live, and keep its segments in the journal.

    The sink still counts for the commit policy: while a required sink is paused, the source keeps
    its log.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.checkpoints.pause(pipeline, sink)
    say(
        f"{sink} is paused; a live run finishes what it is sending, then {sink} gets nothing more. "
        f"Everything from segment {row.whole_segment + 1:,} on is kept for it.",
        _as_json(pipeline, row),
        as_json=json_output,
    )


@app.command()
def resume(pipeline: NameArgument, sink: SinkArgument, *, json_output: JsonOption = False) -> None:
    """Resume a paused sink after its checkpoint, even while a run is live."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.checkpoints.resume(pipeline, sink)
    text = f"{sink} continues with segment {row.whole_segment + 1:,}."
    say(text, _as_json(pipeline, row), as_json=json_output)


@app.command()
def attach(
    pipeline: NameArgument,
    sink: SinkArgument,
    *,
    tail: Annotated[
        bool,
        typer.Option(
            "--tail",
            help=(
                "Continue with the next captured segment, "
                "skipping everything since it was detached."
            ),
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Attach a detached sink and continue after its checkpoint, even while a run is live.

    The command fails if the journal no longer has what follows the checkpoint, unless --tail is
    given.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.checkpoints.attach(pipeline, sink, tail=tail)
    text = f"{sink} is attached and continues with segment {row.whole_segment + 1:,}."
    say(text, _as_json(pipeline, row), as_json=json_output)


def _as_json(pipeline: str, row: CheckpointRow) -> dict[str, str | int]:
    next_segment = row.whole_segment + 1
    return {
        "pipeline": pipeline,
        "sink": row.sink,
        "state": row.state,
        "next_segment": next_segment,
    }
