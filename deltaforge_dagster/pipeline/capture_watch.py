"""What a run notes of its capture in the state store: that it failed for good, or that it reads again."""

from __future__ import annotations

from typing import Literal

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.capture import Capture
from deltaforge_dagster.pipeline.health import failure_of
from deltaforge_dagster.state.records import Failure
from deltaforge_dagster.state.store import StateStore


class CaptureWatch:
    """Keeps a pipeline's failure in the store in line with a run's capture.

    Args:
        store: Where it is kept.
        name: The pipeline.
    """

    def __init__(self, store: StateStore, name: str) -> None:
        self._store = store
        self._name = name
        self._said: Literal["nothing", "well", "failed"] = "nothing"

    def look(self, capture: Capture | None) -> None:
        """Note that capture failed, or that it reads again."""
        if capture is None or self._said == "failed":
            return
        if capture.failed and capture.error is not None:
            self._note(capture.error)
            self._said = "failed"
        elif self._said == "nothing" and capture.error is None and capture.has_read:
            self._note(None)
            self._said = "well"

    def _note(self, error: DeltaforgeError | None) -> None:
        row = self._store.pipeline(self._name)
        known = None if row is None else failure_of(row)
        if error is not None:
            same = known is not None and known.message == str(error)
            since = known.since if known is not None and same else self._store.now()
            self._store.set_failure(self._name, Failure("run", error.kind, str(error), since))
        elif known is not None:
            self._store.set_failure(self._name, None)
