"""`deltaforge snapshot` and `resync`: load whole tables, for all sinks or for one.

A snapshot reads them while the stream goes on. `resync` empties tables of a sink that keeps tables,
and loads them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    NameArgument,
    PipelineArgument,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import print_answer, say
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.plural import duration, pluralize, size
from deltaforge_dagster.pipeline.snapshots.request import requested_snapshot
from deltaforge_dagster.pipeline.tables.resync import check_loadable, request_resync
from deltaforge_dagster.resources.platform import Opened, Platform, build_source
from deltaforge_dagster.state.snapshot_records import SnapshotProgress, SnapshotRow
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)

_Tables = Annotated[
    str,
    typer.Option("--tables", help="Comma-separated full names of tables. Default: all tables."),
]

_Where = Annotated[
    str | None,
    typer.Option(
        "--where", help="A condition in the database's SQL; only rows that satisfy it are read."
    ),
]

_Sinks = Annotated[
    str,
    typer.Option("--sinks", help="Comma-separated ids of the sinks to deliver to. Default: all."),
]


@app.callback()
def snapshot() -> None:
    """Read whole tables in chunks, without stopping the stream."""


@app.command()
def start(
    pipeline: PipelineArgument,
    *,
    tables: _Tables = "",
    where: _Where = None,
    sinks: _Sinks = "",
    json_output: JsonOption = False,
) -> None:
    """Request a snapshot, which the pipeline's sensor starts at its next tick.

    Sensors tick while `deltaforge dev` or Dagster's daemon is running. Without them, use
    `deltaforge snapshot run`.
    """
    with _opened(pipeline) as (opened, loaded):
        register(opened.store, loaded)
        row = _request(opened.store, loaded, tables, where, sinks)
    _print(loaded.name, row, {}, json_output=json_output)
    if not json_output:
        seconds = loaded.spec.spec.engine.dagster.sensor_interval_seconds
        typer.echo(
            f"The sensor starts it at its next tick (every {seconds:g} s, while `deltaforge dev` "
            "or Dagster's daemon is running). "
            f"To read it here now: deltaforge snapshot run {loaded.name}"
        )


@app.command()
def run(
    pipeline: PipelineArgument,
    *,
    tables: _Tables = "",
    where: _Where = None,
    sinks: _Sinks = "",
    json_output: JsonOption = False,
) -> None:
    """Read the rest of the unfinished snapshot in this process, or begin a new one.

    A new snapshot is the one that the pipeline file requests, if it requests one, else one of all
    tables.

    The pipeline's run (`deltaforge dev`, `deltaforge run`) puts the rows into the journal and
    delivers them. It may be live at the same time.
    """
    from deltaforge_dagster.pipeline.snapshots.read import SnapshotRun  # noqa: PLC0415 - seconds
    from deltaforge_dagster.resources.run_context import build_run_context  # noqa: PLC0415

    with _opened(pipeline) as (opened, loaded):
        pipeline_row = register(opened.store, loaded)
        chosen = bool(tables or where or sinks)
        if opened.store.snapshots.unfinished(loaded.name) is not None:
            if chosen:
                raise NotAllowed(
                    f"pipeline {loaded.name!r} has an unfinished snapshot: leave --tables, --where "
                    "and --sinks out"
                )
        elif chosen or requested_snapshot(opened.store, loaded, pipeline_row) is None:
            _request(opened.store, loaded, tables, where, sinks)
        console = Console(stderr=True)
        with _Bars(console) as bars:
            reading = SnapshotRun(
                loaded, build_run_context(opened, loaded), warn=bars.warn, progress=bars.show
            )
            row = reading.execute()
        progress = opened.store.snapshots.progress(loaded.name, row.snapshot)
    _print(loaded.name, row, progress, json_output=json_output)


@app.command()
def status(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Show the newest snapshot, and the progress of each table."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        newest = store.snapshots.read(pipeline, newest=1)
        if not newest:
            raise NotAllowed(f"pipeline {pipeline!r} has no snapshot")
        progress = store.snapshots.progress(pipeline, newest[0].snapshot)
        now = store.now()
    _print(pipeline, newest[0], progress, json_output=json_output, now=now)


@app.command()
def cancel(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Cancel the unfinished snapshot; chunks already in the journal are still delivered."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.snapshots.unfinished(pipeline)
        if row is None or not store.snapshots.cancel(pipeline, row.snapshot, "cancelled by a user"):
            raise NotAllowed(f"pipeline {pipeline!r} has no unfinished snapshot")
    answer = {"pipeline": pipeline, "snapshot": row.snapshot, "state": "cancelled"}
    say(f"Snapshot {row.snapshot} is cancelled.", answer, as_json=json_output)


@contextmanager
def _opened(pipeline: str) -> Iterator[tuple[Opened, LoadedPipeline]]:
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    with Platform(settings).open() as opened:
        yield opened, loaded


def _request(
    store: StateStore, loaded: LoadedPipeline, tables: str, where: str | None, sinks: str
) -> SnapshotRow:
    return store.snapshots.request(
        loaded.name, tables=_names(tables), condition=where, cause="command", sinks=_names(sinks)
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class _Bars:
    """A progress bar for each table on standard error, if that is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("chunks, {task.fields[rows]}{task.fields[waiting]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tables: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def warn(self, message: str) -> None:
        """Print a warning above the bars."""
        self._console.print(f"[yellow]{message}[/yellow]", highlight=False)

    def show(self, progress: Mapping[str, SnapshotProgress]) -> None:
        """Update the progress of each table."""
        for table, counts in progress.items():
            if table not in self._tables:
                self._tables[table] = self._progress.add_task(table, rows="", waiting="")
            waiting = (
                f", {size(counts.staged_bytes)} waiting for the pipeline's run"
                if counts.read
                else ""
            )
            self._progress.update(
                self._tables[table],
                total=counts.chunks,
                completed=counts.read + counts.complete,
                rows=pluralize(counts.rows, "row"),
                waiting=waiting,
            )


def _print(
    pipeline: str,
    row: SnapshotRow,
    progress: Mapping[str, SnapshotProgress],
    *,
    json_output: bool,
    now: float | None = None,
) -> None:
    if json_output:
        tables: dict[str, Any] = {name: counts.to_json() for name, counts in progress.items()}
        typer.echo(json.dumps({"pipeline": pipeline, **row.to_json(), "progress": tables}))
        return
    since = f", requested {duration(now - row.created_at)} ago" if now is not None else ""
    sinks = f", for {', '.join(row.sinks)}" if row.sinks else ""
    print_answer(
        f"Snapshot {row.snapshot} of {pipeline}{sinks}: {row.state_text} ({row.cause}{since})"
    )
    if row.problem:
        print_answer(row.problem)
    if not progress:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("table", "chunks", "to read", "waiting", "in the journal", "rows"):
        table.add_column(heading, justify="left" if heading == "table" else "right")
    for name, counts in progress.items():
        numbers = (counts.chunks, counts.planned, counts.read, counts.complete, counts.rows)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    print_answer(table)


def resync(
    pipeline: PipelineArgument,
    *,
    sink: Annotated[str, typer.Option("--sink", metavar="SINK", help="Id of the sink.")],
    tables: Annotated[
        str,
        typer.Option(
            "--tables",
            help=(
                "Comma-separated full names of the source's tables. Default: all that the sink has."
            ),
        ),
    ] = "",
    json_output: JsonOption = False,
) -> None:
    """Load tables of a sink again, with the options and types of today.

    The pipeline's run recreates each table, without rows, and requests a snapshot of it for this
    sink; then the table follows the stream again. Until the snapshot has arrived, readers see only
    a part of the rows. The sink's other tables, and other sinks, go on. A snapshot that is
    unfinished is waited for.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    with Platform(settings).open() as opened:
        register(opened.store, loaded)
        with closing(build_source(loaded.spec)) as source:
            check_loadable(loaded, source)
        names = [name.strip() for name in tables.split(",") if name.strip()]
        requested = request_resync(opened.store, loaded, sink, names)
        waits = opened.store.snapshots.unfinished(loaded.name)
    once = "" if waits is None else f" once snapshot {waits.snapshot} is complete"
    text = (
        f"{', '.join(requested)}: {pluralize(len(requested), 'table')} of {sink} will be "
        "recreated by the pipeline's run"
        f"{once}, and loaded by a snapshot, which the sensor starts then; "
        f"see deltaforge snapshot status {loaded.name}. "
        f"Without sensors: deltaforge run {loaded.name} --until-caught-up, "
        f"deltaforge snapshot run {loaded.name}, and the first one again."
    )
    answer = {"pipeline": loaded.name, "sink": sink, "tables": list(requested)}
    say(text, answer, as_json=json_output)
