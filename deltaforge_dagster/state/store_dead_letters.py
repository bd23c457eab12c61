"""The dead letters in the state store: what people and checks see of them, and what people do."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from deltaforge_dagster.state import dead_letters, undelivered
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.records import DeadLetterDepth, DeadLetterRow
from deltaforge_dagster.state.store_base import StoreBase


class StoreDeadLetters(StoreBase):
    """The part of a `StateStore` about dead letters."""

    def dead_letters(
        self,
        name: str,
        *,
        sink: str | None = None,
        error_kind: str | None = None,
        seqs: Collection[int] | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[DeadLetterRow]:
        """Return entries of a pipeline's queue, the oldest first.

        Args:
            name: The pipeline.
            sink: Only of this sink.
            error_kind: Only of this kind.
            seqs: Only these.
            after: Only those with a higher number.
            limit: At most so many.
        """
        with self.database.read() as connection:
            return dead_letters.read(
                connection,
                name,
                sink=sink,
                error_kind=error_kind,
                seqs=seqs,
                after=after,
                limit=limit,
            )

    def dead_letter_places(self, name: str, sink: str) -> list[DeadLetterRow]:
        """Return the entries of a sink in the order of the journal, with an empty `event`."""
        with self.database.read() as connection:
            return dead_letters.places(connection, name, sink)

    def dead_letter_state(self, name: str, sink: str) -> tuple[int, int, int]:
        """Return what changes whenever a sink's entries do; 0 of them first when there is none."""
        with self.database.read() as connection:
            return dead_letters.state_of(connection, name, sink)

    def dead_letter_depth(self, name: str) -> DeadLetterDepth:
        """Return how full a pipeline's queue is, and what its limits have cost so far."""
        with self.database.read() as connection:
            return dead_letters.depth(connection, name)

    def dead_letter_files(self, name: str) -> set[str]:
        """Return the files of the journal that entries need."""
        with self.database.read() as connection:
            return dead_letters.files(connection, name)

    def redrive_dead_letters(
        self, name: str, *, sink: str | None = None, seqs: Collection[int] | None = None
    ) -> int:
        """Ask for a new delivery of dead entries, of all or of these; return how many there are.

        The sink's deliverer sends them, in the run that is live or in the next one.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            return dead_letters.redrive(connection, name, dead_letters.these(sink=sink, seqs=seqs))

    def remove_dead_letters(
        self,
        name: str,
        *,
        sink: str | None = None,
        seqs: Collection[int] | None = None,
        up_to: int | None = None,
    ) -> int:
        """Remove entries for good, without delivering them; return how many there were.

        Changes that wait behind them only are delivered then.

        Args:
            name: The pipeline.
            sink: Only of this sink.
            seqs: Only these.
            up_to: Only those with this number or a lower one.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            these = dead_letters.these(sink=sink, seqs=seqs, up_to=up_to)
            return dead_letters.give_up(connection, name, "acknowledged", these)

    def expire_dead_letters(self, name: str, older_than: float) -> int:
        """Drop and count the dead entries older than so many seconds; return how many there were."""
        with self.database.write() as connection:
            lock_lease(connection, name)
            return dead_letters.expire(connection, name, older_than)

    def undelivered(
        self, name: str, segment: int
    ) -> Mapping[str, Mapping[undelivered.Fate, list[range]]]:
        """Return by sink, and by what became of them, rows of a segment that it never got.

        They have left the queue, or found no room in it; `state.undelivered` says how.
        """
        with self.database.read() as connection:
            return undelivered.of_segment(connection, name, segment)
