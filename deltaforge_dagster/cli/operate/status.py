"""`deltaforge status`: show every pipeline, from the pipeline files and the state store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    installed_files,
    known_pipeline,
    opened_store,
)
from deltaforge_dagster.cli.operate.overview import NotBegun, Overview, overview
from deltaforge_dagster.cli.operate.status import screen
from deltaforge_dagster.cli.output import answers, print_answer
from deltaforge_dagster.errors import Retryable
from deltaforge_dagster.pipeline.control.catalog import of_row, without_file
from deltaforge_dagster.pipeline.health.health import health
from deltaforge_dagster.state.store import StateStore


def status(
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(metavar="PIPELINE", help="Names of pipelines. Default: all."),
    ] = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating the output.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between updates, with --watch.")
    ] = 2.0,
    json_output: JsonOption = False,
) -> None:
    """Show pipelines: how far capture and delivery are, which run works on them, and what fails.

    The command reads only the pipeline files and the state store. With --watch and --json it prints
    one object per line, until Ctrl-C.

    The exit code is 1 if a pipeline has an error: its file is invalid, its changes are not
    captured, or a sink that the commit policy waits for fails. It is 0 for warnings, and for
    pipelines that were paused or stopped.
    """
    with opened_store() as store, contextlib.suppress(KeyboardInterrupt):
        if not watch:
            views = _views(store, pipelines)
            if json_output:
                _print_json(views)
            else:
                print_answer(screen(views))
            if not all(view.health.well for view in views):
                raise typer.Exit(1)
        elif json_output:
            while True:
                _print_json(_views(store, pipelines))
                time.sleep(interval)
        else:
            _watch(store, pipelines, interval)


def _views(store: StateStore, names: Sequence[str] | None) -> list[Overview | NotBegun]:
    installed = installed_files(store)
    rows = {row.name: row for row in store.pipelines.read()}
    files = [*installed, *without_file(rows.values(), installed)]
    unbegun = {file.name: file for file in files if file.name not in rows}
    for name in names or ():
        if name not in unbegun:
            known_pipeline(store, name)
    chosen = sorted({*rows, *unbegun} if not names else set(names))
    return [
        overview(store, rows[name], of_row(rows[name], files))
        if name in rows
        else NotBegun(name, health(store, unbegun[name]), store.now())
        for name in chosen
    ]


def _print_json(views: Sequence[Overview | NotBegun]) -> None:
    typer.echo(json.dumps({"pipelines": [view.to_json() for view in views]}))


def _watch(store: StateStore, names: Sequence[str] | None, interval: float) -> None:
    """Update the display until Ctrl-C.

    If the store is unavailable, show the error and try again.
    """
    shown: RenderableType = screen(_views(store, names))
    console = answers()
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                shown = screen(_views(store, names))
            except Retryable as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)
