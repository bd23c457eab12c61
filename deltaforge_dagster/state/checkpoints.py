"""Checkpoints: how far each sink has acknowledged; whether anything is kept for and sent to it.

A run moves the checkpoints of its sinks (`CheckpointWrites`); users reset them and attach, pause
and resume sinks (`CheckpointRepository`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import metrics, since
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    known_pipeline,
    position_before,
    read_checkpoints,
)
from deltaforge_dagster.state.dead_letters import UndeliveredWrites
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow

_ERROR_LENGTH = 2000
"""Maximum length of a sink's last error."""

_NO_FAILURES: dict[str, Any] = {
    "failures": 0,
    "next_attempt_at": 0.0,
    "last_error": None,
    "remedy": None,
    "failing_since": None,
}

NOTHING = (0, -1)
"""Value of `sent` while nothing has been sent under the checkpoint's incarnation."""


class CheckpointRepository:
    """The checkpoints of all pipelines: `StateStore.checkpoints`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str) -> dict[str, CheckpointRow]:
        """Return the checkpoint of every sink of a pipeline."""
        with self._database.read() as connection:
            return read_checkpoints(connection, name)

    def reset(
        self, name: str, sink: str, segment: int, *, ordinal: int = -1, complete: bool = True
    ) -> CheckpointRow:
        """Set a sink's checkpoint on request of a user, backwards or forwards; clear its failures.

        Backwards, all later changes are delivered again; published ranges stay published. Forwards,
        changes are skipped, and the skipped ranges are never published for this sink.

        Args:
            name: The pipeline.
            sink: The sink's id.
            segment: The last segment to treat as delivered. A number before the journal's first
                segment is refused unless the journal begins right after it.
            ordinal: With `complete=False`, the last row of `segment` to treat as delivered, -1
                for none.
            complete: Whether to treat all of `segment` as delivered.

        Raises:
            NotAllowed: A run holds the lease, there is no such sink, or delivery would have to
                resume with a segment that is not in the journal.
        """
        with self._database.write() as connection:
            locked = lock_lease(connection, name)
            if locked.live:
                raise NotAllowed(
                    f"pipeline {name!r} is held by run {locked.run_id}; stop it, then reset"
                )
            before = read_checkpoints(connection, name).get(sink)
            if before is None:
                raise NotAllowed(f"pipeline {name!r} has no sink {sink!r}")
            pipeline = known_pipeline(connection, name)
            position = position_before(connection, pipeline, segment + 1 if complete else segment)
            whole_from = segment + 1 if complete or ordinal >= 0 else segment
            skips = (segment, complete, ordinal) > (before.segment, before.complete, before.ordinal)
            moved = {
                "first_segment": whole_from if skips else min(whole_from, before.first_segment),
                "overrules": True,
                **status_columns(segment, ordinal, complete, position),
            }
            return _set(connection, name, sink, moved)

    def attach(self, name: str, sink: str, *, tail: bool) -> CheckpointRow:
        """Attach a detached sink again; a run may be active meanwhile.

        Args:
            name: The pipeline.
            sink: The sink's id.
            tail: Resume with the next captured segment and skip everything before it, instead of
                resuming after the sink's checkpoint.

        Raises:
            NotAllowed: There is no such sink, it is attached, or the segment after its checkpoint
                is no longer in the journal.
        """
        with self._database.write() as connection:
            row = _locked(connection, name, sink)
            if row.attached:
                raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is attached")
            pipeline = known_pipeline(connection, name)
            values = _NO_FAILURES
            if tail:
                goes_on = pipeline.next_segment
                position = position_before(connection, pipeline, goes_on)
                values = status_columns(goes_on - 1, -1, True, position) | {
                    "first_segment": goes_on,
                    "overrules": True,
                }
            else:
                _check_in_journal(connection, pipeline, row)
            return _set(connection, name, sink, {"state": "attached", **values})

    def pause(self, name: str, sink: str) -> CheckpointRow:
        """Stop sending to a sink until `resume`, but keep everything for it.

        An active run stops the sink's deliverer within seconds, after the batch that it is sending.
        The sink still counts for the commit policy.

        Raises:
            NotAllowed: There is no such sink, or it is paused or detached.
        """
        with self._database.write() as connection:
            row = _locked(connection, name, sink)
            if row.state != "attached":
                raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is {row.state}")
            return _set(connection, name, sink, {"state": "paused"})

    def resume(self, name: str, sink: str) -> CheckpointRow:
        """Resume delivery to a paused sink after its checkpoint, at once.

        Raises:
            NotAllowed: There is no such sink, or it is not paused.
        """
        with self._database.write() as connection:
            row = _locked(connection, name, sink)
            if row.state == "detached":
                raise NotAllowed(
                    f"pipeline {name!r}: sink {sink!r} is detached: nothing was kept for it since "
                    f"then; deltaforge sink attach {name} {sink} lets it go on"
                )
            if row.state != "paused":
                raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is not paused")
            return _set(connection, name, sink, {"state": "attached", **_NO_FAILURES})


class CheckpointWrites:
    """Moves the checkpoints of a lease holder's sinks: `FencedWriter.checkpoints`."""

    def __init__(
        self, connection: Connection, pipeline: str, undelivered: UndeliveredWrites
    ) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._undelivered = undelivered

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
        row = self._row(sink)
        end = known_pipeline(self._connection, self._pipeline).next_segment - 1
        backwards = (segment, complete) < (row["segment"], row["complete"]) or (
            segment == row["segment"] and ordinal < row["ordinal"]
        )
        if backwards or segment > end:
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: the checkpoint of sink {sink!r} stands at segment "
                f"{row['segment']}, ordinal {row['ordinal']} (complete: {row['complete']}), the "
                f"journal ends with segment {end}; it cannot move to segment {segment}, ordinal "
                f"{ordinal} (complete: {complete})"
            )
        moved: dict[str, Any] = {
            "segment": segment,
            "ordinal": ordinal,
            "complete": complete,
            "failures": 0,
            "next_attempt_at": 0.0,
            "last_error": None,
            "remedy": None,
            "failing_since": None,
            "updated_at": clock(),
            "overrules": not exactly_once or sent == NOTHING,
            **_sent(sent),
        }
        if not exactly_once:
            moved["incarnation"] = None
        if source_position is not None:
            moved["source_position"] = source_position
        self._update(sink, moved)
        # If the checkpoint has not moved, this repeats a write whose answer was lost; it counted
        # the tally.
        if (segment, ordinal, complete) != (row["segment"], row["ordinal"], row["complete"]):
            metrics.count(self._connection, self._pipeline, tally)

    def set_incarnation(self, sink: str, incarnation: str) -> None:
        """Begin a new incarnation of the checkpoint; a position of another one no longer counts."""
        self._row(sink)
        self._update(
            sink,
            {"incarnation": incarnation, "overrules": True, **_sent(NOTHING)},
        )

    def set_sent(self, sink: str, sent: tuple[int, int]) -> None:
        """Record the row that the sink's own position will name, before the sink stores it."""
        self._update(sink, _sent(sent))

    def resume_at(
        self,
        sink: str,
        segment: int,
        ordinal: int,
        complete: bool,
        *,
        notice: str | None,
    ) -> None:
        """Set a sink's checkpoint to the row that its own position names, forwards or backwards.

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
        row = self._row(sink)
        pipeline = known_pipeline(self._connection, self._pipeline)
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
            moved |= self._noticed(row, notice)
        self._update(sink, moved)
        self._undelivered.forget_behind(sink, segment, ordinal, complete=complete)

    def set_notice(self, sink: str, notice: str | None) -> None:
        """Store a message for users about a sink, or clear it with None."""
        self._update(sink, self._noticed(self._row(sink), notice))

    def failed(
        self,
        sink: str,
        error_text: str,
        next_attempt_at: float,
        tally: Tally | None = None,
        *,
        remedy: Sequence[str] = (),
    ) -> None:
        """Record a failure of a sink and when to try again.

        The failure of a sink that was detached meanwhile is only counted, because its last error
        must keep saying why it is detached.

        Args:
            sink: The sink's id.
            error_text: The error's message, truncated to 2,000 characters.
            next_attempt_at: Time before which the sensor starts no run for this sink, in seconds by
                the database's clock.
            tally: Metrics to count with it.
            remedy: The commands that fix it.
        """
        row = self._row(sink)
        if row["state"] != "detached":
            self._update(
                sink,
                {
                    "failures": row["failures"] + 1,
                    "last_error": error_text[:_ERROR_LENGTH],
                    "remedy": list(remedy),
                    "next_attempt_at": next_attempt_at,
                    "failing_since": row["failing_since"] if row["failures"] else clock(),
                },
            )
        metrics.count(self._connection, self._pipeline, tally)

    def suspended(
        self,
        sink: str,
        why: str,
        *,
        remedy: Sequence[str],
        failures: int,
        since: float,
        next_attempt_at: float,
    ) -> None:
        """Record that some tables of a sink cannot be written, while it goes on with the others.

        Args:
            sink: The sink's id.
            why: Which tables, and why; stored as its last error.
            remedy: The commands that fix it.
            failures: How often the table that fails most has failed in a row.
            since: When the first of them was suspended.
            next_attempt_at: When the next of them is tried again.
        """
        if self._row(sink)["state"] == "detached":
            return  # its last error says why
        self._update(
            sink,
            {
                "failures": failures,
                "last_error": why[:_ERROR_LENGTH],
                "remedy": list(remedy),
                "next_attempt_at": next_attempt_at,
                "failing_since": since,
            },
        )

    def detach(self, sink: str, why: str) -> None:
        """Detach a sink at its checkpoint: from now on, nothing is kept for it or sent to it.

        Args:
            sink: The sink's id.
            why: Stored as its last error, without a remedy, which is added where it is shown.
        """
        failing_since = self._row(sink)["failing_since"]
        self._update(
            sink,
            {
                "state": "detached",
                "last_error": why[:_ERROR_LENGTH],
                "remedy": None,
                "failing_since": clock() if failing_since is None else failing_since,
            },
        )

    def _noticed(self, row: RowMapping, notice: str | None) -> dict[str, str | None]:
        """Return the columns of a notice, and date it if it is a new one."""
        text = None if notice is None else notice[:_ERROR_LENGTH]
        if text is not None and text != row["notice"]:
            since.begin(self._connection, self._pipeline, since.notice_of(row["sink"]))
        return {"notice": text}

    def _row(self, sink: str) -> RowMapping:
        query = select(checkpoints).where(
            checkpoints.c.pipeline == self._pipeline, checkpoints.c.sink == sink
        )
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise NotAllowed(f"pipeline {self._pipeline!r} has no sink {sink!r}")
        return row

    def _update(self, sink: str, values: Mapping[str, Any]) -> None:
        this = (checkpoints.c.pipeline == self._pipeline) & (checkpoints.c.sink == sink)
        self._connection.execute(update(checkpoints).where(this).values(**values))


def status_columns(
    segment: int, ordinal: int, complete: bool, position: str | None
) -> dict[str, Any]:
    """Return the columns of a checkpoint that is set to a row of the journal from outside.

    Whatever described its former deliveries is reset: failures, incarnation, what was sent.
    """
    return {
        "segment": segment,
        "ordinal": ordinal,
        "complete": complete,
        "source_position": position,
        **_NO_FAILURES,
        "updated_at": clock(),
        "incarnation": None,
        "sent_segment": None,
        "sent_ordinal": None,
        "skip": None,
        "notice": None,
    }


def _locked(connection: Connection, name: str, sink: str) -> CheckpointRow:
    lock_lease(connection, name)
    rows = read_checkpoints(connection, name)
    if sink not in rows:
        names = ", ".join(rows) or "none"
        raise NotAllowed(f"pipeline {name!r} has no sink {sink!r} (there is: {names})")
    return rows[sink]


def _set(connection: Connection, name: str, sink: str, values: Mapping[str, Any]) -> CheckpointRow:
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.pipeline == name, checkpoints.c.sink == sink)
        .values(**values)
    )
    return read_checkpoints(connection, name)[sink]


def _check_in_journal(
    connection: Connection, pipeline: PipelineRow, checkpoint: CheckpointRow
) -> None:
    goes_on = checkpoint.whole_segment + 1
    try:
        position_before(connection, pipeline, goes_on)
    except NotAllowed:
        raise NotAllowed(
            f"pipeline {pipeline.name!r}: segment {goes_on}, with which sink {checkpoint.sink!r} "
            "would go on, is no longer in the journal; --tail lets it go on with what is captured "
            "next, and everything between never arrives there"
        ) from None


def _sent(row: tuple[int, int] | None) -> dict[str, int | None]:
    segment, ordinal = (None, None) if row is None else row
    return {"sent_segment": segment, "sent_ordinal": ordinal}
