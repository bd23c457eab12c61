"""Prepared segments: the messages of all sinks, of which each deliverer takes those of its own.

Whoever sends asks for the messages of a sink from some row on, as often as it likes, and gets them
in batches that are views of mapped files. Nothing is known here of how they were prepared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.pipeline import encoded_files
from deltaforge_dagster.pipeline.encoded_files import Piece
from deltaforge_dagster.pipeline.message_selection import EmptyKeys, select_messages
from deltaforge_dagster.pipeline.messages import Route
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.state.records import SegmentRow


class EncodedSegments:
    """Messages of consecutive segments, or of a part of one, ready for any sink of the pipeline.

    Args:
        segments: The segments.
        routes: Where each sink finds its messages.
        pieces: Where the rows lie, in any order.
        batches: Those that are in memory.
        ordinals: Which rows these are of the one segment; None for all.
        empty_keys: Told of keys with nothing in the place of a variable.

    Attributes:
        first_segment: Number of the first segment.
        last_segment: Number of the last one.
        bytes: Size of the messages, for all sinks together.
    """

    def __init__(
        self,
        segments: Sequence[SegmentRow],
        routes: Mapping[str, Route],
        pieces: Sequence[Piece],
        batches: Sequence[pa.RecordBatch],
        *,
        ordinals: range | None,
        empty_keys: EmptyKeys,
    ) -> None:
        self.first_segment = segments[0].segment
        self.last_segment = segments[-1].segment
        self.bytes = sum(one.bytes for one in pieces)
        self._segments = {one.segment: one for one in segments}
        self._ordinals = {one.segment: ordinals or range(one.rows) for one in segments}
        self._routes = routes
        self._empty_keys = empty_keys
        self._batches = batches
        self._pieces: dict[int, list[Piece]] = {one.segment: [] for one in segments}
        for piece in sorted(pieces, key=lambda one: (one.segment, one.ordinal)):
            self._pieces.setdefault(piece.segment, []).append(piece)
        self._paths = {one.path for one in pieces if one.path}
        self._readers: dict[str, pa.ipc.RecordBatchFileReader] = {}
        self._opening = threading.Lock()

    def last_ordinal(self, segment: int) -> int:
        """Return the last ordinal of a segment that is here: its last one, or that of the part."""
        return self._ordinals[segment].stop - 1

    def check(self) -> None:
        """Prove that every row of every segment, or of the part, is here, once.

        Raises:
            JournalDamaged: A segment's file holds other rows than its row in the store says.
        """
        for segment, pieces in self._pieces.items():
            ordinals = self._ordinals.get(segment, range(0))
            if not ordinals and not pieces and segment in self._segments:
                continue  # processors left nothing of it
            expected = ordinals.start
            for piece in pieces:
                if piece.ordinal != expected:
                    break
                expected += piece.ordinals
            found = sum(one.ordinals for one in pieces)
            if not ordinals or expected != ordinals.stop or found != len(ordinals):
                raise JournalDamaged(
                    f"segment {segment}: its journal file does not hold the {len(ordinals)} rows, "
                    f"numbered from {ordinals.start}, that the state store says"
                )

    def batches(
        self, sink_id: str, segment: int, after_ordinal: int, *, set_aside: bool = False
    ) -> Iterator[SinkBatch]:
        """Yield a segment's messages for a sink from `after_ordinal + 1` on, in order, if it is for it.

        The batches are views of mapped files, and end with the last message of a change. May be
        called again, and from several threads.

        Args:
            sink_id: The sink.
            segment: The segment.
            after_ordinal: What the sink has already.
            set_aside: Leave out changes that can never be delivered, and name them in the batch
                that they would be in, instead of stopping at the first. Such a batch may have no
                messages.

        Raises:
            Undeliverable: A change can never be delivered; everything before it was yielded.
            StoreUnavailable: A prepared file is gone; prepare again.
        """
        if not self._segments[segment].is_for(sink_id):
            return
        route, segment_id = self._routes[sink_id], self._segments[segment].segment_id
        for piece in self._pieces[segment]:
            if after_ordinal >= piece.ordinal + piece.ordinals - 1:
                continue
            whole = self._read(piece) if piece.path else self._batches[piece.batch]
            rows = whole.slice(piece.offset, piece.rows)
            if after_ordinal >= piece.ordinal:
                rows = rows.slice(_rows_up_to(rows, after_ordinal))
            messages, refused = select_messages(rows, route, sink_id, segment, self._empty_keys)
            if refused and not set_aside:
                messages = messages.slice(0, _rows_up_to(messages, refused[0].ordinal))
            if messages.num_rows or (refused and set_aside):
                yield SinkBatch(segment, segment_id, messages, refused=tuple(refused))
            if refused and not set_aside:
                raise refused[0]

    def discard(self) -> None:
        """Delete the files; batches that are in use stay readable. Safe to call twice."""
        encoded_files.remove(*self.release())

    def release(self) -> set[str]:
        """Hand the files over, once: they are the caller's then."""
        with self._opening:
            paths, self._paths = self._paths, set()
            self._readers.clear()
        return paths

    def _read(self, piece: Piece) -> pa.RecordBatch:
        """Return a piece's batch; a file is opened once for all sinks, since a remote one is copied."""
        with self._opening:  # a reader is for one thread at a time
            if piece.path not in self._readers:
                self._readers[piece.path] = encoded_files.open_batches(piece.path, piece.end)
            return self._readers[piece.path].get_batch(piece.batch)


def _rows_up_to(rows: pa.RecordBatch, ordinal: int) -> int:
    """Return how many rows of a piece belong to ordinals up to this one."""
    return int(np.searchsorted(rows.column("ordinal").to_numpy(), ordinal, side="right"))
