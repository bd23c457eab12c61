"""Re-drive: dead letters are delivered again, by the deliverer of their sink, between two segments.

What is due is what somebody asked for, and what waits for nothing any more
(`held_keys.due_entries`). It is
encoded from the changes kept with the entries, by today's pipeline file, so a routing that was fixed
counts; and sent in the order of the journal, so that each key's changes keep theirs. An entry goes once
the sink has acknowledged it; what is refused again stays, with one attempt more.

Nothing is delivered that the checkpoint has not passed: the sink gets it from the journal, or leaves
it in the queue.

A sink that keeps its own position stores, with each atomic step, the position that it has already and
the token of the last entry delivered. Whoever opens it next finds there what has arrived, so nothing
arrives twice, and the position stays where it was.
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
from deltaforge_dagster.pipeline.deliver.context import DeliveryContext
from deltaforge_dagster.pipeline.deliver.dead_letters import LOOK_SECONDS
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.encode.encoder import AT_HAND, Encoder
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.held_keys import HeldKeys, Keys, Place, due_entries
from deltaforge_dagster.sinks.base import Origin, Sink
from deltaforge_dagster.state.records import CheckpointRow, DeadLetterRow
from deltaforge_dagster.state.store import FencedWriter

_CHUNK_ROWS = 500
_CHUNK_BYTES = 8 << 20
"""What is delivered at once; the bytes are those of changes as they are kept."""


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
        self._enabled = context.spec.spec.journal.enabled  # or there is only what is there already
        self._watched = True
        self._looked_at = -LOOK_SECONDS
        self._seen: tuple[tuple[int, int, int], Place] | None = None
        self._due = False

    def due(self, checkpoint: CheckpointRow) -> bool:
        """Say whether anything is to be delivered; asks the store once a second at most."""
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
        """Deliver some of what is due; return the checkpoint as it is then, and how many messages.

        Raises:
            DeltaforgeError: The sink failed; what is left stays due.
        """
        # Asked again: what a sink was found to have when it was opened is gone since.
        due = self._due_entries((checkpoint.segment, checkpoint.ordinal))
        chunk, changes = self._chunk(due)
        self._due, self._seen, self._looked_at = False, None, -LOOK_SECONDS
        if not chunk:
            return checkpoint, 0
        encoded = self._encoder.prepare_rows(_numbered(changes))
        batches = list(encoded.batches(self._sink_id, AT_HAND.segment, -1, set_aside=True))
        refused = {one.ordinal: one for batch in batches for one in batch.refused}
        batches = [replace(batch, refused=()) for batch in batches if batch.messages.num_rows]
        if sink.exactly_once and batches:
            seqs = {place: one.seq for place, one in enumerate(chunk) if place not in refused}
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
        """Give entries their tokens, and return the origin under which they are sent."""
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
        """Remove what was delivered, all before `passed`, and keep what was refused again."""
        delivered = [
            entry.seq for place, entry in enumerate(chunk[:passed]) if place not in refused
        ]

        def settle(writer: FencedWriter) -> None:
            writer.dead_letters.redriven(delivered)
            for place, error in refused.items():
                entry = chunk[place]
                text = str(error).replace(
                    f"segment {AT_HAND.segment}, ordinal {place}",
                    f"segment {entry.segment}, ordinal {entry.ordinal}",
                )
                writer.dead_letters.redrive_failed(entry.seq, error.cause, text)

        self._lease.write(settle)

    def _due_entries(self, reached: Place) -> list[DeadLetterRow]:
        everything = self._store.dead_letters.places(self._pipeline, self._sink_id)
        return due_entries(everything, reached)

    def _chunk(
        self, due: Sequence[DeadLetterRow]
    ) -> tuple[list[DeadLetterRow], list[dict[str, Any]]]:
        """Return what is delivered at once, with its changes.

        What may be refused again comes last of its key: nothing is sent behind it before it is known
        to have arrived.
        """
        risky = HeldKeys()
        some: list[DeadLetterRow] = []
        for entry in due[:_CHUNK_ROWS]:
            place, keys = (entry.segment, entry.ordinal), Keys.of_entry(entry)
            if entry.holds and risky.holds(place, keys):
                break
            if entry.holds and entry.state == "redrive":
                risky.hold(place, keys)
            some.append(entry)
        return self._kept(some)

    def _kept(
        self, entries: Sequence[DeadLetterRow]
    ) -> tuple[list[DeadLetterRow], list[dict[str, Any]]]:
        """Return the first of some entries, with their changes, as far as these fit into memory.

        None of them when what was kept of the first is lost: it waits for a person then.
        """
        chunk: list[DeadLetterRow] = []
        changes: list[dict[str, Any]] = []
        size = 0
        for (path, checksum), group in itertools.groupby(
            entries, lambda entry: (entry.path, entry.checksum)
        ):
            wanted = {entry.place: entry for entry in group}
            try:
                for place, change in enumerate(self._journal.read_held(path, checksum)):
                    if place not in wanted:
                        continue
                    size += len(change)
                    if chunk and size > _CHUNK_BYTES:
                        return chunk, changes
                    chunk.append(wanted[place])
                    changes.append(orjson.loads(change))
            except JournalDamaged as error:
                if not chunk:
                    self._give_up([entry.seq for entry in wanted.values()], error)
                return chunk, changes
        return chunk, changes

    def _give_up(self, seqs: Sequence[int], error: JournalDamaged) -> None:
        """Note that entries cannot be delivered any more, so that they do not stop the others."""
        text = f"what was kept of it is lost: {error}; acknowledge it"

        def give_up(writer: FencedWriter) -> None:
            for seq in seqs:
                writer.dead_letters.redrive_failed(seq, "serialization", text)

        self._lease.write(give_up)


def _numbered(changes: Sequence[dict[str, Any]]) -> pa.Table:
    """Return changes as rows of the frame that are in no segment."""
    rows = [
        change | {"segment": AT_HAND.segment, "ordinal": ordinal}
        for ordinal, change in enumerate(changes)
    ]
    return pa.Table.from_pylist(rows, FRAME)
