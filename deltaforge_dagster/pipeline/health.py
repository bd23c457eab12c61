"""Whether a pipeline works: what people asked of it, and a problem that only a person can mend.

A source that cannot be reached for now is no failure: it is asked again. One that refuses for good is,
and the store keeps why. A run reads what a tick of the sensor does not, so a run's failure is over when
a run can read again, and a tick's when either of them can ask the source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from deltaforge_dagster.config.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError, Terminal
from deltaforge_dagster.state.records import Failure, PipelineRow
from deltaforge_dagster.state.store import StateStore

Status = Literal["running", "paused", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Health:
    """A pipeline's status; `error` says why it is `failed`."""

    status: Status
    error: str | None = None


def health(store: StateStore, pipeline: LoadedPipeline | BrokenPipeline) -> Health:
    """Return the status of a pipeline: what is wanted, `failed` if a person must act."""
    if isinstance(pipeline, BrokenPipeline):
        return Health("failed", str(pipeline.error))
    row = store.pipeline(pipeline.name)
    if row is None:
        return Health("running")
    failure = failure_of(row)
    if row.want == "running" and failure is not None:
        return Health("failed", failure.message)
    return Health(row.want)


def failure_of(row: PipelineRow) -> Failure | None:
    """Return why nothing of a pipeline is captured until a person acts."""
    return None if row.failure is None else Failure(**json.loads(row.failure))


def tick_failed(store: StateStore, name: str, error: DeltaforgeError) -> None:
    """Note what a tick met, if a person must mend it."""
    row = store.pipeline(name)
    if row is None or not isinstance(error, Terminal):
        return
    known = failure_of(row)
    if known is None or (known.by == "tick" and known.message != str(error)):
        store.set_failure(name, Failure("tick", error.kind, str(error), store.now()))


def tick_passed(store: StateStore, name: str) -> None:
    """Note that a tick could ask the source."""
    row = store.pipeline(name)
    failure = None if row is None else failure_of(row)
    if failure is not None and failure.by == "tick":
        store.set_failure(name, None)
