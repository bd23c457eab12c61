"""`deltaforge acknowledge`: accept that sinks never get changes which the source's log lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.errors import NotAllowed


def acknowledge(
    pipeline: NameArgument,
    *,
    tables: Annotated[
        str,
        typer.Option("--tables", help="Comma-separated full names of tables. Default: all."),
    ] = "",
    json_output: JsonOption = False,
) -> None:
    """Let sinks go without what the source's log lacks of tables; `status` no longer shows it."""
    names = [name.strip() for name in tables.split(",") if name.strip()]
    with opened_store() as store:
        known_pipeline(store, pipeline)
        acknowledged = store.gaps.acknowledge(pipeline, names)
    if not acknowledged:
        raise NotAllowed(
            f"pipeline {pipeline!r}: the log lacks nothing of {tables or 'its tables'}"
        )
    text = f"{', '.join(acknowledged)}: what the log lacks is acknowledged; sinks never get it."
    say(text, {"pipeline": pipeline, "tables": acknowledged}, as_json=json_output)
