"""What a run may write: everything goes through one `FencedWriter`, inside one transaction.

`StateStore.fenced` opens the transaction, locks the lease row and compares the epoch; only then
does a writer exist. A process that lost its lease, even one that slept through its expiry, gets
`LeaseLost` and nothing of the block is written.

After `StoreUnavailable` nobody knows whether the block was committed (the server's answer may be
what got lost). Running the same block again is safe: a segment, range, close or checkpoint that
is already there is recognised and not written twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position, parse_position
from deltaforge_dagster.state import definitions as table_notes
from deltaforge_dagster.state import failovers, holds, schemas
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.records import Counts, HeldPart, HoldRow, Lease, NewSegment
from deltaforge_dagster.state.rows import known_pipeline, position_before
from deltaforge_dagster.state.tables import checkpoints, leases, pipelines, ranges, segments
from deltaforge_dagster.tables import SchemaStamp, TableSchema

_ERROR_LENGTH = 2000
"""Characters kept of a sink's last error."""


class FencedWriter:
    """Writes of one lease holder in one transaction; lives as long as the `fenced` block."""

    def __init__(self, connection: Connection, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease

    def renew(self, seconds: float) -> float:
        """Extend the lease to `seconds` from now; return when it expires, by the database's clock.

        Take the local deadline from a monotonic clock read *before* this call.
        """
        self._update_lease({"expires_at": clock() + seconds})
        query = select(leases.c.expires_at).where(leases.c.pipeline == self._lease.pipeline)
        expires_at: float = self._connection.execute(query).scalar_one()
        return expires_at

    def release(self) -> None:
        """Give the lease back with this block: another run may take it at once."""
        self._update_lease({"run_id": None, "expires_at": clock()})

    def set_session(self, session_id: str | None) -> None:
        """Remember the Spark session, for this run and the ones after it."""
        self._update_lease({"session_id": session_id})

    def open_range(self, start_position: str, spec_hash: str, first_segment: int) -> int:
        """Open the next range, which begins with `first_segment`, and return its number.

        Call it in the block that adds that segment: a range exists from its first segment on.

        Raises:
            NotAllowed: A range is open, or `first_segment` is not the pipeline's next one.
        """
        pipeline = self._pipeline()
        already = self._open_range_row()
        if already is not None:
            if (already["first_segment"], already["epoch"]) == (first_segment, self._lease.epoch):
                return int(already["range"])
            raise NotAllowed(
                f"{self._name}: range {already['range']} is still open; close it first"
            )
        if first_segment != pipeline["next_segment"]:
            raise NotAllowed(
                f"{self._name}: a range cannot begin with segment {first_segment}, "
                f"the next one is {pipeline['next_segment']}"
            )
        number = int(pipeline["next_range"])
        self._connection.execute(
            insert(ranges).values(
                pipeline=self._lease.pipeline,
                range=number,
                state="open",
                epoch=self._lease.epoch,
                spec_hash=spec_hash,
                first_segment=first_segment,
                last_segment=first_segment - 1,
                start_position=start_position,
                end_position=start_position,
                rows=0,
                bytes=0,
                counts={},
                schema_versions={},
                first_ts_us=0,
                last_ts_us=0,
                opened_at=clock(),
            )
        )
        self._update_pipeline({"next_range": number + 1})
        return number

    def add_segment(
        self,
        segment: NewSegment,
        range: int,  # noqa: A002
        *,
        held: Iterable[HeldPart] = (),
        released: HoldRow | None = None,
    ) -> None:
        """Add a segment, whose file is durable, to an open range, and move the captured position.

        Args:
            segment: The segment.
            range: The range.
            held: Files of events before the segment's end that are kept back.
            released: The hold whose events these are: from now on they are in the journal.

        Raises:
            NotAllowed: The range is not open, or the segment's number is not the next one.
        """
        pipeline, row = self._pipeline(), self._range(range)
        if segment.segment == pipeline["next_segment"] - 1 and self._is_stored(segment, range):
            return
        expected = {pipeline["next_segment"], row["last_segment"] + 1}
        if row["state"] != "open" or expected != {segment.segment}:
            raise NotAllowed(
                f"{self._name}: segment {segment.segment} cannot follow in range {range} "
                f"({row['state']}, ends with segment {row['last_segment']}); "
                f"the pipeline's next segment is {pipeline['next_segment']}"
            )
        counts = {table: dict(ops) for table, ops in segment.counts.items()}
        versions = dict(segment.schema_versions)
        self._connection.execute(
            insert(segments).values(
                pipeline=self._lease.pipeline,
                range=range,
                epoch=self._lease.epoch,
                created_at=clock(),
                segment=segment.segment,
                segment_id=segment.segment_id,
                path=segment.path,
                checksum=segment.checksum,
                content_hash=segment.content_hash,
                rows=segment.rows,
                bytes=segment.bytes,
                start_position=segment.start_position,
                end_position=segment.end_position,
                counts=counts,
                schema_versions=versions,
                first_ts_us=segment.first_ts_us,
                last_ts_us=segment.last_ts_us,
            )
        )
        first = row["last_segment"] < row["first_segment"]
        self._update_range(
            range,
            {
                "last_segment": segment.segment,
                "end_position": segment.end_position,
                "rows": row["rows"] + segment.rows,
                "bytes": row["bytes"] + segment.bytes,
                "counts": _sum(row["counts"], counts),
                "schema_versions": row["schema_versions"] | versions,
                "first_ts_us": segment.first_ts_us
                if first
                else min(row["first_ts_us"], segment.first_ts_us),
                "last_ts_us": segment.last_ts_us
                if first
                else max(row["last_ts_us"], segment.last_ts_us),
            },
        )
        self._update_pipeline(
            {
                "captured_position": segment.end_position,
                "next_segment": segment.segment + 1,
            },
        )
        holds.keep(self._connection, self._lease.pipeline, held)
        if released is not None:
            self.hold_journaled(released, segment.segment)

    def close_range(self, range: int, reason: str, content_hash: str) -> None:  # noqa: A002
        """Close a range, once and for ever.

        Raises:
            NotAllowed: It has no segment, or is already closed (with another content).
        """
        row = self._range(range)
        if row["state"] == "closed" and row["content_hash"] == content_hash:
            return
        if row["state"] != "open" or row["last_segment"] < row["first_segment"]:
            raise NotAllowed(
                f"{self._name}: range {range} is {row['state']} with segments "
                f"{row['first_segment']} to {row['last_segment']} and cannot be closed"
            )
        self._update_range(
            range,
            {
                "state": "closed",
                "close_reason": reason,
                "content_hash": content_hash,
                "closed_at": clock(),
            },
        )

    def advance(
        self,
        sink: str,
        segment: int,
        ordinal: int,
        complete: bool,
        source_position: str | None,
        *,
        exactly_once: bool = False,
    ) -> None:
        """Move a sink's checkpoint to what it has acknowledged, and forget its failures.

        Args:
            sink: The sink's id.
            segment: Everything up to (`segment`, `ordinal`) has arrived, without a gap.
            ordinal: See `segment`.
            complete: No row of `segment` is missing.
            source_position: End of the last complete segment; None leaves the stored one.
            exactly_once: The sink has stored its position under the checkpoint's lineage. Else
                the lineage ends: what the sink keeps as its position is outdated from now on.

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
            "updated_at": clock(),
            "overrules": not exactly_once,
        }
        if not exactly_once:
            moved["lineage"] = None
        if source_position is not None:
            moved["source_position"] = source_position
        self._update_checkpoint(sink, moved)

    def set_lineage(self, sink: str, lineage: str) -> None:
        """Begin a lineage, under which the sink's own position will count; no other one does."""
        self._checkpoint(sink)
        self._update_checkpoint(sink, {"lineage": lineage, "overrules": True})

    def resume_at(
        self,
        sink: str,
        segment: int,
        ordinal: int,
        complete: bool,
        *,
        notice: str | None,
    ) -> None:
        """Let a sink go on after a place that its own position tells, wherever that is.

        A pending skip is done with that, and the checkpoint overrules other positions.

        Args:
            sink: The sink's id.
            segment: Everything up to (`segment`, `ordinal`) has arrived.
            ordinal: See `segment`.
            complete: No row of `segment` is missing.
            notice: What people should hear of; None leaves what is there.

        Raises:
            NotAllowed: What follows is not in the journal, or there is no such sink.
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
            "updated_at": clock(),
        }
        if notice is not None:
            moved["notice"] = notice[:_ERROR_LENGTH]
        self._update_checkpoint(sink, moved)

    def set_notice(self, sink: str, notice: str | None) -> None:
        """Remember what people should hear of a sink; None once it is over."""
        self._update_checkpoint(sink, {"notice": notice})

    def sink_failed(self, sink: str, error_text: str, next_attempt_at: float) -> None:
        """Count a failure of a sink and when to try again, seconds by the database's clock.

        Args:
            sink: The sink's id.
            error_text: A message of the error tree; kept to 2,000 characters.
            next_attempt_at: The sensor starts no run for this sink before.
        """
        row = self._checkpoint(sink)
        self._update_checkpoint(
            sink,
            {
                "failures": row["failures"] + 1,
                "last_error": error_text[:_ERROR_LENGTH],
                "next_attempt_at": next_attempt_at,
                "updated_at": clock(),
            },
        )

    def detach_sink(self, sink: str, why: str) -> None:
        """Detach a sink at its checkpoint: from now on nothing is kept for it or sent to it.

        Args:
            sink: The sink's id.
            why: Kept as its last error; what to do about it is said wherever it is shown.
        """
        self._checkpoint(sink)
        self._update_checkpoint(
            sink,
            {"state": "detached", "last_error": why[:_ERROR_LENGTH], "updated_at": clock()},
        )

    def set_captured(self, position: str) -> None:
        """Move the captured position over log that held nothing for the pipeline.

        Never backwards: when a segment has meanwhile been added that ends later, its end stays.
        """
        captured = self._pipeline()["captured_position"]
        if captured is not None:
            before: Position = parse_position(captured)
            after: Position = parse_position(position)
            if after <= before:
                return
        self._update_pipeline({"captured_position": position})

    def keep(self, held: Iterable[HeldPart], position: str) -> None:
        """Keep events back, whose files are durable, and move the captured position past them."""
        holds.keep(self._connection, self._lease.pipeline, held)
        self.set_captured(position)

    def hold_back(self, hold: HoldRow, reason: str) -> None:
        """Take a release back: what is held still cannot be decoded, for this reason."""
        holds.hold_back(self._connection, self._lease.pipeline, hold.kind, hold.subject, reason)

    def hold_journaled(self, hold: HoldRow, last_segment: int) -> None:
        """Note that everything that was held is in the journal, up to a segment."""
        holds.journaled(
            self._connection, self._lease.pipeline, hold.kind, hold.subject, last_segment
        )

    def forget_holds(self, delivered: int) -> None:
        """Drop the holds whose events every attached sink has, up to a segment."""
        holds.forget(self._connection, self._lease.pipeline, delivered)

    def set_capture_pause(self, why: str | None) -> None:
        """Remember why capture is paused; None once it is not."""
        self._update_pipeline({"capture_pause": why})

    def set_confirmed(self, position: str) -> None:
        """Remember the committed position, before the source is told that it may forget."""
        self._update_pipeline({"confirmed_position": position})

    def register_schema(self, tenant: str, table: TableSchema, position_json: str) -> SchemaStamp:
        """Return the stamp of a table version: an earlier one's, or a new one (see `schemas`)."""
        return schemas.register(
            self._connection, self._lease.pipeline, tenant, table, position_json
        )

    def define(self, definitions: Mapping[str, str | None], position: str) -> None:
        """Note what tables look like from `position` on (see `definitions`)."""
        table_notes.define(self._connection, self._lease.pipeline, definitions, position)

    def server(self, source_id: str) -> str | None:
        """Return the identity of the server that the source was read from last (`failovers`)."""
        return failovers.server(self._connection, self._lease.pipeline, source_id)

    def set_server(self, source_id: str, identity: str) -> None:
        """Remember the server that the source is read from."""
        failovers.set_server(self._connection, self._lease.pipeline, source_id, identity)

    def reconciled(
        self,
        source_id: str,
        *,
        previous: str,
        identity: str,
        position: str,
        deltas: Mapping[tuple[str, str], Sequence[str]],
    ) -> None:
        """Record that the source is another server now (see `failovers`)."""
        failovers.reconciled(
            self._connection,
            self._lease.pipeline,
            source_id,
            previous=previous,
            identity=identity,
            position=position,
            deltas=deltas,
        )

    @property
    def _name(self) -> str:
        return f"pipeline {self._lease.pipeline!r}"

    def _pipeline(self) -> RowMapping:
        query = select(pipelines).where(pipelines.c.name == self._lease.pipeline)
        return self._connection.execute(query).mappings().one()

    def _open_range_row(self) -> RowMapping | None:
        query = select(ranges).where(
            ranges.c.pipeline == self._lease.pipeline, ranges.c.state == "open"
        )
        return self._connection.execute(query).mappings().first()

    def _range(self, number: int) -> RowMapping:
        query = select(ranges).where(
            ranges.c.pipeline == self._lease.pipeline, ranges.c.range == number
        )
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise NotAllowed(f"{self._name} has no range {number}")
        return row

    def _is_stored(self, segment: NewSegment, number: int) -> bool:
        query = select(segments.c.segment).where(
            segments.c.pipeline == self._lease.pipeline,
            segments.c.segment == segment.segment,
            segments.c.segment_id == segment.segment_id,
            segments.c.range == number,
        )
        return self._connection.execute(query).first() is not None

    def _checkpoint(self, sink: str) -> RowMapping:
        query = select(checkpoints).where(
            checkpoints.c.pipeline == self._lease.pipeline, checkpoints.c.sink == sink
        )
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise NotAllowed(f"{self._name} has no sink {sink!r}")
        return row

    def _update_lease(self, values: Mapping[str, Any]) -> None:
        this = leases.c.pipeline == self._lease.pipeline
        self._connection.execute(update(leases).where(this).values(**values))

    def _update_pipeline(self, values: Mapping[str, Any]) -> None:
        this = pipelines.c.name == self._lease.pipeline
        self._connection.execute(update(pipelines).where(this).values(**values))

    def _update_range(self, number: int, values: Mapping[str, Any]) -> None:
        this = (ranges.c.pipeline == self._lease.pipeline) & (ranges.c.range == number)
        self._connection.execute(update(ranges).where(this).values(**values))

    def _update_checkpoint(self, sink: str, values: Mapping[str, Any]) -> None:
        this = (checkpoints.c.pipeline == self._lease.pipeline) & (checkpoints.c.sink == sink)
        self._connection.execute(update(checkpoints).where(this).values(**values))


def _sum(left: Counts, right: Counts) -> dict[str, dict[str, int]]:
    total = {table: dict(ops) for table, ops in left.items()}
    for table, ops in right.items():
        into = total.setdefault(table, {})
        for op, count in ops.items():
            into[op] = into.get(op, 0) + count
    return total
