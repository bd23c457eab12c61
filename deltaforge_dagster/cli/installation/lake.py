"""`deltaforge lake`: what this machine needs to write Delta and Iceberg tables, and their maintenance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from deltaforge_dagster.cli.operate.maintain import maintain
from deltaforge_dagster.cli.options import JsonOption
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.folders import make_folder
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.processes.maven import CENTRAL, Artifact, copy, download
from deltaforge_dagster.resources.lake_jars import missing_jars
from deltaforge_dagster.resources.spark_server import SparkServer

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def lake() -> None:
    """Prepare this machine to write Delta and Iceberg tables; maintain tables."""


app.command()(maintain)


@app.command()
def install(
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Copy the jars from this folder instead of downloading them.",
        ),
    ] = None,
    repository: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Maven repository to download from, such as a mirror of Maven Central.",
        ),
    ] = CENTRAL,
    json_output: JsonOption = False,
) -> None:
    """Install the jars with which Spark writes Delta and Iceberg tables; 57 MB.

    They are put into DELTAFORGE_LAKE_JARS (default: `jars` in DELTAFORGE_HOME), and their checksums are verified. The
    Spark server that DeltaForge starts on this machine then has them; a Spark server that DELTAFORGE_SPARK_REMOTE
    names needs jars of its own. Jars that are already there are only verified, and an interrupted download is
    continued.

    On a machine without a network, copy the folder from one that has run this command, and pass it to `--from`.
    """
    if source is not None and repository != CENTRAL:
        raise NotAllowed("--from and --repository exclude each other")
    if not repository.startswith(("https://", "http://")) or "@" in repository:
        raise SettingsError("--repository must be an http(s) URL without user name and password")
    settings = Settings.from_env()
    folder = settings.lake_jars
    missing = missing_jars(folder)
    if missing:
        # Others may have to read a folder outside the home.
        if folder.is_relative_to(settings.home):
            make_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        for jar in missing:
            if source is None:
                _download(jar, folder, repository)
            else:
                copy(jar, source / jar.file_name, folder / jar.file_name)
    names = [jar.file_name for jar in missing]
    text = (
        f"{folder}: {pluralize(len(names), 'jar')} installed."
        if names
        else f"{folder}: all jars are there."
    )
    if names and SparkServer.is_running(settings.home):
        text += (
            " The running Spark server gets them when no run uses it, at the start of the next run; "
            "restart `deltaforge dev`, which uses it all the time."
        )
    say(text, {"folder": str(folder), "installed": names}, as_json=json_output)


def _download(jar: Artifact, folder: Path, repository: str) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(jar.file_name, total=None)
        download(
            jar,
            folder / jar.file_name,
            repository=repository,
            progress=lambda done, total: shown.update(task, completed=done, total=total or None),
        )
