"""`deltaforge journal`: what to do when files of the journal were lost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from deltaforge_dagster.cli.options import JsonOption, NameArgument
from deltaforge_dagster.cli.output import position
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.plural import pluralize

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def journal() -> None:
    """Bring a journal back whose files were lost."""


@app.command()
def rebuild(
    pipeline: NameArgument,
    *,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Go on although sinks lack changes that the source may have forgotten.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Capture again, from the confirmed position on, what sinks lack of a lost journal.

    No run may hold the pipeline. The journal begins afresh; numbers of segments and ranges go on.
    Sinks skip what they have: by event where they deliver exactly once, else by whole segments, so
    that some of it may come again.
    """
    with opened_store() as store:
        before = known_pipeline(store, pipeline)
        rebuilt = store.rebuild_journal(pipeline, accept_loss=accept_loss)
    # All that is left in the old journal's folder, also what killed runs left there.
    files = Journal(Settings.from_env().journal_url)
    files.sweep(pipeline, before.uid, (), epoch=sys.maxsize, older_than=-1.0)
    if json_output:
        typer.echo(json.dumps({"pipeline": pipeline, **asdict(rebuilt)}))
        return
    typer.echo(
        f"{pipeline}: dropped {pluralize(rebuilt.segments, 'segment')} of "
        f"{pluralize(rebuilt.ranges, 'range')}; "
        f"the next run captures again from {position(rebuilt.position)} on."
    )
    for sink in rebuilt.lossy:
        typer.echo(f"{sink}: never gets what it lacks from before that position.")
    for subject in rebuilt.held:
        typer.echo(f"{subject}: what was held of it may never reach a sink.")
    for sink in rebuilt.detached:
        typer.echo(f"{sink}: stays detached; it can be attached with --tail only.")
