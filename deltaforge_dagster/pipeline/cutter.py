"""Where segments end: the batches of one stream, cut between transactions.

A segment ends only where the source says that every transaction is whole. Changes of a
transaction that is still open wait in memory until its commit arrives, so that the whole
transactions before it can be cut and delivered meanwhile; once they outgrow `SPILL_BYTES` they
begin a segment of their own, written row group by row group, and memory stays bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa

from deltaforge_dagster.config.model import SegmentLimits
from deltaforge_dagster.journal.files import SegmentWriter
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch

SPILL_BYTES = 16 << 20
"""Changes of an open transaction kept in memory before they are written out."""


class Cutter:
    """Writes change batches into segments and ends each one where and when it is due.

    Args:
        limits: `engine.segment` of the pipeline file.
        open_writer: Makes the writer of the next segment.
        seal: Makes a written segment durable; its changes end at the given position.
        someone_waits: Whether a sink at the journal's end waits for work, which lets a segment
            end as soon as it is `min_ms` old.

    Attributes:
        passed: A position the log has passed without a change for us since the last one that
            was written, or None.
    """

    def __init__(
        self,
        limits: SegmentLimits,
        open_writer: Callable[[], SegmentWriter],
        seal: Callable[[SegmentWriter, Position], None],
        someone_waits: Callable[[], bool],
    ) -> None:
        self.passed: Position | None = None
        self._limits = limits
        self._open_writer = open_writer
        self._seal = seal
        self._someone_waits = someone_waits
        self._writer: SegmentWriter | None = None
        self._began = 0.0
        self._end: Position | None = None  # None also while a spilled transaction is open
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def take(self, batch: ChangeBatch) -> None:
        """Add a batch, and cut when a segment is due; an empty batch only lets time pass."""
        if batch.rows is not None:
            self.passed = None
            self._waiting.append(batch.rows)
            self._waiting_bytes += batch.rows.nbytes
        if batch.end is not None:
            self._write_waiting()
            if self._writer is None:
                self.passed = batch.end
            else:
                self._end = batch.end
        elif self._waiting_bytes > SPILL_BYTES:
            self.cut()
            self._write_waiting()
        if self._due():
            self.cut()

    @property
    def in_transaction(self) -> bool:
        """Whether changes were taken whose commit has not been read."""
        return bool(self._waiting) or (self._writer is not None and self._end is None)

    def cut(self) -> None:
        """Make a segment of the whole transactions written so far, if there are any."""
        if self._writer is None or self._end is None:
            return
        writer, end = self._writer, self._end
        self._writer = self._end = None
        self._seal(writer, end)

    def abandon(self) -> None:
        """Drop what belongs to no whole transaction; it is read again later."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = self._open_writer()
            self._began = time.monotonic()
        for rows in self._waiting:
            self._writer.write(rows)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._end = None

    def _due(self) -> bool:
        if self._writer is None or self._end is None:
            return False
        limits = self._limits
        if self._writer.rows >= limits.max_events or self._writer.bytes >= limits.max_bytes:
            return True
        age_ms = (time.monotonic() - self._began) * 1000
        if age_ms >= limits.max_ms:
            return True
        return age_ms >= limits.min_ms and self._someone_waits()
