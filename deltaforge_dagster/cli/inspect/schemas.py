"""`deltaforge schemas`: show the versions of a pipeline's tables."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer

from deltaforge_dagster.cli.options import JsonOption, NameArgument, PipelineArgument
from deltaforge_dagster.cli.output import moment, position, show_grid
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.schemas import live as live_schemas
from deltaforge_dagster.pipeline.schemas import views as schema_views
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.sources.findings import listed

app = typer.Typer(add_completion=False, no_args_is_help=True)

_Table = Annotated[str, typer.Argument(metavar="TABLE", help="Full name of a table.")]
_View = dict[str, Any]


@app.callback()
def schemas() -> None:
    """Show the table versions that a pipeline's rows were decoded with."""


@app.command("list")
def list_(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Show every captured table with its current version."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        found = schema_views.tables(store, pipeline)
    if json_output:
        _echo({"pipeline": pipeline, "tables": found})
        return
    rows = [
        (
            one["name"],
            f"{one['registry_version']}",
            f"{one['column_count']}",
            ", ".join(one["primary_key"]) or "none",
            _short(one["fingerprint"]),
            ", ".join(f"version {number}" for number in one["pending"]),
        )
        for one in found
    ]
    headings = ("table", "version", "columns", "key", "fingerprint", "waits for approval")
    show_grid(headings, rows, nothing="No table was captured yet.")


@app.command()
def show(
    pipeline: NameArgument,
    table: _Table,
    *,
    version: Annotated[
        int | None, typer.Option(min=1, help="Show this version. Default: the current one.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Show the newest version as of this sequence number.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--position", help="Show the version in force at this log position (JSON)."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show a version of a table: its columns, since when it is in force, and what it changed."""
    if sum(one is not None for one in (version, sequence, at)) > 1:
        raise NotAllowed("--version, --sequence and --position exclude one another")
    with opened_store() as store:
        known_pipeline(store, pipeline)
        found = schema_views.table(
            store, pipeline, table, version=version, sequence=sequence, position=at
        )
    if json_output:
        _echo({"pipeline": pipeline, **found})
        return
    waits = ", waits for approval" if found["pending"] else ""
    since = position(orjson.dumps(found["position"]).decode())
    typer.echo(
        f"{found['name']}, version {found['registry_version']} of {found['versions']}{waits}"
    )
    typer.echo(f"sequence {found['sequence']}, {found['fingerprint']}")
    typer.echo(f"since {since}, first seen {moment(found['registered_at'])}")
    rows = [
        (
            f"{one['ordinal_position']}",
            one["name"],
            one["data_type"],
            "" if one["nullable"] else "not null",
            "key" if one["is_primary_key"] else "",
        )
        for one in found["columns"]
    ]
    show_grid(("", "column", "type", "", ""), rows, nothing="")
    for line in found["changes"]:
        typer.echo(line)


@app.command()
def history(pipeline: NameArgument, table: _Table, *, json_output: JsonOption = False) -> None:
    """Show every version of a table, and what each one changed."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        found = schema_views.versions(store, pipeline, table)
    if json_output:
        _echo({"pipeline": pipeline, "table": table, "versions": found})
        return
    rows = [
        (
            f"{one['version']}",
            f"{one['sequence']}",
            moment(one["registered_at"]),
            position(orjson.dumps(one["position"]).decode()),
            _short(one["fingerprint"]),
            "; ".join(one["changes"]) + (" (waits for approval)" if one["pending"] else ""),
        )
        for one in found
    ]
    headings = ("version", "sequence", "first seen", "since", "fingerprint", "changes")
    show_grid(headings, rows, nothing="")


@app.command()
def diff(
    pipeline: NameArgument,
    table: _Table,
    *,
    before: Annotated[
        int | None,
        typer.Option("--from", min=1, help="The older version. Default: the one before --to."),
    ] = None,
    after: Annotated[
        int | None, typer.Option("--to", min=1, help="The newer version. Default: the current one.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the differences between two versions of a table."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        old, new, found = schema_views.difference(store, pipeline, table, before, after)
    lines = [str(one) for one in found]
    if json_output:
        _echo({"pipeline": pipeline, "table": table, "from": old, "to": new, "changes": lines})
        return
    typer.echo(f"{table}: version {old} -> {new}")
    typer.echo("\n".join(lines) or "No difference.")


@app.command()
def reload(
    pipeline: PipelineArgument,
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="Full name of a table. Default: every table."),
    ] = None,
    *,
    json_output: JsonOption = False,
) -> None:
    """Compare the database's tables, as they are now, with their newest captured versions.

    The command registers nothing: an altered table gets its new version when its next change is captured.
    """
    _, loaded = select_pipeline(Settings.from_env(), pipeline)
    source = build_source(loaded.spec)
    try:
        with opened_store() as store:
            known_pipeline(store, loaded.name)
            found = live_schemas.reload(store, loaded.name, source, table)
    finally:
        source.close()
    if json_output:
        _echo(found)
        return
    rows = [
        (
            one["name"],
            one["status"],
            one["error"] or "; ".join(one["differences"]),
        )
        for one in found["tables"]
    ]
    patterns = listed(loaded.spec.spec.source.config.tables) or "*"
    nothing = f"No table matches source.config.tables ({patterns})."
    show_grid(("table", "is", ""), rows, nothing=nothing)


def _short(fingerprint: str) -> str:
    return fingerprint.removeprefix("sha256:")[:12]


def _echo(found: _View) -> None:
    typer.echo(orjson.dumps(found))
