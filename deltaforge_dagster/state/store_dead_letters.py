"""Dead letters in the state store: reading them, and the actions of users."""

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
        """Return entries of a pipeline's queue, oldest first.

        Args:
            name: The pipeline.
            sink: Only entries of this sink.
            error_kind: Only entries of this kind.
            seqs: Only entries with these numbers.
            after: Only entries with a higher number.
            limit: Maximum number of entries.
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
        """Return values that change whenever a sink's entries do; the first is their number."""
        with self.database.read() as connection:
            return dead_letters.state_of(connection, name, sink)

    def dead_letter_depth(self, name: str) -> DeadLetterDepth:
        """Return the size of a pipeline's queue, and how many entries its limits have cost so far."""
        with self.database.read() as connection:
            return dead_letters.depth(connection, name)

    def dead_letter_files(self, name: str) -> set[str]:
        """Return the files of the journal that entries refer to."""
        with self.database.read() as connection:
            return dead_letters.files(connection, name)

    def redrive_dead_letters(
        self, name: str, *, sink: str | None = None, seqs: Collection[int] | None = None
    ) -> int:
        """Request a new delivery of all dead entries or of these; return how many there are.

        The sink's deliverer sends them, in the current live run or in the next one.
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
        """Remove entries permanently without delivering them; return how many there were.

        Changes that wait only for these entries are then delivered.

        Args:
            name: The pipeline.
            sink: Only entries of this sink.
            seqs: Only entries with these numbers.
            up_to: Only entries with this number or a lower one.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            these = dead_letters.these(sink=sink, seqs=seqs, up_to=up_to)
            return dead_letters.give_up(connection, name, "acknowledged", these)

    def expire_dead_letters(self, name: str, older_than: float) -> int:
        """Drop and count the dead entries older than this many seconds; return how many there were."""
        with self.database.write() as connection:
            lock_lease(connection, name)
            return dead_letters.expire(connection, name, older_than)

    def undelivered(
        self, name: str, segment: int
    ) -> Mapping[str, Mapping[undelivered.Fate, list[range]]]:
        """Return, by sink and fate, the ordinals of a segment that the sink never received.

        These changes left the queue undelivered, or found no room in it (`state.undelivered`).
        """
        with self.database.read() as connection:
            return undelivered.of_segment(connection, name, segment)
