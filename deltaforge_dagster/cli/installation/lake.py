"""`deltaforge lake`: prepare this machine for Delta and Iceberg tables; read and maintain them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    NameArgument,
    PipelineArgument,
    installed_files,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import say, show_grid
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.errors import NotAllowed, SettingsError, TableRejected
from deltaforge_dagster.folders import make_folder
from deltaforge_dagster.installation.lake_jars import RESTART, missing_jars
from deltaforge_dagster.installation.maven import CENTRAL, Artifact, copy, download
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.plural import pluralize, size
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.pending import DUCKDB, SPARK, PendingRows, pending_name
from deltaforge_dagster.sinks.registry import LakeSinkType, sink_types
from deltaforge_dagster.state.store import StateStore

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.lake.maintenance import MaintainedTable, TableCondition


_HEADINGS = ("SINK", "TABLE", "FILES", "SMALL", "SIZE", "DELETED ROWS", "SNAPSHOTS", "DONE")
app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def lake() -> None:
    """Prepare this machine to write Delta and Iceberg tables; read and maintain them."""


@app.command()
def maintain(
    pipeline: PipelineArgument,
    *,
    sink: Annotated[
        str | None,
        typer.Option(metavar="SINK", help="Only this sink's tables, even with maintenance: off."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this table of the lake; can be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the tables, and what would be done.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Maintain tables now: compact files, expire old snapshots, delete files that no table uses.

    The same is done on the schedule of each sink, by its options under `maintenance`. Runs may
    deliver meanwhile.
    """
    # Imported here, because `deltaforge lake install` needs neither.
    from deltaforge_dagster.assets.maintenance import observation  # noqa: PLC0415
    from deltaforge_dagster.pipeline.lake.maintenance import maintain_tables  # noqa: PLC0415
    from deltaforge_dagster.resources.instance import local_instance  # noqa: PLC0415

    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    sinks = _selected(list(loaded.spec.spec.sinks), sink)
    if not sinks:
        raise NotAllowed(f"{loaded.name} has no sink whose tables are maintained")
    only = [tuple(name.split(".")) for name in table or ()]
    maintained: list[tuple[str, MaintainedTable]] = []
    with (
        Platform(settings, single_process=True).open() as opened,
        local_instance(settings) as instance,
    ):
        sessions = build_run_context(opened, loaded).replay_sessions
        for block in sinks:
            for stored, outcome in maintain_tables(
                opened.store, loaded.name, block, sessions, only=only, dry_run=dry_run
            ):
                maintained.append((stored.sink, outcome))
                if not dry_run and outcome.destination == stored.write.destination:
                    instance.report_runless_asset_event(observation(loaded.name, stored, outcome))
    if json_output:
        tables = [{"sink": name, **asdict(outcome)} for name, outcome in maintained]
        typer.echo(json.dumps({"pipeline": loaded.name, "tables": tables}))
    else:
        show_grid(
            _HEADINGS,
            [_row(name, outcome) for name, outcome in maintained],
            nothing=f"{loaded.name}: no table has been written yet.",
        )
    if problems := [problem for _, outcome in maintained for problem in outcome.problems]:
        raise TableRejected("; ".join(problems))


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

    They are put into DELTAFORGE_LAKE_JARS (default: `jars` in DELTAFORGE_HOME), and their checksums
    are verified. The Spark server that DeltaForge starts on this machine then has them; a Spark
    server that DELTAFORGE_SPARK_REMOTE names needs jars of its own. Jars that are already there are
    only verified, and an interrupted download is continued.

    On a machine without a network, copy the folder from one that has run this command, and pass it
    to `--from`.
    """
    if source is not None and repository != CENTRAL:
        raise NotAllowed("--from and --repository exclude each other")
    if not repository.startswith(("https://", "http://")) or "@" in repository:
        raise SettingsError("--repository must be an http(s) URL without user name and password")
    settings = Settings.from_env()
    folder = settings.lake_jars
    missing = missing_jars(folder)
    if missing:
        # A folder outside the home is not private, because other users may have to read it.
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
        text += f" A Spark server is running: {RESTART}."
    say(text, {"folder": str(folder), "installed": names}, as_json=json_output)


@app.command()
def view(
    pipeline: NameArgument,
    *,
    table: Annotated[
        str,
        typer.Option("--table", metavar="T", help="Table of the source, such as public.orders."),
    ],
    sink: Annotated[
        str | None,
        typer.Option("--sink", metavar="S", help="The sink, if several have pending changes."),
    ] = None,
    engine: Annotated[
        Literal["spark", "duckdb"], typer.Option("--for", help="What will execute the query.")
    ] = "spark",
    json_output: JsonOption = False,
) -> None:
    """Print the query that reads a table together with its pending changes.

    Use it in place of the table, or make a view of it in a catalog that has views: CREATE VIEW ...
    AS, and the query. Make the view again when the table gets another column.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        files = [file for file in installed_files(store) if isinstance(file, LoadedPipeline)]
        loaded = next((file for file in files if file.name == pipeline), None)
        if loaded is None:
            raise NotAllowed(f"the file of pipeline {pipeline!r} cannot be read")
        query = _view(store, loaded, sink, table, engine)
    say(query, {"query": query}, as_json=json_output)


