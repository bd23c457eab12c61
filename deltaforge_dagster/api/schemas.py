"""Routes about the tables of a pipeline: their versions as captured, and the catalog's today.

A table is `{db}/{table}`: the schema and the table in PostgreSQL, the database and the table elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from deltaforge_dagster.api.context import ApiContext, Context, Pipeline
from deltaforge_dagster.api.errors import found
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.pipeline import live_schemas, schema_views
from deltaforge_dagster.sources.build import build_source

router = APIRouter(prefix="/pipelines/{name}/schemas", tags=["Schemas"])

View = dict[str, Any]
Number = Annotated[int | None, Query(ge=1, lt=2**63)]


@router.get("")
def tables(loaded: Pipeline, context: Context) -> list[View]:
    """Every table that was captured, with the version that it has now."""
    return schema_views.tables(context.store, loaded.name)


@router.post("/reload")
def reload(loaded: Pipeline, context: Context) -> View:
    """Look at every table in the database: what has changed since its rows were captured last.

    Nothing is registered: a row is decoded with the version of its time, which its log says.
    """
    return _live(context, loaded, None)


@router.get("/{db}/{table}")
def table(
    loaded: Pipeline,
    context: Context,
    *,
    db: Annotated[str, Path()],
    table: Annotated[str, Path()],
    version: Number = None,
    sequence: Number = None,
) -> View:
    """One table with its columns: as it is now, or as of a version or a sequence number."""
    return found(
        lambda: schema_views.table(
            context.store, loaded.name, f"{db}.{table}", version=version, sequence=sequence
        )
    )


@router.post("/{db}/{table}/reload")
def reload_table(
    loaded: Pipeline,
    context: Context,
    db: Annotated[str, Path()],
    table: Annotated[str, Path()],
) -> View:
    """Look at one table in the database: how it was captured last, and what has changed since."""
    name = f"{db}.{table}"
    live: View = found(lambda: _live(context, loaded, name))["tables"][0]
    captured = any(one.name == name for one in context.store.table_histories(loaded.name))
    return (schema_views.table(context.store, loaded.name, name) if captured else {}) | live


@router.get("/{db}/{table}/versions")
def versions(
    loaded: Pipeline,
    context: Context,
    db: Annotated[str, Path()],
    table: Annotated[str, Path()],
) -> list[View]:
    """Every version of a table, the oldest first."""
    return found(lambda: schema_views.versions(context.store, loaded.name, f"{db}.{table}"))


def _live(context: ApiContext, loaded: LoadedPipeline, only: str | None) -> View:
    source = build_source(loaded.spec)
    try:
        return live_schemas.reload(context.store, loaded.name, source, only)
    finally:
        source.close()
