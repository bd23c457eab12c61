"""Encoded segments: the messages of all sinks, from which each deliverer takes its own.

A deliverer asks for the messages of its sink from a row on, as often as it likes, and gets batches
that are views of mapped files. This module does not know how the messages were encoded.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.files import BatchSlice, MappedBatches
from deltaforge_dagster.pipeline.encode.messages import Route
from deltaforge_dagster.pipeline.encode.segments import EmptyKeys, select_messages
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.state.records import SegmentRow


class EncodedSegments:
    """Messages of consecutive segments, or of a part of one, ready for any sink of the pipeline.

    Args:
        segments: The segments.
        routes: The columns and rows of each sink.
        slices: Where the rows are, in any order.
        batches: The batches that are in memory instead of in files.
        ordinals: The encoded rows of a single segment; None for all rows.
        empty_keys: Checks the keys of selected messages.

    Attributes:
        first_segment: Number of the first segment.
        last_segment: Number of the last one.
        bytes: Size of the messages, for all sinks together.
    """

    def __init__(
        self,
        segments: Sequence[SegmentRow],
        routes: Mapping[str, Route],
        slices: Sequence[BatchSlice],
        batches: Sequence[pa.RecordBatch],
        *,
        ordinals: range | None,
        empty_keys: EmptyKeys,
    ) -> None:
        self.first_segment = segments[0].segment
        self.last_segment = segments[-1].segment
        self.bytes = sum(batch_slice.bytes for batch_slice in slices)
        self._segments = {segment.segment: segment for segment in segments}
        self._ordinals = {segment.segment: ordinals or range(segment.rows) for segment in segments}
        self._routes = routes
        self._empty_keys = empty_keys
        self._batches = batches
        self._slices: dict[int, list[BatchSlice]] = {segment.segment: [] for segment in segments}
        for batch_slice in sorted(
            slices, key=lambda batch_slice: (batch_slice.segment, batch_slice.ordinal)
        ):
            self._slices.setdefault(batch_slice.segment, []).append(batch_slice)
        self._paths = {batch_slice.path for batch_slice in slices if batch_slice.path}
        self._files: dict[str, MappedBatches] = {}
        # By sink: path and number of each batch that it has in memory.
        self._in_memory: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        self._opening = threading.Lock()

    def last_ordinal(self, segment: int) -> int:
        """Return the last encoded ordinal of a segment, or of the part of it that was encoded."""
        return self._ordinals[segment].stop - 1

    def check(self) -> None:
        """Verify that every row of every segment, or of the part, is present exactly once.

        Raises:
            JournalDamaged: A segment's file holds other rows than its row in the store says.
        """
        for segment, slices in self._slices.items():
            ordinals = self._ordinals.get(segment, range(0))
            if not ordinals and not slices and segment in self._segments:
                continue  # processors removed all of its rows
            expected = ordinals.start
            for batch_slice in slices:
                if batch_slice.ordinal != expected:
                    break
                expected += batch_slice.ordinals
            total = sum(batch_slice.ordinals for batch_slice in slices)
            if not ordinals or expected != ordinals.stop or total != len(ordinals):
                raise JournalDamaged(
                    f"segment {segment}: its journal file does not hold the {len(ordinals)} rows, "
                    f"numbered from {ordinals.start}, that the state store says"
                )

    def batches(
        self, sink_id: str, segment: int, after_ordinal: int, *, set_aside: bool = False
    ) -> Iterator[SinkBatch]:
        """Yield the messages of a segment for a sink, from `after_ordinal + 1` on, in order.

        Yields nothing if the segment is not for this sink. The batches are views of mapped files,
        and end with the last message of a change. May be called repeatedly and from several
        threads.

        Args:
            sink_id: The sink.
            segment: The segment.
            after_ordinal: The last row that the sink has.
            set_aside: Leave out changes that can never be delivered, and list them in the batch
                that they would be in, instead of stopping at the first one. Such a batch may be
                empty.

        Raises:
            Undeliverable: A change can never be delivered; everything before it was yielded.
            StoreUnavailable: An encoded file is gone; encode again.
        """
        if not self._segments[segment].is_for(sink_id):
            return
        route, segment_id = self._routes[sink_id], self._segments[segment].segment_id
        for batch_slice in self._slices[segment]:
            if after_ordinal >= batch_slice.ordinal + batch_slice.ordinals - 1:
                continue
            whole = (
                self._read(sink_id, batch_slice)
                if batch_slice.path
                else self._batches[batch_slice.batch]
            )
            rows = whole.slice(batch_slice.offset, batch_slice.rows)
            if after_ordinal >= batch_slice.ordinal:
                rows = rows.slice(_rows_up_to(rows, after_ordinal))
            messages, refused = select_messages(rows, route, sink_id, segment, self._empty_keys)
            if refused and not set_aside:
                messages = messages.slice(0, _rows_up_to(messages, refused[0].ordinal))
            if messages.num_rows or (refused and set_aside):
                yield SinkBatch(
                    segment,
                    segment_id,
                    messages,
                    refused=tuple(refused),
                    schemas=route.schemas or (),
                )
            if refused and not set_aside:
                raise refused[0]

    def sent(self, sink_id: str) -> None:
        """Give back the memory of the messages that a sink has read so far, because they were sent.

        The newest batch stays. The messages can be read again, from the system's cache of files.
        """
        with self._opening:
            for path, number in self._in_memory[sink_id][:-1]:
                self._files[path].let_go(number)
            del self._in_memory[sink_id][:-1]

    def discard(self) -> None:
        """Delete the files; batches in use stay readable. Safe to call twice."""
        encoded_files.remove(*self.release())

    def release(self) -> set[str]:
        """Return the paths of the files, which belong to the caller from now on."""
        with self._opening:
            paths, self._paths = self._paths, set()
            self._files.clear()
            self._in_memory.clear()
        return paths

    def _read(self, sink_id: str, batch_slice: BatchSlice) -> pa.RecordBatch:
        """Return the batch of a slice.

        A file is opened once for all sinks, because remote files are copied.
        """
        path, number = batch_slice.path, batch_slice.batch
        with self._opening:  # a file serves one thread at a time
            if path not in self._files:
                self._files[path] = MappedBatches.open(path, batch_slice.end)
            in_memory = self._in_memory[sink_id]
            if in_memory[-1:] != [(path, number)]:
                in_memory.append((path, number))
            return self._files[path].batch(number)


def _rows_up_to(rows: pa.RecordBatch, ordinal: int) -> int:
    """Return the number of rows whose ordinals are up to this one."""
    return int(np.searchsorted(rows.column("ordinal").to_numpy(), ordinal, side="right"))
