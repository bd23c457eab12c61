"""`deltaforge sensing`: show the fields of JSON documents, and where rows differ from tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    PipelineArgument,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import show_grid
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.sensing import views
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)

_Table = Annotated[
    str,
    typer.Argument(metavar="TABLE", help="A table, or table:column, as `sensing list` shows it."),
]


@app.callback()
def sensing() -> None:
    """Show what sensing has learned about a pipeline's documents and tables (docs/sensing.md)."""


@app.command("list")
def list_(pipeline: PipelineArgument, *, json_output: JsonOption = False) -> None:
    """Show every learned schema, and the progress of sensing."""
    with _opened(pipeline) as (store, loaded):
        schemas = views.schemas(store, loaded)
        progress = store.sensing.progress(loaded.name)
        row = known_pipeline(store, loaded.name)
    behind = row.next_segment - 1 - (0 if progress is None else progress.segment)
    problem = None if progress is None else progress.problem
    skipped = 0 if progress is None else progress.skipped
    if json_output:
        rest = {"segments_behind": behind, "segments_skipped": skipped, "problem": problem}
        typer.echo(json.dumps({"pipeline": loaded.name, "schemas": schemas, **rest}))
        return
    rows = [
        (
            learned["table"],
            f"{learned['sequence']}" + (" (stable)" if learned["stabilized"] else ""),
            learned["fingerprint"].removeprefix("sha256:")[:12],
            f"{learned['sampled_count']:,} of {learned['event_count']:,}",
            learned["last_seen"],
        )
        for learned in schemas
    ]
    show_grid(
        ("table", "schema", "fingerprint", "documents", "last seen"),
        rows,
        nothing="No document yet.",
    )
    if behind:
        typer.echo(f"Not processed yet: {pluralize(behind, 'segment')}.")
    if skipped:
        typer.echo(f"Deleted before sensing read them: {pluralize(skipped, 'segment')}.")
    if problem:
        typer.secho(f"sensing has stopped: {problem}", fg=typer.colors.YELLOW)


@app.command()
def show(pipeline: PipelineArgument, table: _Table, *, json_output: JsonOption = False) -> None:
    """Show the fields of a schema, how often it changed, and objects whose field names are data."""
    with _opened(pipeline) as (store, loaded):
        view = views.schema(store, loaded, table)
        changes = views.evolutions(store, loaded, table)
        classes = views.classifications(store, loaded, table)["paths"]
    if json_output:
        typer.echo(json.dumps({**view, "evolutions": changes, "paths": classes}))
        return
    rows = [
        (
            field["name"],
            " or ".join(field["types"]),
            "optional" if field["optional"] else "",
            _notes(field),
        )
        for field in view["fields"]
    ]
    show_grid(("field", "type", "", "values"), rows, nothing="It has no fields.")
    for path, verdict in classes.items():
        if verdict["has_dynamic_fields"]:
            typer.echo(
                f"{path or 'document'}: field names are data, "
                f"about {verdict['unique_keys']:,} names"
            )
    typer.echo(f"Changed {pluralize(len(changes), 'time')} since it was first seen.")


@app.command()
def schema(
    pipeline: PipelineArgument,
    table: _Table,
    *,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file instead of standard output.")
    ] = None,
) -> None:
    """Print a schema as JSON Schema."""
    with _opened(pipeline) as (store, loaded):
        text = json.dumps(views.json_schema(store, loaded, table), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, "utf-8")


@app.command()
def drift(
    pipeline: PipelineArgument,
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table.")] = None,
    *,
    json_output: JsonOption = False,
) -> None:
    """Show where rows differ from what their tables declare."""
    with _opened(pipeline) as (store, loaded):
        drifts = (
            views.drifts(store, loaded) if table is None else [views.drift(store, loaded, table)]
        )
    if json_output:
        typer.echo(json.dumps({"pipeline": loaded.name, "tables": drifts}))
        return
    rows = [
        (
            f"{drifted['table']}.{column['column']}",
            column["expected_type"] or "-",
            ", ".join(column["observed_types"]) or "-",
            ", ".join(f"{kind} {count:,}" for kind, count in column["problems"].items()),
            max(column["last_seen"].values(), default="-"),
        )
        for drifted in drifts
        for column in drifted["columns"]
    ]
    show_grid(("column", "declared", "seen", "what", "last seen"), rows, nothing="Nothing differs.")
    analyzed = sum(drifted["events_analyzed"] for drifted in drifts)
    differing = sum(drifted["events_with_drift"] for drifted in drifts)
    typer.echo(f"Rows that differ: {differing:,} of {analyzed:,} analyzed.")


@contextmanager
def _opened(pipeline: str) -> Iterator[tuple[StateStore, LoadedPipeline]]:
    """Yield the state store and the pipeline; it must be in the store and have sensing enabled."""
    _, loaded = select_pipeline(Settings.from_env(), pipeline)
    views.options_of(loaded)
    with opened_store() as store:
        known_pipeline(store, loaded.name)
        yield store, loaded


def _notes(field: dict[str, Any]) -> str:
    """Return what is known about a field's values."""
    notes = []
    if field.get("null_rate"):
        notes.append(f"{field['null_rate']:.1%} null")
    if "format" in field:
        notes.append(field["format"])
    if "enum" in field:
        notes.append("one of " + ", ".join(field["enum"]))
    if "array_element_types" in field:
        notes.append("of " + " or ".join(field["array_element_types"]))
    if "nested_field_count" in field:
        notes.append(f"{pluralize(field['nested_field_count'], 'field')} inside")
    if "cardinality" in field:
        notes.append(f"{field['min']} to {field['max']}, about {field['cardinality']:,} different")
    return "; ".join(notes)
