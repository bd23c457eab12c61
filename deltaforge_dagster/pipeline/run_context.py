"""What a run gets from its caller: the installation, its options and its lease."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.spark_session import RunSessions, SessionProvider
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.store import StateStore


class Observer(Protocol):
    """Receives the events of a run; called from the run's threads, must not block for long."""

    def range_opened(self, number: int) -> None:
        """Handle that a range was opened: its first segment is durable."""
        ...

    def publish(self) -> None:
        """Publish what is due (`closed_ranges.pending`), if anything is."""
        ...

    def warn(self, message: str) -> None:
        """Show people a message that is no error of the run."""
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run works with besides its pipeline.

    Attributes:
        store: The state store.
        journal: The journal.
        sessions: Makes the Spark sessions of a run from the session id stored with the lease
            (None at first) and a function that stores a new one.
        replay_sessions: Lends a separate Spark session to a replay or a preview, and ends it.
        build_source: Makes a reader of the pipeline's source.
        build_sink: Makes the sink of the given id.
    """

    store: StateStore
    journal: Journal
    sessions: Callable[[str | None, Callable[[str], None]], RunSessions]
    replay_sessions: Callable[[], AbstractContextManager[SessionProvider]]
    build_source: Callable[[], Source]
    build_sink: Callable[[str], Sink]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What one run is asked to do.

    Attributes:
        run_id: Identifies the holder of the lease.
        observer: Receives the events of the run.
        until_caught_up: End as soon as everything that the source had when the run began is
            captured and delivered (or its sinks are failing), instead of waiting for more.
        awaits: Returns whether other work, such as reading a snapshot, will still produce changes
            for this run. Until then the run does not end by itself, unless capture fails.
    """

    run_id: str
    observer: Observer
    until_caught_up: bool = False
    awaits: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """What the threads of a run share from the moment it holds the lease until it ends.

    Attributes:
        store: The state store.
        journal: The journal.
        lease: The lease, which names the pipeline. Every write of the run is fenced by it.
        warn: Shows people a message that is no error of the run.
    """

    store: StateStore
    journal: Journal
    lease: HeldLease
    warn: Callable[[str], None]
