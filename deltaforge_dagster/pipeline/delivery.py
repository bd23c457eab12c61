"""The interfaces between the thread that delivers to a sink and what it delivers.

A `Delivery` delivers either messages or changes to tables. The thread (`deliver.deliverer`) asks it
for one piece of work after the other, waits while there is none, and repeats what failed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import DeltaforgeError, Retryable
from deltaforge_dagster.pipeline.committed import PendingSegments
from deltaforge_dagster.pipeline.meters import SinkMeter
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.state.records import CheckpointRow


class AwaitsCapture(Retryable):
    """A sink can continue only after changes that it already has were captured again."""

    def __init__(self, sink_id: str) -> None:
        super().__init__(
            f"sink {sink_id}: waits until changes that it already has are captured again"
        )


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """One sink of a run.

    Attributes:
        run: The run: store, journal and lease.
        spec: The pipeline file.
        sink_id: The sink.
        segments: The segments that are ready to be delivered.
        meter: Counts what is sent to the sink.
    """

    run: LeasedRun
    spec: PipelineSpec
    sink_id: str
    segments: PendingSegments
    meter: SinkMeter


class Attempts(Protocol):
    """Whether a sink fails at present.

    Attributes:
        error: Why it fails; None if it does not.
    """

    error: DeltaforgeError | None

    def succeeded(self) -> None:
        """Forget the failures before."""
        ...


@dataclass(frozen=True, slots=True)
class DeliveryThread:
    """What a delivery shares with the thread that runs it.

    Attributes:
        attempts: The failures of the sink since its last success.
        stop: Set when the thread is to end after its current piece of work.
        news: Set when the journal has a new segment, and with `stop`.
    """

    attempts: Attempts
    stop: threading.Event = field(default_factory=threading.Event)
    news: threading.Event = field(default_factory=threading.Event)


class DeliveryProgress(Protocol):
    """What a sink has acknowledged.

    Attributes:
        checkpoint: Its checkpoint, as last written to the store.
        moved_at: Monotonic time of the last acknowledgement.
        rows: Messages sent by this run, or changes that it has added to tables.
    """

    checkpoint: CheckpointRow
    moved_at: float
    rows: int


class Delivery(Protocol):
    """Delivers to one sink, piece by piece; used by its thread unless a method names another.

    Attributes:
        prompt: Whether it delivers a segment as soon as there is one, so that small segments arrive
            earlier.
        redriving: Whether there is, or may be, work other than new segments: dead letters to
            deliver again, or tables to load again.
    """

    prompt: bool
    redriving: bool

    @property
    def progress(self) -> DeliveryProgress:
        """What the sink has acknowledged."""
        ...

    @property
    def timeouts(self) -> int:
        """How often the sink missed its deadline."""
        ...

    @property
    def begins_at(self) -> float:
        """When to begin, by the store's clock: later than now if earlier runs have failed."""
        ...

    def prepare(self) -> None:
        """Connect while nothing is due, if that makes the first `deliver` faster.

        It is called at most once, and may fail without an error: `deliver` connects if this has
        not.
        """
        ...

    def due(self) -> bool:
        """Return whether there is something to do now."""
        ...

    def deliver(self) -> None:
        """Do the next part of what is due, such as a few segments or one commit.

        Raises:
            DeltaforgeError: It failed. The thread calls `failed`, and this again after a wait.
        """
        ...

    def failed(self, error: DeltaforgeError) -> None:
        """Disconnect after an error, as far as the error requires it."""
        ...

    def stuck(self, captured: str | None) -> bool:
        """Return whether the sink has failed and a run need not wait for it.

        Only the main thread calls this.

        Args:
            captured: The captured position. A sink that awaits capture is stuck once it has
                searched everything up to it.
        """
        ...

    def wind_up(self) -> bool:
        """Stop beginning long pieces of work; return whether none is under way.

        Called by the main thread.
        """
        ...

    def interrupt(self) -> None:
        """Abort a piece of work that hangs, whatever its result; called by another thread."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...
