"""`deltaforge dev`: Dagster's UI and daemon, and Spark, for the pipelines of a directory."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from deltaforge_dagster.cli.dagster_processes import DagsterProcesses, wait_for_interrupt
from deltaforge_dagster.config.load import BrokenPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.resources.installed import installed_pipelines
from deltaforge_dagster.resources.instance import dagster_home
from deltaforge_dagster.resources.spark_server import SparkServer


def dev(
    *,
    port: Annotated[int, typer.Option(help="Port of the UI on 127.0.0.1.")] = 3000,
) -> None:
    """Run every pipeline here, with Dagster's UI, until Ctrl-C.

    Pipelines come from DELTAFORGE_PIPELINES (./pipelines), state and logs go to DELTAFORGE_HOME
    (./.deltaforge). The sensors start runs by themselves.
    """
    console = Console()
    settings = Settings.from_env()
    pipelines = installed_pipelines(settings)
    for one in pipelines:
        if isinstance(one, BrokenPipeline):
            console.print(f"[red]{one.name} is left out:[/red] {one.error}", highlight=False)
    server = None
    if settings.spark_remote is None:
        console.print("Starting Spark (about 20 s) ...")
        server = SparkServer.ensure(settings.home)
    try:
        console.print("Starting Dagster ...")
        processes = DagsterProcesses.start(settings, dagster_home(settings), port=port)
        try:
            console.print(
                f"[bold]{processes.ui}[/bold] shows {len(pipelines)} pipelines of "
                f"{settings.pipelines}; logs are in {settings.home / 'logs'}. Ctrl-C ends all."
            )
            wait_for_interrupt(processes)
        finally:
            console.print("Ending; live runs close their ranges ...")
            processes.stop()
    finally:
        if server is not None:
            server.stop()
