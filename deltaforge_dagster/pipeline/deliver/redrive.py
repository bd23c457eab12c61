"""Re-drive: dead letters are delivered again, by the deliverer of their sink, between two segments.

An entry is due if a user has requested it, or if it no longer waits behind another dead letter
(`blocked_keys.due_entries`). Due entries are encoded from the changes stored with them, with the
present pipeline file, so that corrected routing takes effect, and are sent in journal order, which
preserves the order of each key. An entry is removed once the sink has acknowledged it; one that is
refused again stays, and its attempts are counted.

Entries beyond the checkpoint are not delivered: they stay in the queue until the sink has passed
their place.

A sink that keeps its own position stores with each atomic step its unchanged position and the token
of the last entry delivered. Whoever opens the sink next reads there which entries have arrived, so
none arrives twice.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa

from deltaforge_dagster.errors import JournalDamaged, Undeliverable
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.pipeline.blocked_keys import BlockedKeys, Keys, Place, due_entries
from deltaforge_dagster.pipeline.deliver.dead_letters import LOOK_SECONDS
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.pipeline.encode.encoder import AT_HAND, Encoder
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.sinks.base import Origin, Sink
from deltaforge_dagster.state.records import CheckpointRow, DeadLetterRow
from deltaforge_dagster.state.store import FencedWriter

_CHUNK_ROWS = 500
_CHUNK_BYTES = 8 << 20
"""The most entries that are delivered at once, and the most bytes of their stored changes."""


class Redriver:
    """Delivers a sink's dead letters again.

    Args:
        context: The sink.
        encoder: Makes messages of changes.
        resumption: Knows the sink's own position.
    """

    def __init__(self, context: DeliveryContext, encoder: Encoder, resumption: Resumption) -> None:
        run = context.run
        self._sink_id = context.sink_id
        self._pipeline = run.lease.pipeline
        self._store = run.store
        self._journal = run.journal
        self._lease = run.lease
        self._encoder = encoder
        self._resumption = resumption
        self._enabled = context.spec.spec.journal.enabled  # otherwise no entries are added
        self._watched = True  # whether the queue has entries, or may get some
        self._looked_at = -LOOK_SECONDS
        self._seen: tuple[tuple[int, int, int], Place] | None = None
        self._due = False

    def due(self, checkpoint: CheckpointRow) -> bool:
        """Return whether an entry is due; asks the store at most once a second."""
        now = time.monotonic()
        if self._due or not self._watched or now - self._looked_at < LOOK_SECONDS:
            return self._due
        self._looked_at = now
        state = self._store.dead_letters.state(self._pipeline, self._sink_id)
        entries, dead, _ = state
        self._watched = self._enabled or entries > 0
        reached = (checkpoint.segment, checkpoint.ordinal)
        if entries == dead or self._seen == (state, reached):
            return False
        self._seen = (state, reached)
        self._due = bool(self._due_entries(reached))
        return self._due

    def deliver(self, sink: Sink, checkpoint: CheckpointRow) -> tuple[CheckpointRow, int]:
        """Deliver some due entries; return the resulting checkpoint and the number of messages.

        Raises:
            DeltaforgeError: The sink failed; entries that were not delivered stay due.
        """
        # Read again: opening the sink may have removed entries that had already arrived.
        due = self._due_entries((checkpoint.segment, checkpoint.ordinal))
        chunk, changes = self._chunk(due)
        self._due, self._seen, self._looked_at = False, None, -LOOK_SECONDS
        if not chunk:
            return checkpoint, 0
        encoded = self._encoder.encode_rows(_numbered(changes))
        batches = list(encoded.batches(self._sink_id, AT_HAND.segment, -1, set_aside=True))
        refused = {refusal.ordinal: refusal for batch in batches for refusal in batch.refused}
        batches = [replace(batch, refused=()) for batch in batches if batch.messages.num_rows]
        if sink.exactly_once and batches:
            seqs = {index: letter.seq for index, letter in enumerate(chunk) if index not in refused}
            origin = self._begin(sink, checkpoint, seqs)
            assert origin.redrive is not None
            batches = [replace(batch, origin=origin) for batch in batches]
            checkpoint = replace(
                checkpoint,
                sent_segment=origin.redrive.segment,
                sent_ordinal=origin.redrive.ordinal,
            )
        passed = len(chunk)
        try:
            for batch in batches:
                self._lease.guard()
                sink.send(batch, self._lease.guard)
                failpoint("redrive-sent")
        except Undeliverable as error:
            refused[error.ordinal] = error
            passed = error.ordinal
        self._settle(chunk, passed, refused)
        failpoint("redrive-written")
        return checkpoint, sum(batch.messages.num_rows for batch in batches)

    def _begin(self, sink: Sink, checkpoint: CheckpointRow, seqs: Mapping[int, int]) -> Origin:
        """Store the tokens of entries, and return the origin under which they are sent."""
        attempt = uuid.uuid4().hex
        origin = self._resumption.redrive_origin(sink, checkpoint, attempt)
        assert origin.redrive is not None
        sent = origin.redrive.segment, origin.redrive.ordinal

        def begin(writer: FencedWriter) -> None:
            writer.dead_letters.begin_redrive(attempt, seqs)
            writer.checkpoints.set_sent(self._sink_id, sent)

        self._lease.write(begin)
        return origin

    def _settle(
        self, chunk: Sequence[DeadLetterRow], passed: int, refused: Mapping[int, Undeliverable]
    ) -> None:
        """Remove the delivered entries, those before index `passed`.

        Those that were refused again stay in the queue.
        """
        delivered = [
            letter.seq for index, letter in enumerate(chunk[:passed]) if index not in refused
        ]

        def settle(writer: FencedWriter) -> None:
            writer.dead_letters.redriven(delivered)
            for index, error in refused.items():
                letter = chunk[index]
                text = str(error).replace(
                    f"segment {AT_HAND.segment}, ordinal {index}",
                    f"segment {letter.segment}, ordinal {letter.ordinal}",
                )
                writer.dead_letters.redrive_failed(letter.seq, error.cause, text + error.detail)

        self._lease.write(settle)

    def _due_entries(self, reached: Place) -> list[DeadLetterRow]:
        letters = self._store.dead_letters.places(self._pipeline, self._sink_id)
        return due_entries(letters, reached)

    def _chunk(
        self, due: Sequence[DeadLetterRow]
    ) -> tuple[list[DeadLetterRow], list[dict[str, Any]]]:
        """Return the entries that are delivered at once, with their changes.

        An entry that may be refused again is the last of its key: nothing follows it before it is
        known to have arrived.
        """
        risky = BlockedKeys()
        ready: list[DeadLetterRow] = []
        for letter in due[:_CHUNK_ROWS]:
            address, keys = (letter.segment, letter.ordinal), Keys.of_entry(letter)
            if letter.holds and risky.holds(address, keys):
                break
            if letter.holds and letter.state == "redrive":
                risky.hold(address, keys)
            ready.append(letter)
        return self._with_changes(ready)

    def _with_changes(
        self, letters: Sequence[DeadLetterRow]
    ) -> tuple[list[DeadLetterRow], list[dict[str, Any]]]:
        """Return the first of the entries, with their stored changes, up to `_CHUNK_BYTES`.

        Returns none if the file of the first entry is damaged; the entries in that file are then
        marked as failed.
        """
        chunk: list[DeadLetterRow] = []
        changes: list[dict[str, Any]] = []
        size = 0
        for (path, checksum), group in itertools.groupby(
            letters, lambda letter: (letter.path, letter.checksum)
        ):
            wanted = {letter.place: letter for letter in group}
            try:
                for index, change in enumerate(self._journal.read_parked(path, checksum)):
                    if index not in wanted:
                        continue
                    size += len(change)
                    if chunk and size > _CHUNK_BYTES:
                        return chunk, changes
                    chunk.append(wanted[index])
                    changes.append(orjson.loads(change))
            except JournalDamaged as error:
                if not chunk:
                    self._give_up([letter.seq for letter in wanted.values()], error)
                return chunk, changes
        return chunk, changes

    def _give_up(self, seqs: Sequence[int], error: JournalDamaged) -> None:
        """Mark entries whose stored changes are lost as failed, so that the others can continue."""
        text = f"what was kept of it is lost: {error}; acknowledge it"

        def give_up(writer: FencedWriter) -> None:
            for seq in seqs:
                writer.dead_letters.redrive_failed(seq, "serialization", text)

        self._lease.write(give_up)


def _numbered(changes: Sequence[dict[str, Any]]) -> pa.Table:
    """Return stored changes as rows of the frame, numbered from 0 in the placeholder segment."""
    rows = [
        change | {"segment": AT_HAND.segment, "ordinal": ordinal}
        for ordinal, change in enumerate(changes)
    ]
    return pa.Table.from_pylist(rows, FRAME)
