"""Pipelines in the form in which responses show them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import orjson

from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.shapes import (
    EarlyConfirmed,
    LogState,
    Ops,
    PipeInfo,
    SinkCheckpoint,
    Trouble,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.pipeline.committed import sink_lag_seconds
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.specs import kept_form
from deltaforge_dagster.pipeline.health.health import Health, health
from deltaforge_dagster.state.records import CheckpointRow
from deltaforge_dagster.state.store import StateStore


def info(store: StateStore, pipeline: AnyPipeline) -> PipeInfo:
    """Return a pipeline with its status."""
    state = health(store, pipeline)
    spec = shown(pipeline.spec) if isinstance(pipeline, LoadedPipeline) else None
    return PipeInfo(
        name=pipeline.name,
        status=state.status,
        spec=spec,
        error=None if state.error is None else mask(state.error),
        problems=troubles(state),
        seen_at=state.seen_at,
    )


def troubles(state: Health) -> list[Trouble]:
    """Return a pipeline's problems, with secrets masked."""
    return [
        Trouble(**{**problem.to_json(), "text": mask(problem.text)}) for problem in state.problems
    ]


def shown(spec: PipelineSpec) -> dict[str, Any]:
    """Return a spec with secrets masked and scripts replaced by hashes.

    Scripts may contain values of variables.
    """
    return kept_form(spec)


def checkpoints(store: StateStore, name: str) -> list[SinkCheckpoint]:
    """Return the checkpoint of each sink of a pipeline."""
    now = store.now()
    return [_checkpoint(row, now) for row in store.checkpoints.read(name).values()]


def ops(context: ApiContext, name: str) -> Ops | None:
    """Return the operational state of a pipeline, None if the state store does not have it yet."""
    store = context.store
    row = store.pipelines.get(name)
    if row is None:
        return None
    now = store.now()
    sinks = store.checkpoints.read(name).values()
    attached = [
        sink_lag_seconds(store, row, checkpoint, now) for checkpoint in sinks if checkpoint.attached
    ]
    log, early = store.pipelines.source_log(name), store.pipelines.early_confirmation(name)
    return Ops(
        lag_seconds=max(attached, default=None),
        dlq_entries=store.dead_letters.depth(name).entries,
        sink_errors={
            checkpoint.sink: mask(checkpoint.error_line)
            for checkpoint in sinks
            if checkpoint.error_line
        },
        uptime_seconds=_uptime(context, name, now),
        checkpoints=[_checkpoint(checkpoint, now) for checkpoint in sinks],
        source_log=None if log is None else LogState(**asdict(log)),
        confirmed_early=None if early is None else EarlyConfirmed(**asdict(early)),
    )


def _checkpoint(row: CheckpointRow, now: float) -> SinkCheckpoint:
    position = None if row.source_position is None else orjson.loads(row.source_position)
    age = max(0.0, now - row.updated_at)
    return SinkCheckpoint(sink_id=row.sink, position=position, age_seconds=age)


def _uptime(context: ApiContext, name: str, now: float) -> float | None:
    """Return the uptime of the run that holds the lease, since the start that Dagster recorded."""
    lease = context.store.leases.get(name)
    if lease is None or lease.run_id is None or not lease.held_at(now):
        return None
    record = context.instance.get_run_record_by_id(lease.run_id)
    if record is None or record.start_time is None:
        return None
    return max(0.0, time.time() - record.start_time)
