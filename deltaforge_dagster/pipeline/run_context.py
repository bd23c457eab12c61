"""What a run is given from outside: the installation to work with, what it is asked to do, and its lease."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.spark_session import SessionProvider
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.store import StateStore


class Observer(Protocol):
    """What a run tells the outside; called from the run's threads, must not block for long."""

    def range_opened(self, number: int) -> None:
        """A range exists from its first segment on."""
        ...

    def publish(self) -> None:
        """Something may be due for publication (`publication.pending`)."""
        ...

    def warn(self, message: str) -> None:
        """Something happened that people should know, and that is no error of the run."""
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run works with besides its pipeline.

    Attributes:
        store: The state store.
        journal: The journal.
        sessions: Makes the Spark sessions of a run from the session id stored with the lease
            (None at first) and a function that stores a new one.
        replay_sessions: Lends Spark sessions of its own to a replay or a preview, and ends them.
        build_source: Makes a reader of the pipeline's source.
        build_sink: Makes the sink of the given id.
    """

    store: StateStore
    journal: Journal
    sessions: Callable[[str | None, Callable[[str], None]], SessionProvider]
    replay_sessions: Callable[[], AbstractContextManager[SessionProvider]]
    build_source: Callable[[], Source]
    build_sink: Callable[[str], Sink]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What one run is asked to do.

    Attributes:
        run_id: Identifies the holder of the lease.
        observer: Receives what people should see.
        until_caught_up: End as soon as everything that the source had when the run began is
            captured and delivered (or its sinks are failing), instead of waiting for more.
        awaits: Returns whether work beside the run, such as reading a snapshot, has results to come.
            The run does not end by itself before, unless capture fails.
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
        warn: Tells people what is no error of the run.
    """

    store: StateStore
    journal: Journal
    lease: HeldLease
    warn: Callable[[str], None]
