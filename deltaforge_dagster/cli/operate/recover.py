"""`deltaforge recover`: go on after the source's log no longer has a pipeline's position."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    PipelineArgument,
    known_pipeline,
    select_pipeline,
)
from deltaforge_dagster.cli.output import moment, position
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.recover import (
    Recovery,
    plan_recovery,
    stopped,
)
from deltaforge_dagster.pipeline.control.recover import recover as do_recover
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.platform import Platform, build_source


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
