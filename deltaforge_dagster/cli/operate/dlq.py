"""`deltaforge dlq`: show dead letters, deliver them again, or discard them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import orjson
import typer
from rich.table import Table

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.output import print_answer
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.plural import duration, pluralize
from deltaforge_dagster.state.dead_letters import entry_json
from deltaforge_dagster.state.records import DeadLetterRow
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)

_Numbers = Annotated[
    list[int] | None, typer.Argument(metavar="N", help="Numbers of the entries.", min=1)
]
_Sink = Annotated[
    str | None, typer.Option("--sink", metavar="S", help="Only entries of this sink.")
]


@app.callback()
def dlq() -> None:
    """Show a pipeline's dead letters, deliver them again, or discard them."""


@app.command("list")
def list_(
    pipeline: NameArgument,
    *,
    sink: _Sink = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            help="Only entries of this kind: routing, serialization, too_large or waiting.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Number of entries to show, oldest first.")
    ] = 50,
    json_output: JsonOption = False,
) -> None:
    """Show the entries: the change, its sink and the cause, without the events themselves."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        _check_sink(store, pipeline, sink)
        rows = store.dead_letters.read(pipeline, sink=sink, error_kind=kind, limit=limit)
        depth = store.dead_letters.depth(pipeline)
        now = store.now()
    if json_output:
        entries = [orjson.Fragment(entry_json(pipeline, row)) for row in rows]
        answer = {"pipeline": pipeline, "count": depth.entries, "entries": entries}
        typer.echo(orjson.dumps(answer))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("n", "sink", "table", "state", "cause", "attempts", "since", "place", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            f"{row.seq}",
            row.sink,
            row.table_name,
            row.state,
            row.error_kind,
            f"{row.attempts}",
            f"{duration(now - row.created_at)} ago",
            f"{row.segment}:{row.ordinal}",
            row.error_message,
        )
    print_answer(table if rows else "There are no such dead letters.")
    if depth.entries > len(rows) > 0:
        print_answer(f"{len(rows):,} of {_entry_count(depth.entries)}.")


@app.command()
def show(
    pipeline: NameArgument,
    number: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of the entry.")],
    *,
    json_output: JsonOption = False,
) -> None:
    """Show one entry with its event, including the values."""
    with opened_store() as store:
        (row,) = _existing_rows(store, pipeline, [number])
    if json_output:
        typer.echo(entry_json(pipeline, row))
        return
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (
        ("sink", row.sink),
        ("state", row.state),
        ("cause", f"{row.error_kind}: {row.error_message}"),
        ("attempts", f"{row.attempts}"),
        ("event", row.event_id),
        ("place", f"segment {row.segment}, ordinal {row.ordinal}; {row.source_cursor}"),
        ("table", row.table_name),
        ("key", row.row_key or "none"),
    ):
        facts.add_row(name, value)
    print_answer(facts)
    typer.echo(row.event)


@app.command()
def redrive(
    pipeline: NameArgument,
    numbers: _Numbers = None,
    *,
    sink: _Sink = None,
    every: Annotated[bool, typer.Option("--all", help="Every dead entry.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Deliver entries again after their cause is fixed, with the pipeline file as it is then.

    The sink's deliverer sends them in the live run or in the next one, in order for each key,
    together with the entries that wait behind them. An entry that is refused again stays.
    """
    if not (numbers or sink or every):
        raise NotAllowed("say which entries: their numbers, --sink or --all")
    with opened_store() as store:
        known_pipeline(store, pipeline)
        _check_sink(store, pipeline, sink)
        if numbers:
            _existing_rows(store, pipeline, numbers)
        count = store.dead_letters.redrive(pipeline, sink=sink, seqs=numbers or None)
    if json_output:
        typer.echo(orjson.dumps({"pipeline": pipeline, "redriven": count}))
    else:
        typer.echo(f"{_entry_count(count)} will be delivered again by the pipeline's run.")


@app.command()
def ack(
    pipeline: NameArgument,
    numbers: _Numbers = None,
    *,
    up_to: Annotated[
        int | None,
        typer.Option("--up-to", metavar="N", min=1, help="Every entry up to this number."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Discard entries: the sink never gets these changes.

    Entries that wait behind them are delivered.
    """
    if bool(numbers) is (up_to is not None):
        raise NotAllowed("say which entries: their numbers, or --up-to N")
    with opened_store() as store:
        known_pipeline(store, pipeline)
        if numbers:
            _existing_rows(store, pipeline, numbers)
        count = store.dead_letters.remove(pipeline, seqs=numbers or None, up_to=up_to)
    if json_output:
        typer.echo(orjson.dumps({"pipeline": pipeline, "acked": count}))
    else:
        typer.echo(f"{_entry_count(count)} discarded.")


@app.command()
def purge(pipeline: NameArgument, *, sink: _Sink = None, json_output: JsonOption = False) -> None:
    """Discard every entry, including those that only wait behind others."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        _check_sink(store, pipeline, sink)
        count = store.dead_letters.remove(pipeline, sink=sink)
    if json_output:
        typer.echo(orjson.dumps({"pipeline": pipeline, "purged": count}))
    else:
        typer.echo(f"{_entry_count(count)} discarded.")


def _check_sink(store: StateStore, pipeline: str, sink: str | None) -> None:
    """Refuse a sink that writes tables, which never has an entry."""
    if sink is not None and store.table_commits.read(pipeline, sink) is not None:
        raise NotAllowed(
            f"pipeline {pipeline!r}: sink {sink!r} writes tables and has no dead letters; "
            f"a table that cannot be written is held, and deltaforge status {pipeline} says why"
        )


def _existing_rows(
    store: StateStore, pipeline: str, numbers: Collection[int]
) -> list[DeadLetterRow]:
    """Return the entries with these numbers; all of them must exist."""
    known_pipeline(store, pipeline)
    rows = store.dead_letters.read(pipeline, seqs=numbers)
    missing = sorted(set(numbers) - {row.seq for row in rows})
    if missing:
        names = ", ".join(map(str, missing))
        raise NotAllowed(f"pipeline {pipeline!r} has no dead letter {names}")
    return rows


def _entry_count(count: int) -> str:
    return pluralize(count, "entry", "entries")
