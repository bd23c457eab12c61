"""Writes of a run that concern its dead letters."""

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
        """Add letters to the queue, in order; their file must be durable. Existing entries are kept.

        Returns:
            The number of letters, from the first on, that are settled: fewer than all only if the
            policy is `block` and there is no room for the next one.
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
        """Assign tokens to entries, by their place in a redrive attempt, before any is sent."""
        dead_letters.begin_attempt(self._connection, self._lease.pipeline, attempt, seqs)

    def redriven(self, seqs: Collection[int]) -> None:
        """Remove entries that have been delivered."""
        dead_letters.delivered(
            self._connection, self._lease.pipeline, dead_letters.these(seqs=seqs)
        )

    def redriven_up_to(self, token: str) -> int:
        """Remove the entries of an attempt up to the token stored in the sink; return how many."""
        return dead_letters.arrived(self._connection, self._lease.pipeline, token)

    def redrive_failed(self, seq: int, kind: str, message: str) -> None:
        """Record that an entry was refused again, and why; it is `dead` again and waits for a user."""
        dead_letters.failed(self._connection, self._lease.pipeline, seq, kind, message)

    def expire_dead_letters(self, older_than: float) -> int:
        """Drop and count the dead entries older than this many seconds; return how many there were."""
        return dead_letters.expire(self._connection, self._lease.pipeline, older_than)

    def meets_anew(self, sink: str, segment: int, ordinal: int, *, complete: bool) -> None:
        """Delete the records of undelivered changes behind a checkpoint, which will be sent again."""
        undelivered.forget_behind(
            self._connection, self._lease.pipeline, sink, segment, ordinal, complete=complete
        )
