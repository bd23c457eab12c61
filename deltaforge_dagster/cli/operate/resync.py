"""`deltaforge resync`: load tables of a sink again."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.cli.options import JsonOption, PipelineArgument
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.tables.resync import request_resync
from deltaforge_dagster.resources.platform import Platform, build_source
from deltaforge_dagster.sources.snapshot import SnapshotSource


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
        _check_source(loaded)
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


def _check_source(loaded: LoadedPipeline) -> None:
    """Check that the source supports snapshots, without which recreated tables would stay empty.

    Raises:
        NotAllowed: It does not.
    """
    source = build_source(loaded.spec)
    try:
        if not isinstance(source, SnapshotSource):
            raise NotAllowed(f"pipeline {loaded.name!r}: its source knows no snapshots")
    finally:
        source.close()
