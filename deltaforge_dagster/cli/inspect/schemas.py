"""`deltaforge schemas`: show the versions of a pipeline's tables."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    NameArgument,
    PipelineArgument,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import moment, position, show_grid
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
        tables = schema_views.tables(store, pipeline)
    if json_output:
        _echo({"pipeline": pipeline, "tables": tables})
        return
    rows = [
        (
            table["name"],
            f"{table['registry_version']}",
            f"{table['column_count']}",
            ", ".join(table["primary_key"]) or "none",
            _short(table["fingerprint"]),
            ", ".join(f"version {number}" for number in table["pending"]),
        )
        for table in tables
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
    if sum(option is not None for option in (version, sequence, at)) > 1:
        raise NotAllowed("--version, --sequence and --position exclude one another")
    with opened_store() as store:
        known_pipeline(store, pipeline)
        view = schema_views.table(
            store, pipeline, table, version=version, sequence=sequence, position=at
        )
    if json_output:
        _echo({"pipeline": pipeline, **view})
        return
    waits = ", waits for approval" if view["pending"] else ""
    since = position(orjson.dumps(view["position"]).decode())
    typer.echo(f"{view['name']}, version {view['registry_version']} of {view['versions']}{waits}")
    typer.echo(f"sequence {view['sequence']}, {view['fingerprint']}")
    typer.echo(f"since {since}, first seen {moment(view['registered_at'])}")
    rows = [
        (
            f"{column['ordinal_position']}",
            column["name"],
            column["data_type"],
            "" if column["nullable"] else "not null",
            "key" if column["is_primary_key"] else "",
        )
        for column in view["columns"]
    ]
    show_grid(("", "column", "type", "", ""), rows, nothing="")
    for line in view["changes"]:
        typer.echo(line)


@app.command()
def history(pipeline: NameArgument, table: _Table, *, json_output: JsonOption = False) -> None:
    """Show every version of a table, and what each one changed."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        versions = schema_views.versions(store, pipeline, table)
    if json_output:
        _echo({"pipeline": pipeline, "table": table, "versions": versions})
        return
    rows = [
        (
            f"{version['version']}",
            f"{version['sequence']}",
            moment(version["registered_at"]),
            position(orjson.dumps(version["position"]).decode()),
            _short(version["fingerprint"]),
            "; ".join(version["changes"]) + (" (waits for approval)" if version["pending"] else ""),
        )
        for version in versions
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
        old, new, differences = schema_views.difference(store, pipeline, table, before, after)
    lines = [str(difference) for difference in differences]
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

    The command registers nothing: an altered table gets its new version when its next change is
    captured.
    """
    _, loaded = select_pipeline(Settings.from_env(), pipeline)
    source = build_source(loaded.spec)
    try:
        with opened_store() as store:
            known_pipeline(store, loaded.name)
            comparison = live_schemas.reload(store, loaded.name, source, table)
    finally:
        source.close()
    if json_output:
        _echo(comparison)
        return
    rows = [
        (
            compared["name"],
            compared["status"],
            compared["error"] or "; ".join(compared["differences"]),
        )
        for compared in comparison["tables"]
    ]
    patterns = listed(loaded.spec.spec.source.config.tables) or "*"
    nothing = f"No table matches source.config.tables ({patterns})."
    show_grid(("table", "is", ""), rows, nothing=nothing)


def _short(fingerprint: str) -> str:
    return fingerprint.removeprefix("sha256:")[:12]


def _echo(view: _View) -> None:
    typer.echo(orjson.dumps(view))
