"""The sinks in the state store: how far each has acknowledged, and what people decide about them."""

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
        """Set a sink's checkpoint by hand, backwards or forwards, and forget its failures.

        Going back delivers again what comes after; ranges once published stay so. Going forward
        skips: the ranges passed over are never published for this sink.

        Args:
            name: The pipeline.
            sink: The sink's id.
            segment: The last segment to take as delivered; 0 or any number before the journal's
                first segment is refused unless the journal begins right after it.
            ordinal: With `complete=False`: the last row of `segment` to take as delivered, -1
                for none.
            complete: Whether all of `segment` counts as delivered.

        Raises:
            NotAllowed: A run holds the lease, there is no such sink, or delivery would have to go
                on with a segment that is not in the journal.
        """
        with self.database.write() as connection:
            return registration.reset_checkpoint(
                connection, name, sink, segment, ordinal=ordinal, complete=complete
            )

    def attach_sink(self, name: str, sink: str, *, tail: bool) -> CheckpointRow:
        """Attach a detached sink again, also while a run is working on the pipeline.

        Args:
            name: The pipeline.
            sink: The sink's id.
            tail: Go on with what is captured next, skipping everything before, instead of with
                what follows the sink's checkpoint.

        Raises:
            NotAllowed: There is no such sink, it is attached, or what follows its checkpoint is
                no longer in the journal.
        """
        with self.database.write() as connection:
            return registration.attach_sink(connection, name, sink, tail=tail)

    def pause_sink(self, name: str, sink: str) -> CheckpointRow:
        """Send a sink nothing more and keep everything for it, until `resume_sink`.

        A run that is at work ends the sink's deliverer within seconds, after what it is sending.
        The sink counts for the commit policy as before.

        Raises:
            NotAllowed: There is no such sink, or it is paused or detached.
        """
        with self.database.write() as connection:
            return registration.pause_sink(connection, name, sink)

    def resume_sink(self, name: str, sink: str) -> CheckpointRow:
        """Let a paused sink go on after its checkpoint, at once.

        Raises:
            NotAllowed: There is no such sink, or it is not paused.
        """
        with self.database.write() as connection:
            return registration.resume_sink(connection, name, sink)

    def reset_all(self, name: str) -> PipelineRow:
        """Let a pipeline begin as a new one: a new uid, no position, no journal, no holds.

        What fixes the start of a new pipeline decides where it begins. Every sink gets everything
        from there, whatever it holds; detached ones are attached again. Numbers of segments and
        ranges go on; what people want of the pipeline and its sinks, table versions and dead
        letters stay.

        Raises:
            NotAllowed: A run holds the lease, or there is no such pipeline.
        """
        with self.database.write() as connection:
            return rebuild.forget_everything(connection, name)
