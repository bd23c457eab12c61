"""Routes for dead letters: show them, deliver them again, or discard them."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query

from deltaforge_dagster.api.context import Context, Pipeline
from deltaforge_dagster.api.errors import FeatureOff, NotFound
from deltaforge_dagster.api.shapes import Acked, Count, Purged, Redrive, Redriven, UpTo
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.control.closed_ranges import keeps_what_it_has
from deltaforge_dagster.state.dead_letters import entry_json

router = APIRouter(prefix="/pipelines/{name}/journal/dlq", tags=["Dead letters"])


def _enabled(loaded: Pipeline) -> LoadedPipeline:
    if not loaded.spec.spec.journal.enabled:
        raise FeatureOff(f"pipeline {loaded.name!r} keeps no dead letters (spec.journal.enabled)")
    return loaded


Enabled = Annotated[LoadedPipeline, Depends(_enabled)]
Entry = dict[str, Any]


@router.get("")
def entries(
    loaded: Enabled,
    context: Context,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    sink_id: str | None = None,
    error_kind: str | None = None,
) -> list[Entry]:
    """Return dead letters with their events, oldest first."""
    rows = context.store.dead_letters.read(
        loaded.name, sink=sink_id, error_kind=error_kind, limit=limit
    )
    return [orjson.loads(entry_json(loaded.name, row)) for row in rows]


@router.get("/count")
def count(loaded: Enabled, context: Context) -> Count:
    """Return the number of dead letters."""
    return Count(count=context.store.dead_letters.depth(loaded.name).entries)


@router.get("/{seq}")
def entry(loaded: Enabled, context: Context, seq: Annotated[int, Path(ge=1, lt=2**63)]) -> Entry:
    """Return one dead letter with its event."""
    rows = context.store.dead_letters.read(loaded.name, seqs=[seq])
    if not rows:
        raise NotFound(f"pipeline {loaded.name!r} has no dead letter {seq}")
    letter: Entry = orjson.loads(entry_json(loaded.name, rows[0]))
    return letter


@router.post("/ack")
def ack(loaded: Enabled, context: Context, body: UpTo) -> Acked:
    """Discard all dead letters up to a number: the sinks never get these changes."""
    return Acked(acked=context.store.dead_letters.remove(loaded.name, up_to=body.up_to_seq))


@router.post("/redrive")
def redrive(loaded: Enabled, context: Context, body: Redrive) -> Redriven:
    """Have the run deliver entries again, in order for each key, with what waits behind them."""
    if body.sink_id is not None and keeps_what_it_has(loaded.spec, body.sink_id):
        raise NotAllowed(
            f"sink {body.sink_id!r} of pipeline {loaded.name!r} writes tables and has no dead "
            "letters"
        )
    done = context.store.dead_letters.redrive(loaded.name, sink=body.sink_id, seqs=body.seqs)
    return Redriven(redriven=done)


@router.delete("")
def purge(loaded: Enabled, context: Context) -> Purged:
    """Discard every dead letter, including those that only wait behind others."""
    return Purged(purged=context.store.dead_letters.remove(loaded.name))
