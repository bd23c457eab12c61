"""`deltaforge find`: show where in the journal a key's changes are, and which sinks have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.installation.run import range_numbers
from deltaforge_dagster.cli.output import moment, print_answer
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.plural import pluralize, size
from deltaforge_dagster.pipeline.replay.key_search import Found, Wanted, search, segments_of
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore


def find(
    pipeline: NameArgument,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help=(
                "The row's key: its value, the comma-separated values of several columns, "
                "or a JSON object: '{\"id\": 7}'."
            ),
        ),
    ],
    *,
    tables: Annotated[
        list[str] | None, typer.Option("--table", help="Search only this table; may be repeated.")
    ] = None,
    ranges: Annotated[
        str | None,
        typer.Option("--range", help="Search only range N, or the consecutive ranges N-M."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Number of changes to show, oldest first.")
    ] = 100,
    json_output: JsonOption = False,
) -> None:
    """Show where in the journal the changes of a row are, and which sinks have them.

    The command searches everything that the journal still holds. A sink has a change once its
    checkpoint has passed it, even if the file's `filter` keeps the change from the sink. The exit
    code is 1 if no change is found.
    """
    wanted = Wanted(key)
    with opened_store() as store:
        known_pipeline(store, pipeline)
        within = _segment_bounds(store, pipeline, ranges)
        journal = Journal(Settings.from_env().journal_url)
        with _progress(store, pipeline, within) as progress:
            matches = search(
                store,
                journal,
                pipeline,
                wanted,
                tables=tables or (),
                segments=within,
                progress=progress,
            )
            shown = list(islice(matches, limit + 1))
        held = [hold for hold in store.holds.read(pipeline) if hold.state != "journaled"]
        sinks = list(store.checkpoints.read(pipeline))
    more = len(shown) > limit
    shown = shown[:limit]
    if json_output:
        changes = [_as_json(change) for change in shown]
        typer.echo(json.dumps({"pipeline": pipeline, "changes": changes, "more": more}))
    else:
        _print(shown, sinks, more=more)
        for hold in held:
            typer.echo(f"Not searched: {pluralize(hold.events, 'held event')} of {hold.subject}.")
    raise typer.Exit(0 if shown else 1)


def _segment_bounds(
    store: StateStore, pipeline: str, ranges: str | None
) -> tuple[int | None, int | None]:
    return (None, None) if ranges is None else segments_of(store, pipeline, range_numbers(ranges))


@contextmanager
def _progress(
    store: StateStore, pipeline: str, within: tuple[int | None, int | None]
) -> Iterator[Any]:
    """Show the progress of the search on standard error, if that is a terminal."""
    console = Console(stderr=True)
    total = store.segments.total_bytes(pipeline) if within == (None, None) else None
    bar = Progress(
        TextColumn("searching"),
        BarColumn(),
        TextColumn("{task.fields[done]}, segment {task.fields[segment]:,}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task("", total=total, done="", segment=0)
    searched = 0

    def show(segment: SegmentRow) -> None:
        nonlocal searched
        searched += segment.bytes + (segment.processed_bytes or 0)
        bar.update(task, completed=searched, done=size(searched), segment=segment.segment)

    with bar:
        yield show


def _as_json(change: Found) -> dict[str, Any]:
    return {
        **asdict(change),
        "key": json.loads(change.key),
        "old_key": None if change.old_key is None else json.loads(change.old_key),
    }


def _print(changes: Sequence[Found], sinks: Sequence[str], *, more: bool) -> None:
    if not changes:
        print_answer("The journal has no change of this key.")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("time", "table", "op", "key", "range", "segment", "position", *sinks):
        table.add_column(heading, overflow="fold")
    for change in changes:
        keys = change.key if change.old_key is None else f"{change.old_key} -> {change.key}"
        table.add_row(
            moment(change.ts_us / 1e6),
            change.table,
            change.op,
            keys,
            f"{change.range}",
            f"{change.segment}:{change.ordinal}",
            change.position,
            *(change.sinks.get(sink, "-") for sink in sinks),
        )
    print_answer(table)
    if more:
        print_answer(f"There are more than these {len(changes)} changes; use --limit to see more.")
