"""Catch-up on request: deliver to one sink what it lacks up to a range, in order.

It uses the run's own delivery and nothing else: it holds the lease, one deliverer sends the journal
to the sink from its checkpoint, nothing is captured, no other sink is touched. The delivered ranges
are published as usual.
"""

from __future__ import annotations

import time

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed, Retryable
from deltaforge_dagster.pipeline.committed import go_on_command
from deltaforge_dagster.pipeline.deliver.deliverer_set import DelivererSet
from deltaforge_dagster.pipeline.run.confirmer import Confirmer
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun, Observer, RunContext
from deltaforge_dagster.state.store import StateStore

PATIENCE_SECONDS = 30.0
"""Seconds without progress after which a retryable failure ends the catch-up."""

_LOOK_SECONDS = 0.1


def catch_up(
    loaded: LoadedPipeline,
    context: RunContext,
    sink_id: str,
    until: int,
    *,
    run_id: str,
    observer: Observer,
) -> int:
    """Deliver to one sink what it lacks up to segment `until`; return how many messages were sent.

    Raises:
        NotAllowed: A run is working on the pipeline, or the sink is paused or detached.
        DeltaforgeError: The sink, Spark or the journal failed. What was acknowledged before is
            in the sink's checkpoint.
    """
    store, pipeline = context.store, loaded.name
    state = store.checkpoints.read(pipeline)[sink_id].state
    if state != "attached":
        raise NotAllowed(
            f"{pipeline}: sink {sink_id} is {state}; to let it go on: "
            f"{go_on_command(pipeline, sink_id, state)}"
        )
    limits = loaded.spec.spec.engine.run
    lease = ActiveLease.acquire(
        store,
        pipeline,
        run_id,
        seconds=limits.lease_seconds,
        renew_seconds=limits.renew_seconds,
        on_renewal=lambda: None,
    )
    if lease is None:
        raise NotAllowed(_active_sentence(store, pipeline, sink_id))
    try:
        run = LeasedRun(store, context.journal, lease, observer.warn)
        deliverers = DelivererSet(loaded.spec, context, run, only=sink_id, until=until)
        try:
            deliverers.poll()
            _wait(deliverers, lease)
        finally:
            deliverers.end()
        Confirmer(loaded, run).confirm(None)
        observer.publish()
        return deliverers.sent[sink_id]
    finally:
        lease.release()


def _wait(deliverers: DelivererSet, lease: ActiveLease) -> None:
    began = time.monotonic()
    while not deliverers.done:
        lease.guard()
        for error in deliverers.failures.values():
            stuck = time.monotonic() - max(began, deliverers.moved_at)
            if not isinstance(error, Retryable) or stuck > PATIENCE_SECONDS:
                raise error
        time.sleep(_LOOK_SECONDS)


def _active_sentence(store: StateStore, pipeline: str, sink_id: str) -> str:
    row = store.leases.get(pipeline)
    holder = "a run" if row is None or row.run_id is None else f"run {row.run_id[:8]}"
    return (
        f"{pipeline}: {holder} is working on it, and delivers what sink {sink_id} lacks by itself, "
        "in order"
    )
