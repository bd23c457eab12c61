"""Heartbeats of runs that read a snapshot: they hold no lease that would expire when they die."""

from __future__ import annotations

import time

from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore

_NAMESPACE = "snapshot-runs"
_EVERY_SECONDS = 20.0
_LIFE_SECONDS = 120.0


class Life:
    """Writes the heartbeat of a run, at most every 20 seconds.

    Args:
        store: Where the heartbeat is written; it expires there after two minutes.
        pipeline: Name of the pipeline.
        run_id: Id of the run.
    """

    def __init__(self, store: StateStore, pipeline: str, run_id: str) -> None:
        self._kv = Kv(store.database, _NAMESPACE)
        self._key = f"{pipeline}/{run_id}"
        self._shown_at = float("-inf")

    def show(self) -> None:
        """Write the heartbeat if it is due; call this at least every minute."""
        if time.monotonic() - self._shown_at >= _EVERY_SECONDS:
            self._kv.put(self._key, b"", ttl=_LIFE_SECONDS)
            self._shown_at = time.monotonic()


def living(store: StateStore, pipeline: str) -> list[str]:
    """Return the ids of the runs whose heartbeat has not expired."""
    shown = Kv(store.database, _NAMESPACE).items(f"{pipeline}/")
    return [key.removeprefix(f"{pipeline}/") for key in shown]


def is_alive(store: StateStore, pipeline: str, run_id: str) -> bool:
    """Return whether a run's heartbeat has not expired."""
    return Kv(store.database, _NAMESPACE).get(f"{pipeline}/{run_id}") is not None
