"""The progress of a sink: what it has acknowledged, and its checkpoint in the state store."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.sinks.base import Sink, SinkBatch, traffic_of
from deltaforge_dagster.state.checkpoints import NOTHING
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow


class SinkProgress:
    """Counts acknowledged messages, and advances the checkpoint accordingly.

    Args:
        context: The sink.
        checkpoint: Its checkpoint when the deliverer begins.

    Attributes:
        checkpoint: What the sink has acknowledged, as last written to the store.
        moved_at: Monotonic time of the last acknowledgement.
        rows: Messages sent by this run.
    """

    def __init__(self, context: DeliveryContext, checkpoint: CheckpointRow) -> None:
        self.checkpoint = checkpoint
        self.moved_at = time.monotonic()
        self.rows = 0
        self._sink_id = context.sink_id
        self._lease = context.run.lease
        self._meter = context.meter
        self._sent: tuple[int, int] | None = None

    def reached(self, row: SegmentRow) -> int:
        """Return the last ordinal of a segment that the sink has; -1 if it has none of it."""
        return self.checkpoint.ordinal if self.checkpoint.segment == row.segment else -1

    def resume(self, checkpoint: CheckpointRow) -> None:
        """Continue after a checkpoint that was set when the sink was opened."""
        self.checkpoint = checkpoint
        self._sent = None

    def redriven(self, checkpoint: CheckpointRow, messages: int) -> None:
        """Count redelivered dead letters; continue after the checkpoint of that redelivery."""
        self.resume(checkpoint)
        self._meter.redriven(messages)
        self.rows += messages
        self.moved_at = time.monotonic()

    def arrived(self, batch: SinkBatch, stop: int) -> None:
        """Count the messages of a batch that have arrived: those before the ordinal `stop`."""
        cut = [
            part.slice(0, int(part.column("ordinal").to_numpy().searchsorted(stop)))
            for part in batch.parts
        ]
        arrived = [part for part in cut if part.num_rows]
        self._meter.sent(arrived)
        if arrived:
            # The sink's own position names the last message that has arrived.
            self._sent = batch.segment, cast("int", arrived[-1].column("ordinal")[-1].as_py())
            self.rows += sum(part.num_rows for part in arrived)
            self.moved_at = time.monotonic()

    def advance(self, row: SegmentRow, ordinal: int, sink: Sink, *, complete: bool) -> None:
        """Record that the sink is done with everything up to a row of a segment.

        Every change up to it was acknowledged, or has become a dead letter.
        """
        exactly_once = sink.exactly_once
        position = row.end_position if complete else None
        sent = (self._sent or self.checkpoint.sent) if exactly_once else None
        self._meter.did(traffic_of(sink))
        tally = self._meter.acknowledged(row, complete=complete)
        began, failures = time.monotonic(), 0

        def failed() -> None:
            nonlocal failures
            failures += 1

        self._lease.write(
            lambda writer: writer.checkpoints.advance(
                self._sink_id,
                row.segment,
                ordinal,
                complete=complete,
                source_position=position,
                exactly_once=exactly_once,
                sent=sent,
                tally=tally,
            ),
            failed=failed,
        )
        self._meter.committed(row, time.monotonic() - began, failures)
        self.checkpoint = replace(
            self.checkpoint,
            segment=row.segment,
            ordinal=ordinal,
            complete=complete,
            source_position=position or self.checkpoint.source_position,
            lineage=self.checkpoint.lineage if exactly_once else None,
            overrules=not exactly_once or sent == NOTHING,
            sent_segment=None if sent is None else sent[0],
            sent_ordinal=None if sent is None else sent[1],
        )
        failpoint("checkpoint-written")