def _view(
    store: StateStore, loaded: LoadedPipeline, sink: str | None, table: str, engine: str
) -> str:
    blocks = {
        block.config.id: block
        for block in loaded.spec.spec.sinks
        if isinstance(block.config, LakeSinkConfig) and block.config.pending is not None
    }
    if sink is None and len(blocks) == 1:
        (sink,) = blocks
    if sink not in blocks:
        listed = ", ".join(sorted(blocks)) or "none has"
        raise NotAllowed(f"--sink must name a sink with the option `pending` ({listed})")
    config, kind = blocks[sink].config, sink_types()[blocks[sink].type]
    assert isinstance(config, LakeSinkConfig)
    assert isinstance(kind, LakeSinkType)
    stored = {
        ".".join(lake_table.write.source): lake_table.write
        for lake_table in store.table_commits.tables(loaded.name)
        if lake_table.sink == sink
    }
    if table not in stored:
        listed = ", ".join(sorted(stored)) or "none yet"
        raise NotAllowed(f"sink {sink} has not written a table for {table} ({listed})")
    write = stored[table]
    key = config.keys.get(table) or next(
        history.current.table.primary_key
        for history in store.schemas.histories(loaded.name)
        if history.name == table
    )
    names = (write.destination, pending_name(write.destination))
    if engine == "spark":
        dialect = kind.dialect(config)
        main, beside = map(dialect.table, names)
    else:
        scans = [kind.duckdb_scan(config, name) for name in names]
        if None in scans:
            raise NotAllowed("DuckDB reads pending changes of Delta tables with a `path` only")
        main, beside = map(str, scans)
    columns = [name for name, _ in write.columns if not name.startswith("df_")]
    rows = PendingRows(beside, columns, key, SPARK if engine == "spark" else DUCKDB)
    return rows.view(main, columns)


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


def _selected(sinks: list[SinkBlock], name: str | None) -> list[SinkBlock]:
    """Return the sinks to maintain: the named one, else all whose tables are maintained."""
    lake_sinks = [block for block in sinks if isinstance(block.config, LakeSinkConfig)]
    if name is None:
        return [
            block
            for block in lake_sinks
            if isinstance(block.config, LakeSinkConfig) and block.config.maintenance.enabled
        ]
    named = [block for block in lake_sinks if block.config.id == name]
    if not named:
        names = ", ".join(block.config.id for block in lake_sinks) or "none"
        raise NotAllowed(f"no sink {name!r} that writes tables (there is: {names})")
    return named


def _row(sink: str, outcome: MaintainedTable) -> tuple[str, ...]:
    before, after = _counts(outcome.before), _counts(outcome.after)
    names = ("files", "small_files", "bytes", "deleted_rows", "snapshots")
    done = outcome.done or ("to be compacted" if outcome.due else "")
    summary = "; ".join(filter(None, [done, *outcome.notes, *outcome.problems])) or "-"
    return (
        sink,
        ".".join(outcome.destination),
        *(_change(n, before, after) for n in names),
        summary,
    )


def _counts(condition: TableCondition | None) -> dict[str, int]:
    return {} if condition is None else condition.counts


def _change(name: str, before: dict[str, int], after: dict[str, int]) -> str:
    """Return a figure, before and afterwards if it has changed."""
    texts = [
        size(counts[name]) if name == "bytes" else str(counts[name])
        for counts in (before, after)
        if name in counts
    ]
    return " → ".join(dict.fromkeys(texts)) or "-"
