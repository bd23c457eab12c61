"""Writes of a run that concern the journal: ranges, segments, the captured position, and holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import RowMapping, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state import holds, metrics, schemas
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.records import Counts, HeldPart, HoldRow, NewSegment, Processed
from deltaforge_dagster.state.tables import ranges, segments
from deltaforge_dagster.state.writing import Writing
from deltaforge_dagster.tables import Contained, contained


class JournalWrites(Writing):
    """The part of a `FencedWriter` that capture and processing use."""

    def open_range(self, start_position: str, spec_hash: str, first_segment: int) -> int:
        """Open the next range, which begins with `first_segment`, and return its number.

        Call it in the same block that adds this segment, since a range always has a segment.

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
        tally: Tally | None = None,
    ) -> None:
        """Add a segment, whose file must be durable, to an open range; advance the captured position.

        Adding the same segment again has no effect.

        Args:
            segment: The segment.
            range: Number of the range.
            held: Files of held events from before the segment's end.
            released: The hold whose last events this segment contains; it becomes `journaled`.
            tally: Metrics to count with it.

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
                received_at=segment.received_at,
                trigger=segment.trigger,
            )
        )
        metrics.count(self._connection, self._lease.pipeline, tally)
        first = row["last_segment"] < row["first_segment"]
        self._update_range(
            range,
            {
                "last_segment": segment.segment,
                "end_position": segment.end_position,
                "rows": row["rows"] + segment.rows,
                "bytes": row["bytes"] + segment.bytes,
                "counts": _sum(row["counts"], counts),
                "schema_versions": _together(row["schema_versions"], versions),
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
        # First, because newly held events of the same table come after the released ones.
        if released is not None:
            self.hold_journaled(released, segment.segment)
        self._keep(held)

    def close_range(self, range: int, reason: str, content_hash: str) -> None:  # noqa: A002
        """Close a range for good; closing it again with the same content has no effect.

        Raises:
            NotAllowed: The range has no segment, or is already closed with another content hash.
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

    def set_captured(self, position: str) -> None:
        """Advance the captured position past a part of the log without changes for the pipeline.

        It never moves backwards: if a segment was added meanwhile that ends later, its end remains.
        """
        captured = self._pipeline()["captured_position"]
        if captured is not None:
            before: Position = parse_position(captured)
            after: Position = parse_position(position)
            if after <= before:
                return
        self._update_pipeline({"captured_position": position})

    def set_capture_pause(self, why: str | None) -> None:
        """Store why capture is paused, or None once it continues."""
        self._update_pipeline({"capture_pause": why})

    def set_confirmed(self, position: str) -> None:
        """Store the committed position, before it is confirmed to the source."""
        self._update_pipeline({"confirmed_position": position})

    def keep(self, held: Iterable[HeldPart], position: str) -> None:
        """Add durable files of held events, and advance the captured position past them."""
        self._keep(held)
        self.set_captured(position)

    def begin_hold(self, part: HeldPart) -> None:
        """Begin a hold that has no events yet."""
        holds.begin(self._connection, self._lease.pipeline, part)
        self._release_approved([part])

    def keep_again(self, hold: HoldRow, held: Iterable[HeldPart]) -> None:
        """Replace a hold by one for another reason, with the same events in other files."""
        self.hold_journaled(hold, 0)
        self._keep(held)

    def hold_back(self, hold: HoldRow, reason: str) -> None:
        """Revoke a release, because the held events still cannot be decoded, for this reason."""
        holds.hold_back(self._connection, self._lease.pipeline, hold.kind, hold.subject, reason)

    def hold_journaled(self, hold: HoldRow, last_segment: int) -> None:
        """Record that all held events are in the journal, the last one in `last_segment`."""
        holds.journaled(
            self._connection, self._lease.pipeline, hold.kind, hold.subject, last_segment
        )

    def forget_holds(self, delivered: int) -> None:
        """Delete holds whose events all attached sinks have, given that they have this segment."""
        holds.forget(self._connection, self._lease.pipeline, delivered)

    def _keep(self, held: Iterable[HeldPart]) -> None:
        parts = list(held)
        holds.keep(self._connection, self._lease.pipeline, parts)
        self._release_approved(parts)

    def _release_approved(self, held: Iterable[HeldPart]) -> None:
        """Release holds of tables that were approved before their first part was stored."""
        pipeline = self._lease.pipeline
        for table in {part.subject for part in held if part.kind == holds.SCHEMA}:
            if not schemas.is_pending(self._connection, pipeline, table):
                holds.release(self._connection, pipeline, holds.SCHEMA, table, "{}")

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

    def leave_as_captured(self, up_to: int) -> None:
        """Decide that segments up to a number, if still undecided, are delivered unprocessed."""
        self._connection.execute(
            update(segments)
            .where(
                segments.c.pipeline == self._lease.pipeline,
                segments.c.segment <= up_to,
                segments.c.chain_hash.is_(None),
            )
            .values(chain_hash="")
        )

    def add_processed(
        self, processed: Iterable[Processed], tallies: Mapping[int, Tally] | None = None
    ) -> None:
        """Record the processors' output for segments; the first record of a segment is final.

        The segment's tally in `tallies` is counted together with it.
        """
        for one in processed:
            noted = self._connection.execute(
                update(segments)
                .where(
                    segments.c.pipeline == self._lease.pipeline,
                    segments.c.segment == one.segment,
                    segments.c.chain_hash.is_(None),
                )
                .values(
                    chain_hash=one.chain_hash,
                    processed_path=one.path,
                    processed_checksum=one.checksum,
                    processed_content_hash=one.content_hash,
                    processed_rows=one.rows,
                    processed_bytes=one.bytes,
                    processed_counts={name: dict(counts) for name, counts in one.counts.items()},
                )
            )
            if noted.rowcount and tallies is not None:
                metrics.count(self._connection, self._lease.pipeline, tallies.get(one.segment))

    def _update_range(self, number: int, values: Mapping[str, Any]) -> None:
        this = (ranges.c.pipeline == self._lease.pipeline) & (ranges.c.range == number)
        self._connection.execute(update(ranges).where(this).values(**values))


def _together(
    before: Mapping[str, Contained], after: Mapping[str, Contained]
) -> dict[str, Contained]:
    more = {table: contained(before.get(table), versions) for table, versions in after.items()}
    return {**before, **more}


def _sum(left: Counts, right: Counts) -> dict[str, dict[str, int]]:
    total = {table: dict(ops) for table, ops in left.items()}
    for table, ops in right.items():
        into = total.setdefault(table, {})
        for op, count in ops.items():
            into[op] = into.get(op, 0) + count
    return total
