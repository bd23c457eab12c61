"""What a run writes of its dead letters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deltaforge_dagster.state import dead_letters, undelivered
from deltaforge_dagster.state.records import NewDeadLetter
from deltaforge_dagster.state.writing import Writing


class DeadLetterWrites(Writing):
    """The part of a `FencedWriter` that fills and empties the queue (see `dead_letters`)."""

    def add_dead_letters(
        self,
        sink: str,
        letters: Sequence[NewDeadLetter],
        *,
        max_entries: int,
        overflow: dead_letters.Overflow,
    ) -> int:
        """Put letters, whose file is durable, into the queue, in order; one that is there stays.

        Returns:
            How many of them are done with, from the first on: fewer than all only when the policy
            is `block` and the next one finds no room.
        """
        return dead_letters.add(
            self._connection,
            self._lease.pipeline,
            sink,
            letters,
            max_entries=max_entries,
            overflow=overflow,
        )

    def begin_redrive(self, attempt: str, seqs: Mapping[int, int]) -> None:
        """Give entries, by their place in an attempt to deliver them, tokens before any is sent."""
        dead_letters.begin_attempt(self._connection, self._lease.pipeline, attempt, seqs)

    def redriven(self, seqs: Collection[int]) -> None:
        """Remove entries that have been delivered."""
        dead_letters.delivered(
            self._connection, self._lease.pipeline, dead_letters.these(seqs=seqs)
        )

    def redriven_up_to(self, token: str) -> int:
        """Remove what a sink says has arrived of an attempt; return how many entries that are."""
        return dead_letters.arrived(self._connection, self._lease.pipeline, token)

    def redrive_failed(self, seq: int, kind: str, message: str) -> None:
        """Note that an entry was refused again, and why; it waits for a person then."""
        dead_letters.failed(self._connection, self._lease.pipeline, seq, kind, message)

    def expire_dead_letters(self, older_than: float) -> int:
        """Drop and count the dead entries older than so many seconds; return how many there were."""
        return dead_letters.expire(self._connection, self._lease.pipeline, older_than)

    def meets_anew(self, sink: str, segment: int, ordinal: int, *, complete: bool) -> None:
        """Drop what is noted of changes behind a checkpoint, which the sink will be given."""
        undelivered.forget_behind(
            self._connection, self._lease.pipeline, sink, segment, ordinal, complete=complete
        )
