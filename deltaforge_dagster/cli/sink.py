"""`deltaforge sink`: pausing one sink, and attaching one that a full journal has detached."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.cli.options import JsonOption, NameArgument
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.state.records import CheckpointRow

app = typer.Typer(add_completion=False, no_args_is_help=True)

SinkArgument = Annotated[str, typer.Argument(metavar="SINK", help="Id of one of its sinks.")]


@app.callback()
def sink() -> None:
    """Pause and resume sinks, or attach them again."""


@app.command()
def pause(pipeline: NameArgument, sink: SinkArgument, *, json_output: JsonOption = False) -> None:
    """Send a sink nothing more, also while a run works on the pipeline, and keep all for it.

    The commit policy counts it as before: a required one holds back what the source may forget.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.pause_sink(pipeline, sink)
    say(
        f"{sink} is paused; a run that is at work ends what it is sending, then {sink} gets nothing. "
        f"Everything from segment {row.whole_segment + 1:,} on is kept for it.",
        _as_json(pipeline, row),
        as_json=json_output,
    )


@app.command()
def resume(pipeline: NameArgument, sink: SinkArgument, *, json_output: JsonOption = False) -> None:
    """Let a paused sink go on after its checkpoint, also while a run works on the pipeline."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.resume_sink(pipeline, sink)
    text = f"{sink} goes on with segment {row.whole_segment + 1:,}."
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
            help="Go on with what is captured next, skipping everything since it was detached.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Let a detached sink go on from its checkpoint, also while a run works on the pipeline.

    Refused when the journal no longer holds what follows the checkpoint, unless --tail is given.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.attach_sink(pipeline, sink, tail=tail)
    text = f"{sink} is attached and goes on with segment {row.whole_segment + 1:,}."
    say(text, _as_json(pipeline, row), as_json=json_output)


def _as_json(pipeline: str, row: CheckpointRow) -> dict[str, str | int]:
    next_segment = row.whole_segment + 1
    return {
        "pipeline": pipeline,
        "sink": row.sink,
        "state": row.state,
        "next_segment": next_segment,
    }
