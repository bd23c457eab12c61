"""Routes for the tables of a pipeline: as the source declares them, and as sensing finds them.

Captured versions and the source's current catalog: a path names a table as `{db}/{table}`, database
and table name. In databases with schemas, `{table}` may also be `schema.table`, and `{db}` may be a
schema, as long as the path is unambiguous.

Structures found in events, and rows that differ from their tables: a table is `orders`,
`public.orders`, or `public.orders:column` for the documents in a JSON column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from deltaforge_dagster.api.context import Caller, Context, Pipeline
from deltaforge_dagster.api.errors import FeatureOff, found
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError, SensingDisabled
from deltaforge_dagster.pipeline.schemas import live as live_schemas
from deltaforge_dagster.pipeline.schemas import views as schema_views
from deltaforge_dagster.pipeline.sensing import views as sensing_views
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.tables import TableDetails

router = APIRouter(prefix="/pipelines/{name}/schemas", tags=["Schemas"])
sensing_router = APIRouter(prefix="/pipelines/{name}", tags=["Sensing"])

View = dict[str, Any]
Number = Annotated[int | None, Query(ge=1, lt=2**63)]
Database = Annotated[str, Path()]
Table = Annotated[str, Path()]


@router.get("")
def tables(loaded: Pipeline, context: Context) -> list[View]:
    """Return every captured table with its current version."""
    return schema_views.tables(context.store, loaded.name)


@router.post("/reload")
def reload(loaded: Pipeline, context: Context, caller: Caller) -> View:
    """Compare every table in the database with its newest captured version.

    Nothing is registered: rows are decoded with the version that was in force at their position in
    the log. If the client disconnects, the remaining tables are skipped.
    """
    with _source(loaded) as source:
        return live_schemas.reload(
            context.store, loaded.name, source, proceed=caller.check_still_there
        )


@router.get("/{db}/{table}")
def table(
    loaded: Pipeline,
    context: Context,
    *,
    db: Database,
    table: Table,
    version: Number = None,
    sequence: Number = None,
) -> View:
    """Return one table with its columns: the current version, or the one of a given number.

    For the current version, what the log does not contain (`default`, `extra`, `nullable`) is read
    from the source's catalog; if that fails, `catalog` has the error.
    """

    def ask() -> View:
        captured = schema_views.captured(context.store, loaded.name)
        name = schema_views.named(captured, loaded.name, db, table)
        return schema_views.table(
            context.store, loaded.name, name, version=version, sequence=sequence
        )

    view = found(ask)
    if version is not None or sequence is not None:
        return schema_views.detailed(view, None) | {"catalog": None}

    def details() -> TableDetails:
        with _source(loaded) as source:
            return source.details(view["name"])

    return _with_catalog(view, details)


@router.post("/{db}/{table}/reload")
def reload_table(loaded: Pipeline, context: Context, db: Database, table: Table) -> View:
    """Compare one table in the database with its newest captured version, and return both."""
    with _source(loaded) as source:
        name = found(lambda: live_schemas.named(context.store, loaded.name, source, db, table))
        live: View = found(lambda: live_schemas.reload(context.store, loaded.name, source, name))[
            "tables"
        ][0]
        if all(history.name != name for history in context.store.schemas.histories(loaded.name)):
            return live
        view = schema_views.table(context.store, loaded.name, name)
        return _with_catalog(view, lambda: source.details(name)) | live


@router.get("/{db}/{table}/versions")
def versions(loaded: Pipeline, context: Context, db: Database, table: Table) -> list[View]:
    """Return every version of a table, oldest first."""

    def ask() -> list[View]:
        captured = schema_views.captured(context.store, loaded.name)
        name = schema_views.named(captured, loaded.name, db, table)
        return schema_views.versions(context.store, loaded.name, name)

    return found(ask)


@contextmanager
def _source(loaded: LoadedPipeline) -> Iterator[Source]:
    source = build_source(loaded.spec)
    try:
        yield source
    finally:
        source.close()


def _with_catalog(view: View, details: Callable[[], TableDetails]) -> View:
    """Return a table with details of the source's catalog, or with the error of reading it."""
    try:
        return schema_views.detailed(view, details()) | {"catalog": {"error": None}}
    except DeltaforgeError as error:
        return schema_views.detailed(view, None) | {"catalog": {"error": mask(str(error))}}


def _sensed(loaded: Pipeline) -> LoadedPipeline:
    try:
        sensing_views.check_exposed(loaded)
    except SensingDisabled as error:
        raise FeatureOff(str(error)) from error
    return loaded


Sensed = Annotated[LoadedPipeline, Depends(_sensed)]


@sensing_router.get("/sensing/schemas")
def schemas(loaded: Sensed, context: Context) -> list[View]:
    """Return every learned structure, without its fields."""
    return sensing_views.schemas(context.store, loaded)


@sensing_router.get("/sensing/stats")
def stats(loaded: Sensed, context: Context) -> View:
    """Return how often the structure of an event was already known."""
    return sensing_views.stats(context.store, loaded)


@sensing_router.get("/sensing/schemas/{table}")
def schema(loaded: Sensed, context: Context, table: str) -> View:
    """Return one structure with its fields."""
    return found(lambda: sensing_views.schema(context.store, loaded, table))


@sensing_router.get("/sensing/schemas/{table}/json-schema")
def json_schema(loaded: Sensed, context: Context, table: str) -> View:
    """Return one structure as JSON Schema."""
    return found(lambda: sensing_views.json_schema(context.store, loaded, table))


@sensing_router.get("/sensing/schemas/{table}/classifications")
def classifications(loaded: Sensed, context: Context, table: str) -> View:
    """Return which objects of a structure are maps, whose keys are data."""
    return found(lambda: sensing_views.classifications(context.store, loaded, table))


@sensing_router.get("/sensing/schemas/{table}/evolutions")
def evolutions(loaded: Sensed, context: Context, table: str) -> list[View]:
    """Return the changes of a structure, oldest first."""
    return found(lambda: sensing_views.evolutions(context.store, loaded, table))


@sensing_router.get("/drift")
def drifts(loaded: Sensed, context: Context) -> list[View]:
    """Return where rows differ from the declarations of their tables, for every table."""
    return sensing_views.drifts(context.store, loaded)


@sensing_router.get("/drift/{table}")
def drift(loaded: Sensed, context: Context, table: str) -> View:
    """Return where rows differ from the declaration of one table."""
    return found(lambda: sensing_views.drift(context.store, loaded, table))
