"""`deltaforge verify`: check the journal's files, and compare them with the source's log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    PipelineArgument,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.installation.run import range_numbers
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.replay import replay
from deltaforge_dagster.pipeline.replay.recapture import Compared, recapture
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.state.store import StateStore


def verify(
    pipeline: PipelineArgument,
    *,
    from_source: Annotated[
        bool,
        typer.Option(
            "--from-source",
            help=(
                "Read the source's log again and compare contents. "
                "Only MySQL, while it keeps that log."
            ),
        ),
    ] = False,
    ranges: Annotated[
        str | None,
        typer.Option(
            "--range", help="Range N, or the consecutive ranges N-M. Default: every closed range."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the files of closed ranges exist, are unchanged and have no gaps.

    With --from-source, the command also reads the source's log again and compares it with the
    files, segment by segment. The exit code is 1 if anything differs.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    journal = Journal(settings.journal_url)
    console = Console(highlight=False, soft_wrap=True, quiet=json_output)
    events: dict[int, int] = {}
    compared: list[Compared] = []
    with opened_store() as store:
        known_pipeline(store, loaded.name)
        chosen = _chosen(store, loaded.name, ranges)
        for number in chosen:
            events[number] = replay.verify(store, journal, loaded.name, number)
            console.print(
                f"range {number}: {pluralize(events[number], 'event')}, files as they were written"
            )
        if from_source:
            for segment in _compare_with_source(store, journal, loaded, chosen):
                compared.append(segment)
                console.print(_sentence(segment))
    same = all(segment.equal for segment in compared)
    if json_output:
        segments = [{**dataclasses.asdict(segment), "equal": segment.equal} for segment in compared]
        answer = {"pipeline": loaded.name, "ok": same, "ranges": events, "segments": segments}
        typer.echo(json.dumps(answer))
    raise typer.Exit(0 if same else 1)


def _compare_with_source(
    store: StateStore, journal: Journal, loaded: LoadedPipeline, ranges: list[int]
) -> Iterator[Compared]:
    source = build_source(loaded.spec)
    try:
        yield from recapture(
            store,
            journal,
            source,
            pipeline=loaded.name,
            tenant=loaded.spec.metadata.tenant,
            ranges=ranges,
        )
    finally:
        source.close()


def _sentence(segment: Compared) -> str:
    if segment.equal:
        return (
            f"segment {segment.segment}: {pluralize(segment.rows, 'row')}, "
            "the same in the source's log"
        )
    ordinals = ", ".join(map(str, segment.ordinals))
    where = f"; columns {', '.join(segment.columns)}" if segment.columns else ""
    return (
        f"segment {segment.segment} DIFFERS: {pluralize(segment.rows, 'row')} here, "
        f"{segment.again:,} in the source's log;"
        f" first at ordinals {ordinals}{where}"
    )


def _chosen(store: StateStore, pipeline: str, ranges: str | None) -> list[int]:
    closed = [row.range for row in store.ranges.read(pipeline, state="closed")]
    if ranges is not None:
        wanted = list(range_numbers(ranges))
        missing = sorted(set(wanted) - set(closed))
        if missing:
            raise NotAllowed(f"{pipeline} has no closed range {missing[0]}")
        return wanted
    if not closed:
        raise NotAllowed(f"{pipeline} has no closed range yet")
    return closed
