"""Routes for the structures found in events, and for rows that differ from their tables.

A table is `orders`, `public.orders`, or `public.orders:column` for the documents in a JSON column.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from deltaforge_dagster.api.context import Context, Pipeline
from deltaforge_dagster.api.errors import FeatureOff, found
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import SensingDisabled
from deltaforge_dagster.pipeline.sensing import views as sensing_views

router = APIRouter(prefix="/pipelines/{name}", tags=["Sensing"])

View = dict[str, Any]


def _sensed(loaded: Pipeline) -> LoadedPipeline:
    try:
        sensing_views.check_exposed(loaded)
    except SensingDisabled as error:
        raise FeatureOff(str(error)) from error
    return loaded


Sensed = Annotated[LoadedPipeline, Depends(_sensed)]


@router.get("/sensing/schemas")
def schemas(loaded: Sensed, context: Context) -> list[View]:
    """Return every learned structure, without its fields."""
    return sensing_views.schemas(context.store, loaded)


@router.get("/sensing/stats")
def stats(loaded: Sensed, context: Context) -> View:
    """Return how often the structure of an event was already known."""
    return sensing_views.stats(context.store, loaded)


@router.get("/sensing/schemas/{table}")
def schema(loaded: Sensed, context: Context, table: str) -> View:
    """Return one structure with its fields."""
    return found(lambda: sensing_views.schema(context.store, loaded, table))


@router.get("/sensing/schemas/{table}/json-schema")
def json_schema(loaded: Sensed, context: Context, table: str) -> View:
    """Return one structure as JSON Schema."""
    return found(lambda: sensing_views.json_schema(context.store, loaded, table))


@router.get("/sensing/schemas/{table}/classifications")
def classifications(loaded: Sensed, context: Context, table: str) -> View:
    """Return which objects of a structure are maps, whose keys are data."""
    return found(lambda: sensing_views.classifications(context.store, loaded, table))


@router.get("/sensing/schemas/{table}/evolutions")
def evolutions(loaded: Sensed, context: Context, table: str) -> list[View]:
    """Return the changes of a structure, oldest first."""
    return found(lambda: sensing_views.evolutions(context.store, loaded, table))


@router.get("/drift")
def drifts(loaded: Sensed, context: Context) -> list[View]:
    """Return where rows differ from the declarations of their tables, for every table."""
    return sensing_views.drifts(context.store, loaded)


@router.get("/drift/{table}")
def drift(loaded: Sensed, context: Context, table: str) -> View:
    """Return where rows differ from the declaration of one table."""
    return found(lambda: sensing_views.drift(context.store, loaded, table))
