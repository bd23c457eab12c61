"""`deltaforge sink`: attaching a sink that was detached because the journal was full."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.cli.state import known_pipeline, opened_store

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def sink() -> None:
    """Attach sinks again."""


@app.command()
def attach(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline.")],
    sink: Annotated[str, typer.Argument(metavar="SINK", help="Id of one of its sinks.")],
    *,
    tail: Annotated[
        bool,
        typer.Option(
            "--tail",
            help="Go on with what is captured next, skipping everything since it was detached.",
        ),
    ] = False,
) -> None:
    """Let a detached sink go on from its checkpoint, also while a run works on the pipeline.

    Refused when the journal no longer holds what follows the checkpoint, unless --tail is given.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.attach_sink(pipeline, sink, tail=tail)
    typer.echo(f"{sink} is attached and goes on with segment {row.whole_segment + 1:,}.")
