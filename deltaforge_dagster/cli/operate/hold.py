"""`deltaforge hold`: show the held changes of a pipeline, and release or approve them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.output import position, print_answer, say
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.capture.holds import TABLE
from deltaforge_dagster.pipeline.plural import duration, pluralize, size

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def hold() -> None:
    """Show held changes; release them once the cause is fixed, or approve a new form."""


@app.command("list")
def list_(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Show every hold: its subject, since when, how many events, and why."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        holds = store.holds.read(pipeline)
        now = store.now()
    if json_output:
        listed = [{**hold.to_json(), "seconds": round(now - hold.since, 1)} for hold in holds]
        typer.echo(json.dumps({"pipeline": pipeline, "holds": listed}))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("of", "state", "events", "bytes", "since", "after", "reason"):
        table.add_column(heading, overflow="fold")
    for hold in holds:
        table.add_row(
            f"{hold.kind} {hold.subject}",
            hold.state,
            f"{hold.events:,}",
            size(hold.bytes),
            f"{duration(now - hold.since)} ago",
            position(hold.since_position),
            hold.reason,
        )
    print_answer(table if holds else "Nothing is held.")


@app.command()
def release(
    pipeline: NameArgument,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Full name of a held table.")],
    *,
    create_table: Annotated[
        Path | None,
        typer.Option(
            "--create-table",
            metavar="FILE",
            help=(
                "File with the CREATE TABLE statement of the table as it was where the hold begins."
            ),
        ),
    ] = None,
    catalog: Annotated[
        bool,
        typer.Option(
            "--catalog",
            help=(
                "Decode every held change with the table, and the types of the same names, "
                "as they are on the server now."
            ),
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Have the next run decode and deliver the held changes of a table, before newer changes of it.

    Without an option, the log itself must describe the columns (MySQL: binlog_row_metadata=FULL).
    Changes that still cannot be decoded are held again, with the new reason.
    """
    if catalog and create_table is not None:
        raise NotAllowed("--create-table and --catalog exclude one another")
    database, _, name = table.partition(".")
    fix: dict[str, Any] = {"db": database, "table": name}
    if create_table is not None:
        try:
            fix["create_table"] = create_table.read_text()
        except OSError as error:
            raise NotAllowed(f"{create_table}: {error.strerror}") from error
    if catalog:
        fix["catalog"] = True
    with opened_store() as store:
        known_pipeline(store, pipeline)
        row = store.holds.release(pipeline, TABLE, table, json.dumps(fix))
    say(
        f"{table}: the next run delivers {pluralize(row.events, 'held event')}.",
        {"pipeline": pipeline, "table": table, "events": row.events},
        as_json=json_output,
    )


@app.command()
def approve(
    pipeline: NameArgument,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Full name of a waiting table.")],
    *,
    json_output: JsonOption = False,
) -> None:
    """Approve the forms that a table has had so far; the next run delivers what waits, in order.

    `deltaforge hold list` shows what waits, `deltaforge schemas diff` shows how the forms differ.
    """
    with opened_store() as store:
        known_pipeline(store, pipeline)
        changes = store.holds.approve_table(pipeline, table)
    say(
        f"{table}: approved; the next run delivers {pluralize(changes, 'waiting change')}.",
        {"pipeline": pipeline, "table": table, "changes": changes},
        as_json=json_output,
    )
