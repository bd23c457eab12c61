"""`deltaforge recover`, `acknowledge` and `journal`: go on after something was lost.

`recover` goes on after the source's log no longer has a pipeline's position. `acknowledge` accepts
that sinks never get changes which the source's log lacks. `journal rebuild` captures again what a
journal had whose files were lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    NameArgument,
    PipelineArgument,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import moment, position, say
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.recover import (
    Recovery,
    plan_recovery,
    stopped,
)
from deltaforge_dagster.pipeline.control.recover import recover as do_recover
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.platform import Platform, build_source

journal_app = typer.Typer(add_completion=False, no_args_is_help=True)


def recover(
    pipeline: PipelineArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Go on after a loss of the position: a lost slot, a purged log, another server.

    Also after the journal has lost what sinks lack, if the source was told that it may forget it.

    The pipeline begins where the log is now. Tables of sinks are emptied and loaded again; message
    sinks and object files get a snapshot of every row. What was deleted in between cannot be known
    there. The command says beforehand what it will do, and asks for confirmation on a terminal. A
    run that is at work is ended first.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    with Platform(settings).open() as opened:
        store = opened.store
        row = known_pipeline(store, loaded.name)
        source = build_source(loaded.spec)
        try:
            recovery = plan_recovery(store, Journal(settings.journal_url), loaded, source)
        finally:
            source.close()
        typer.echo("\n".join(_plan_lines(loaded, recovery)), err=True)
        if sys.stdin.isatty() and not yes:
            typer.confirm("Continue?", abort=True, err=True)
        with stopped(store, row):
            after = do_recover(store, Journal(settings.journal_url), loaded, recovery, build_source)
    if json_output:
        tables = {sink: sorted(names.values()) for sink, names in recovery.tables.items()}
        answer = {
            "pipeline": loaded.name,
            "lost": recovery.why,
            "start_position": after.start_position,
            "tables": tables,
            "messages": list(recovery.messages),
        }
        typer.echo(json.dumps(answer))
        return
    typer.echo(
        f"{loaded.name} begins at {position(after.start_position)}; its next run goes on, "
        f"and the sensor starts the snapshot (deltaforge snapshot status {loaded.name}). "
        f"Without sensors: deltaforge run {loaded.name} --until-caught-up, "
        f"deltaforge snapshot run {loaded.name}, and the first one again."
    )


def _plan_lines(loaded: LoadedPipeline, recovery: Recovery) -> Iterator[str]:
    """Yield what a recovery will do, line by line."""
    yield f"{loaded.name}: {recovery.why}"
    yield "This will:"
    yield "  begin where the source's log is now, with an empty journal"
    for name in recovery.dropped:
        yield f"  drop and create again: {name}"
    for sink, tables in recovery.tables.items():
        names = ", ".join(sorted(".".join(table) for table in tables)) or "none yet"
        yield f"  empty {pluralize(len(tables), 'table')} of {sink} and load them again: {names}"
    since = "" if recovery.captured_until is None else f" after {moment(recovery.captured_until)}"
    for sink in recovery.messages:
        yield (
            f"  send {sink} every row that exists now; rows that were deleted{since}, "
            "and what rows were in between, cannot be known: it never gets that"
        )


def acknowledge(
    pipeline: NameArgument,
    *,
    tables: Annotated[
        str,
        typer.Option("--tables", help="Comma-separated full names of tables. Default: all."),
    ] = "",
    json_output: JsonOption = False,
) -> None:
    """Let sinks go without what the source's log lacks of tables; `status` no longer shows it."""
    names = [name.strip() for name in tables.split(",") if name.strip()]
    with opened_store() as store:
        known_pipeline(store, pipeline)
        acknowledged = store.gaps.acknowledge(pipeline, names)
    if not acknowledged:
        raise NotAllowed(
            f"pipeline {pipeline!r}: the log lacks nothing of {tables or 'its tables'}"
        )
    text = f"{', '.join(acknowledged)}: what the log lacks is acknowledged; sinks never get it."
    say(text, {"pipeline": pipeline, "tables": acknowledged}, as_json=json_output)


@journal_app.callback()
def journal() -> None:
    """Rebuild a journal whose files were lost."""


@journal_app.command()
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
