"""`deltaforge dev`: run Dagster's UI and daemon, and Spark, for the pipelines of a directory."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deltaforge_dagster.cli.installation.dagster_processes import (
    DagsterProcesses,
    wait_for_interrupt,
)
from deltaforge_dagster.cli.output import moment, position
from deltaforge_dagster.config.file.load import BrokenPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.installation.lake_jars import installed_jars
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.work import begin
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.instance import dagster_home
from deltaforge_dagster.resources.platform import Platform, installed_pipelines


def dev(
    *,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the UI on 127.0.0.1.")
    ] = 3000,
) -> None:
    """Run every pipeline of this installation, with Dagster's UI, until Ctrl-C.

    Pipeline files are read from DELTAFORGE_PIPELINES (default ./pipelines); state and logs are
    written to DELTAFORGE_HOME (default ./.deltaforge). The pipelines' sensors start runs
    automatically.
    """
    console = Console(highlight=False, soft_wrap=True)
    settings = Settings.from_env()
    pipelines = installed_pipelines(settings)
    if not pipelines:
        console.print(
            f"[yellow]{escape(str(settings.pipelines))} has no pipeline file yet.[/yellow] "
            "Files that you add there are picked up automatically."
        )
    for pipeline in pipelines:
        if isinstance(pipeline, BrokenPipeline):
            console.print(f"[red]{pipeline.name} is left out:[/red] {escape(str(pipeline.error))}")
    with _lock_home(settings.home):
        _refuse_taken(port)
        since = _begin(settings, pipelines)
        server = None
        if settings.spark_remote is None:
            console.print("Starting Spark (about 20 s) ...")
            server = SparkServer.ensure(settings.home, jars=installed_jars(settings.lake_jars))
        try:
            _run(console, settings, port, since)
        finally:
            if server is not None:
                server.stop()


def _begin(settings: Settings, pipelines: Sequence[AnyPipeline]) -> list[str]:
    """Fix the start position of each pipeline.

    Return one line per pipeline: since when its changes are captured, or why they are not.
    """
    lines = []
    with Platform(settings).open() as opened:
        for pipeline in pipelines:
            if isinstance(pipeline, BrokenPipeline):
                continue
            before = opened.store.pipelines.get(pipeline.name)
            try:
                row = begin(opened.store, pipeline, opened.source_builder(pipeline))
            except DeltaforgeError as error:
                lines.append(
                    f"[yellow]{pipeline.name}: nothing is captured yet:[/yellow] "
                    f"{escape(str(error))}; each tick of its sensor tries again"
                )
                continue
            if row.desired_state != "running":
                lines.append(f"{pipeline.name} is {row.desired_state}")
            elif before is None or before.start_position is None:
                lines.append(
                    f"{pipeline.name}: capturing since {moment(opened.store.now())} "
                    f"({position(row.start_position)})"
                )
            else:
                where = position(row.captured_position or row.start_position)
                lines.append(f"{pipeline.name}: resumes at {where}")
    return lines


def _run(console: Console, settings: Settings, port: int, since: Sequence[str]) -> None:
    """Run Dagster's processes until the user interrupts."""
    console.print("Starting Dagster ...")
    processes = DagsterProcesses.start(settings, dagster_home(settings), port=port)
    try:
        processes.wait_until_ready()
        for line in since:
            console.print(line)
        console.print(
            f"[bold]{processes.ui}[/bold] shows {pluralize(len(since), 'pipeline')} of "
            f"{escape(str(settings.pipelines))}; "
            f"logs are in {escape(str(settings.home / 'logs'))}. Press Ctrl-C to stop."
        )
        wait_for_interrupt(processes)
    finally:
        console.print("Stopping; live runs close their ranges ...")
        processes.stop()


@contextmanager
def _lock_home(home: Path) -> Iterator[None]:
    """Lock the home directory.

    Two daemons would share one Dagster instance and stop each other's Spark. The lock is a `flock`,
    which the kernel releases when the process dies.

    Raises:
        NotAllowed: Another `deltaforge dev` holds the lock.
    """
    home.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home / "dev.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotAllowed(
                f"another `deltaforge dev` is running in {home}: stop it, or set DELTAFORGE_HOME "
                "to another directory"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _refuse_taken(port: int) -> None:
    """Check that the UI can listen on the port; Dagster would report that only after half a minute.

    Raises:
        NotAllowed: The port is in use, or this user may not listen on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the webserver does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise NotAllowed(f"--port {port}: {reason}; choose another") from error
