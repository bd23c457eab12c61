"""Builds the context of a run: the open installation, and Spark, source and sinks of one pipeline.

It is separate from `platform`, which code server and sensors also use. Spark is imported only when
the first session is made, because that takes half a second, and a run can take the lease before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.resources.platform import Opened
from deltaforge_dagster.sinks.build import build_sink
from deltaforge_dagster.sinks.registry import SinkContext

if TYPE_CHECKING:
    from deltaforge_dagster.resources.spark import SparkSessions


def build_run_context(opened: Opened, loaded: LoadedPipeline) -> RunContext:
    """Return the context of a run of this pipeline; nothing is connected yet."""
    settings = opened.settings
    declared = loaded.spec.spec
    context = SinkContext(loaded.name, declared.engine.run, posted=loaded.is_stored)

    def sessions(session_id: str | None, remember: Callable[[str], None]) -> SparkSessions:
        from deltaforge_dagster.resources.spark import SparkSessions  # noqa: PLC0415 - see above

        own_workers = bool(declared.processors)
        return SparkSessions(settings, session_id, remember, own_workers=own_workers)

    return RunContext(
        store=opened.store,
        journal=opened.journal,
        sessions=sessions,
        replay_sessions=lambda: _replay_sessions(sessions),
        build_source=opened.source_builder(loaded),
        build_sink=lambda sink_id: build_sink(declared.sinks, sink_id, context),
    )


@contextmanager
def _replay_sessions(
    make: Callable[[str | None, Callable[[str], None]], SparkSessions],
) -> Iterator[SparkSessions]:
    """Yield Spark sessions that later runs do not continue."""
    sessions = make(None, lambda _session_id: None)
    try:
        yield sessions
    finally:
        sessions.stop()
