"""Sinks in the state store: their checkpoints, and the actions of users."""

from __future__ import annotations

from deltaforge_dagster.state import rebuild, registration
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow
from deltaforge_dagster.state.rows import read_checkpoints
from deltaforge_dagster.state.store_base import StoreBase


class StoreSinks(StoreBase):
    """The part of a `StateStore` about sinks."""

    def checkpoints(self, name: str) -> dict[str, CheckpointRow]:
        """Return the checkpoint of every sink of a pipeline."""
        with self.database.read() as connection:
            return read_checkpoints(connection, name)

    def reset_checkpoint(
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
        with self.database.write() as connection:
            return registration.reset_checkpoint(
                connection, name, sink, segment, ordinal=ordinal, complete=complete
            )

    def attach_sink(self, name: str, sink: str, *, tail: bool) -> CheckpointRow:
        """Attach a detached sink again; a run may be active meanwhile.

        Args:
            name: The pipeline.
            sink: The sink's id.
            tail: Resume with the next captured segment and skip everything before it, instead of
                resuming after the sink's checkpoint.

        Raises:
            NotAllowed: There is no such sink, it is attached, or the segment after its checkpoint is
                no longer in the journal.
        """
        with self.database.write() as connection:
            return registration.attach_sink(connection, name, sink, tail=tail)

    def pause_sink(self, name: str, sink: str) -> CheckpointRow:
        """Stop sending to a sink until `resume_sink`, but keep everything for it.

        An active run stops the sink's deliverer within seconds, after the batch that it is sending.
        The sink still counts for the commit policy.

        Raises:
            NotAllowed: There is no such sink, or it is paused or detached.
        """
        with self.database.write() as connection:
            return registration.pause_sink(connection, name, sink)

    def resume_sink(self, name: str, sink: str) -> CheckpointRow:
        """Resume delivery to a paused sink after its checkpoint, at once.

        Raises:
            NotAllowed: There is no such sink, or it is not paused.
        """
        with self.database.write() as connection:
            return registration.resume_sink(connection, name, sink)

    def reset_all(self, name: str) -> PipelineRow:
        """Reset a pipeline to the state of a new one: a new uid, no position, no journal, no holds.

        Its start position is determined as for a new pipeline. Every sink receives everything from
        there on, whatever it already holds; detached sinks are attached again. The numbers of segments
        and ranges continue. The desired state, paused sinks, table versions and dead letters are kept.

        Raises:
            NotAllowed: A run holds the lease, or there is no such pipeline.
        """
        with self.database.write() as connection:
            return rebuild.forget_everything(connection, name)
