"""Signs of life of a run that reads a snapshot: it holds no lease that would tell when it is gone."""

from __future__ import annotations

import time

from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore

_NAMESPACE = "snapshot-runs"
_EVERY_SECONDS = 20.0
_LIFE_SECONDS = 120.0


class Life:
    """Shows that a run is alive, as often as it must be.

    Args:
        store: Where it is shown.
        pipeline: Name of the pipeline.
        run_id: Of the run.
    """

    def __init__(self, store: StateStore, pipeline: str, run_id: str) -> None:
        self._kv = Kv(store.database, _NAMESPACE)
        self._key = f"{pipeline}/{run_id}"
        self._shown_at = float("-inf")

    def show(self) -> None:
        """Call this at least every minute."""
        if time.monotonic() - self._shown_at >= _EVERY_SECONDS:
            self._kv.put(self._key, b"", ttl=_LIFE_SECONDS)
            self._shown_at = time.monotonic()


def living(store: StateStore, pipeline: str) -> list[str]:
    """Return the runs that have shown a sign of life lately."""
    shown = Kv(store.database, _NAMESPACE).items(f"{pipeline}/")
    return [key.removeprefix(f"{pipeline}/") for key in shown]


def is_alive(store: StateStore, pipeline: str, run_id: str) -> bool:
    """Say whether a run has shown a sign of life lately."""
    return Kv(store.database, _NAMESPACE).get(f"{pipeline}/{run_id}") is not None
