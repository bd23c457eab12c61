"""The result of a live run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltaforge_dagster.pipeline.health.health import HealthProblem


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run.

    Attributes:
        reason: Why the run ended: `idle`, `caught up`, `max_seconds`, `asked`, `paused`, `stopped`,
            `pipeline file changed`, `pipeline file removed`, `hold released`, `journal full`,
            `lease lost`, `capture failed`, `interrupted`, or `held elsewhere`.
        captured: Number of changes that the run has put into the journal, rows of snapshots
            included.
        delivered: Number of messages sent, by sink.
        capture_error: Why capture failed or is failing, None if it works.
        sink_errors: The last error of each failing sink.
        behind: The number of missing segments of each sink that is behind.
        sink_timeouts: How often each sink exceeded its deadline for a batch; without the sinks that
            never did.
        pauses: How often capture was paused because the journal was full.
        paused: Why capture was paused at the end, None if it was not.
        detached: Sinks that get nothing until they are attached again.
        paused_sinks: Sinks that get nothing until they are resumed; the journal keeps everything
            for them.
        problems: What `deltaforge status` shows at the end of the run.
    """

    reason: str
    captured: int = 0
    segments: int = 0
    ranges: int = 0
    delivered: Mapping[str, int] = field(default_factory=dict)
    capture_error: str | None = None
    sink_errors: Mapping[str, str] = field(default_factory=dict)
    behind: Mapping[str, int] = field(default_factory=dict)
    sink_timeouts: Mapping[str, int] = field(default_factory=dict)
    pauses: int = 0
    paused: str | None = None
    detached: tuple[str, ...] = ()
    paused_sinks: tuple[str, ...] = ()
    problems: tuple[HealthProblem, ...] = ()

    @property
    def held(self) -> bool:
        """Whether this run ever held the lease."""
        return self.reason != "held elsewhere"
