"""`deltaforge verify`: is the journal whole, and is it what the source's log says?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from deltaforge_dagster.cli.run import PipelineArgument, range_numbers
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline import replay
from deltaforge_dagster.pipeline.recapture import Compared, recapture
from deltaforge_dagster.sources.build import build_source
from deltaforge_dagster.state.store import StateStore


def verify(
    pipeline: PipelineArgument,
    *,
    from_source: Annotated[
        bool,
        typer.Option(
            "--from-source",
            help="Capture the ranges again and compare contents. MySQL, while it has its log.",
        ),
    ] = False,
    ranges: Annotated[
        str | None,
        typer.Option(
            "--range", help="A range N, or consecutive ranges N-M; every closed one by default."
        ),
    ] = None,
) -> None:
    """Check the files of closed ranges: there, unchanged and without a gap.

    With --from-source the source's log is read again and compared with them, segment by segment.
    The exit code is 1 when something differs.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    journal = Journal(settings.journal_url)
    console = Console(highlight=False, soft_wrap=True)
    with opened_store() as store:
        known_pipeline(store, loaded.name)
        chosen = _chosen(store, loaded.name, ranges)
        for number in chosen:
            events = replay.verify(store, journal, loaded.name, number)
            console.print(f"range {number}: {events:,} events, files as they were written")
        if not from_source:
            return
        different = [
            one for one in _again(store, journal, loaded, chosen, console) if not one.equal
        ]
    if different:
        raise typer.Exit(1)


def _again(
    store: StateStore,
    journal: Journal,
    loaded: LoadedPipeline,
    ranges: list[int],
    console: Console,
) -> list[Compared]:
    source = build_source(loaded.spec)
    found = []
    try:
        for one in recapture(
            store,
            journal,
            source,
            pipeline=loaded.name,
            tenant=loaded.spec.metadata.tenant,
            ranges=ranges,
        ):
            found.append(one)
            console.print(_sentence(one))
    finally:
        source.close()
    return found


def _sentence(one: Compared) -> str:
    if one.equal:
        return f"segment {one.segment}: {one.rows:,} rows, the same in the source's log"
    ordinals = ", ".join(map(str, one.ordinals))
    where = f"; columns {', '.join(one.columns)}" if one.columns else ""
    return (
        f"segment {one.segment} DIFFERS: {one.rows:,} rows here, {one.again:,} in the source's log;"
        f" first at ordinals {ordinals}{where}"
    )


def _chosen(store: StateStore, pipeline: str, ranges: str | None) -> list[int]:
    closed = [row.range for row in store.ranges(pipeline, state="closed")]
    if ranges is not None:
        wanted = list(range_numbers(ranges))
        missing = sorted(set(wanted) - set(closed))
        if missing:
            raise NotAllowed(f"{pipeline} has no closed range {missing[0]}")
        return wanted
    if not closed:
        raise NotAllowed(f"{pipeline} has no closed range yet")
    return closed
