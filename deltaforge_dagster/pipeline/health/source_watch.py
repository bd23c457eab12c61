"""Check every few seconds that the source answers, and will send all that must be captured.

While no run is active, the sensor's ticks do this (`inspect_source`), and also check whether the
journal can be written; during a run, a thread of the run does it (`SourceWatch`). The findings are
recorded in the state store, where `health` reads them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.errors import DeltaforgeError, Retryable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.unread_log import ReadAhead, note_unread_log
from deltaforge_dagster.pipeline.health.recorded import capture_failed, capture_works, note_findings
from deltaforge_dagster.sources.base import IdentifyingSource, Source
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that the end of a run waits for a server that does not answer."""


def inspect_source(
    store: StateStore,
    loaded: LoadedPipeline,
    build_source: Callable[[], Source],
    journal: Journal,
    next_look: float,
) -> DeltaforgeError | None:
    """Check source and journal of a pipeline without an active run, and record the findings.

    Args:
        store: The state store.
        loaded: The pipeline.
        build_source: Creates its source.
        journal: The journal.
        next_look: When the next check is due, by the store's clock.

    Returns:
        Why the source cannot be reached or can no longer be read, or why the journal cannot be
        written. None if
        all is well, and if there is nothing to check: the pipeline has no start position yet, or
        must not capture.
    """
    row = store.pipelines.get(loaded.name)
    if row is None or row.start_position is None:
        return None
    if row.desired_state != "running":
        with suppress(DeltaforgeError), closing(build_source()) as source:
            note_unread_log(store, loaded.name, source)
        return None
    try:
        with closing(build_source()) as source:
            findings = source.maintain(parse_position(row.captured_position or row.start_position))
            _note_tables(store, loaded.name, source)
            note_unread_log(store, loaded.name, source)
        note_findings(store, loaded.name, findings)
        journal.check_writable(loaded.name, row.uid, loaded.spec.spec.engine.segment.max_bytes)
    except DeltaforgeError as error:
        capture_failed(store, loaded.name, "tick", error, next_look)
        return error
    capture_works(store, loaded.name, "tick")
    return None


def _note_tables(store: StateStore, name: str, source: Source) -> None:
    """Record which tables the source's log has now."""
    if isinstance(source, IdentifyingSource):
        tables = source.logged_tables()
        row = store.pipelines.get(name)
        store.gaps.note(name, tables, None if row is None else row.source_seen_at)


class SourceWatch:
    """Checks the source during a run, in a separate thread.

    A run that ends before its first check makes it at its end, so that what earlier runs or ticks
    found does not outlast a short run that no longer finds it.

    Args:
        store: The state store.
        loaded: The pipeline.
        build_source: Creates a source for this thread.
        warn: Called with each new finding.
        received: Returns what the run has read of the log but not captured yet.
    """

    def __init__(
        self,
        store: StateStore,
        loaded: LoadedPipeline,
        build_source: Callable[[], Source],
        warn: Callable[[str], None],
        received: Callable[[], ReadAhead],
    ) -> None:
        self._received = received
        self._store = store
        self._name = loaded.name
        self._seconds = loaded.spec.spec.engine.dagster.sensor_interval_seconds
        self._build_source = build_source
        self._warn = warn
        self._warned_texts: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=in_context(self._watch), name=f"source watch {loaded.name}", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop, after the first check if there was none yet; wait for it for a few seconds."""
        self._over.set()
        self._thread.join(_PATIENCE)

    def _watch(self) -> None:
        checked = False
        while not (self._over.wait(self._seconds) and checked):
            self._check()
            checked = True

    def _check(self) -> None:
        try:
            with closing(self._build_source()) as source:
                findings = source.maintain(None)
                _note_tables(self._store, self._name, source)
                self._note(findings)
                note_unread_log(self._store, self._name, source, self._received())
        except Retryable as error:  # capture meets it as well, and records when it tries again
            logger.debug("%s: the source was not looked at: %s", self._name, error)
        except DeltaforgeError as error:  # the stream that is already open may still work
            self._note([Finding("source", "error", error.text, error.remedy)])

    def _note(self, findings: list[Finding]) -> None:
        for finding in findings:
            if finding.bad and finding.text not in self._warned_texts:
                self._warn(finding.line)
        self._warned_texts = {finding.text for finding in findings}
        try:
            note_findings(self._store, self._name, findings)
        except Retryable as error:  # they are recorded at the next check
            logger.debug("%s: findings were not noted: %s", self._name, error)
