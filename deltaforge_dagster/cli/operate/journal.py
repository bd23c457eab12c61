"""`deltaforge journal`: rebuild a journal whose files were lost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.output import position
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.plural import pluralize

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def journal() -> None:
    """Rebuild a journal whose files were lost."""


@app.command()
def rebuild(
    pipeline: NameArgument,
    *,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Continue even if sinks lack changes that the source may have discarded.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Drop a lost journal; capture again, from the committed position, what sinks lack.

    No run may hold the pipeline. The new journal continues the numbers of segments and ranges.
    Sinks skip the changes that they have: exactly-once sinks event by event, others by whole
    segments, so that some changes may be delivered again.
    """
    with opened_store() as store:
        before = known_pipeline(store, pipeline)
        rebuilt = store.journals.rebuild(pipeline, accept_loss=accept_loss)
    # Delete everything that is left in the old journal's folder, including files of killed runs.
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
        typer.echo(f"{sink}: never gets the changes before that position that it lacks.")
    for subject in rebuilt.held:
        typer.echo(f"{subject}: its held changes may never reach a sink.")
    for sink in rebuilt.detached:
        typer.echo(f"{sink}: stays detached; it can only be attached with --tail.")
