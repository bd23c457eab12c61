"""Writes of a run that concern its sinks: checkpoints, failures, notices and detachment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import RowMapping, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import metrics, undelivered
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.rows import known_pipeline, position_before
from deltaforge_dagster.state.tables import checkpoints
from deltaforge_dagster.state.writing import Writing

_ERROR_LENGTH = 2000
"""Maximum length of a sink's last error."""

NOTHING = (0, -1)
"""Stands for the row in a sink's own position before anything was sent under an incarnation."""


class CheckpointWrites(Writing):
    """The part of a `FencedWriter` that deliverers use."""

    def advance(
        self,
        sink: str,
        segment: int,
        ordinal: int,
        complete: bool,
        source_position: str | None,
        *,
        exactly_once: bool = False,
        sent: tuple[int, int] | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Advance a sink's checkpoint to what it has acknowledged, and clear its failures.

        Args:
            sink: The sink's id.
            segment: Everything up to (`segment`, `ordinal`) has arrived, without a gap.
            ordinal: See `segment`.
            complete: Whether all rows of `segment` have arrived.
            source_position: End of the last complete segment; None keeps the stored one.
            exactly_once: Whether the sink has stored its own position under the checkpoint's
                incarnation. If not, the incarnation ends, and the position in the sink is outdated.
            sent: With `exactly_once`, the row that the sink's position names: `NOTHING` if nothing
                was sent under the incarnation yet, None if it is the checkpoint's row.
            tally: Metrics to count with it, unless the checkpoint was already there.

        Raises:
            NotAllowed: The checkpoint would go backwards or beyond the journal, or there is no
                such sink.
        """
        row = self._checkpoint(sink)
        end = self._pipeline()["next_segment"] - 1
        backwards = (segment, complete) < (row["segment"], row["complete"]) or (
            segment == row["segment"] and ordinal < row["ordinal"]
        )
        if backwards or segment > end:
            raise NotAllowed(
                f"{self._name}: the checkpoint of sink {sink!r} stands at segment {row['segment']}, "
                f"ordinal {row['ordinal']} (complete: {row['complete']}), the journal ends with "
                f"segment {end}; it cannot move to segment {segment}, ordinal {ordinal} "
                f"(complete: {complete})"
            )
        moved: dict[str, Any] = {
            "segment": segment,
            "ordinal": ordinal,
            "complete": complete,
            "failures": 0,
            "next_attempt_at": 0.0,
            "last_error": None,
            "failing_since": None,
            "updated_at": clock(),
            "overrules": not exactly_once or sent == NOTHING,
            **_sent(sent),
        }
        if not exactly_once:
            moved["lineage"] = None
        if source_position is not None:
            moved["source_position"] = source_position
        self._update_checkpoint(sink, moved)
        # If the checkpoint has not moved, this repeats a write whose answer was lost, which has counted.
        if (segment, ordinal, complete) != (row["segment"], row["ordinal"], row["complete"]):
            metrics.count(self._connection, self._lease.pipeline, tally)

    def set_lineage(self, sink: str, lineage: str) -> None:
        """Begin a new incarnation of the checkpoint; a position of another one no longer counts."""
        self._checkpoint(sink)
        self._update_checkpoint(
            sink,
            {"lineage": lineage, "overrules": True, **_sent(NOTHING)},
        )

    def set_sent(self, sink: str, sent: tuple[int, int]) -> None:
        """Record the row that the sink's own position will name, before the sink stores it."""
        self._update_checkpoint(sink, _sent(sent))

    def resume_at(
        self,
        sink: str,
        segment: int,
        ordinal: int,
        complete: bool,
        *,
        notice: str | None,
    ) -> None:
        """Set a sink's checkpoint to the place that its own position names, forwards or backwards.

        This ends a pending skip, and the checkpoint overrules other positions.

        Args:
            sink: The sink's id.
            segment: Everything up to (`segment`, `ordinal`) has arrived.
            ordinal: See `segment`.
            complete: Whether all rows of `segment` have arrived.
            notice: Message for users; None keeps the stored one.

        Raises:
            NotAllowed: The following segment is not in the journal, or there is no such sink.
        """
        self._checkpoint(sink)
        pipeline = known_pipeline(self._connection, self._lease.pipeline)
        position = position_before(self._connection, pipeline, segment + 1 if complete else segment)
        moved: dict[str, Any] = {
            "segment": segment,
            "ordinal": ordinal,
            "complete": complete,
            "source_position": position,
            "overrules": True,
            "skip": None,
            **_sent(None),
            "updated_at": clock(),
        }
        if notice is not None:
            moved["notice"] = notice[:_ERROR_LENGTH]
        self._update_checkpoint(sink, moved)
        undelivered.forget_behind(
            self._connection, self._lease.pipeline, sink, segment, ordinal, complete=complete
        )

    def set_notice(self, sink: str, notice: str | None) -> None:
        """Store a message for users about a sink, or clear it with None."""
        self._update_checkpoint(sink, {"notice": notice})

    def sink_failed(
        self, sink: str, error_text: str, next_attempt_at: float, tally: Tally | None = None
    ) -> None:
        """Record a failure of a sink and when to try again.

        Args:
            sink: The sink's id.
            error_text: The error's message, truncated to 2,000 characters.
            next_attempt_at: Time before which the sensor starts no run for this sink, in seconds by
                the database's clock.
            tally: Metrics to count with it.
        """
        row = self._checkpoint(sink)
        self._update_checkpoint(
            sink,
            {
                "failures": row["failures"] + 1,
                "last_error": error_text[:_ERROR_LENGTH],
                "next_attempt_at": next_attempt_at,
                "failing_since": row["failing_since"] if row["failures"] else clock(),
            },
        )
        metrics.count(self._connection, self._lease.pipeline, tally)

    def detach_sink(self, sink: str, why: str) -> None:
        """Detach a sink at its checkpoint: from now on, nothing is kept for it or sent to it.

        Args:
            sink: The sink's id.
            why: Stored as its last error, without a remedy, which is added where it is shown.
        """
        self._checkpoint(sink)
        self._update_checkpoint(sink, {"state": "detached", "last_error": why[:_ERROR_LENGTH]})

    def _checkpoint(self, sink: str) -> RowMapping:
        query = select(checkpoints).where(
            checkpoints.c.pipeline == self._lease.pipeline, checkpoints.c.sink == sink
        )
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise NotAllowed(f"{self._name} has no sink {sink!r}")
        return row

    def _update_checkpoint(self, sink: str, values: Mapping[str, Any]) -> None:
        this = (checkpoints.c.pipeline == self._lease.pipeline) & (checkpoints.c.sink == sink)
        self._connection.execute(update(checkpoints).where(this).values(**values))


def _sent(row: tuple[int, int] | None) -> dict[str, int | None]:
    segment, ordinal = (None, None) if row is None else row
    return {"sent_segment": segment, "sent_ordinal": ordinal}
