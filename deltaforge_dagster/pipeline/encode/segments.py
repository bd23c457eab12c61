"""Encoded segments: the messages of all sinks, from which each deliverer takes its own.

A deliverer asks for the messages of its sink from a row on, as often as it likes, and gets batches
that are views of mapped files. This module does not know how the messages were encoded.

Encoded files hold the messages of all sinks of a pipeline; the `Route` of a sink names its columns
and rows. A change is *refused* if one of its messages cannot be made: its destination has no value,
it is larger than any message can be, or a value does not fit its type in Avro. No message of a
refused change is sent.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import JournalDamaged, Undeliverable
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.files import BatchSlice, MappedBatches
from deltaforge_dagster.pipeline.encode.messages import Route
from deltaforge_dagster.sinks.base import AVRO_MESSAGES, MESSAGES, SinkBatch
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


class EmptyKeys:
    """Warns about variables that are empty text in keys, once for each key and variable.

    Args:
        warn: Called with each warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()

    def inspect(self, rows: pa.RecordBatch, route: Route, sink_id: str) -> None:
        """Check rows that will be sent to a sink."""
        if route.empty is None or route.key is None:
            return
        column = rows.column(route.empty)
        if column.null_count == len(column):
            return
        empty = cast("list[str]", column.drop_null().unique().to_pylist())
        for path in dict.fromkeys(path for paths in empty for path in paths.splitlines()):
            if (route.key.text, path) not in self._warned:
                self._warned.add((route.key.text, path))
                self._warn(
                    f"sink {sink_id}: ${{{path}}} in the key {route.key.text!r} has no value for "
                    "some events and is empty text there; ${key.<column>} has a value for every "
                    "change of a row with a primary key"
                )


def select_messages(
    rows: pa.RecordBatch, route: Route, sink_id: str, segment: int, empty_keys: EmptyKeys
) -> tuple[pa.RecordBatch, list[Undeliverable]]:
    """Return the messages of one sink, and an error for each refused change.

    Args:
        rows: Encoded rows of one segment, with the columns of the plan that the route belongs to.
        route: Columns and rows of the sink.
        sink_id: Sink, for errors.
        segment: Segment number, for errors.
        empty_keys: Checks the keys of the selected messages.

    Returns:
        The messages, with the columns of `MESSAGES` or `AVRO_MESSAGES` (views of `rows` if all of
        them are selected),
        and the errors in the order of their ordinals.
    """
    others = ("unmade", route.unresolved, route.empty)
    names = [name for name in (*route.columns.values(), *others) if name]
    if route.selected is not None and not pc.all(chosen := rows.column(route.selected)).as_py():
        rows = rows.select(list(dict.fromkeys(names))).filter(chosen)
    refused = _refused(rows, route, sink_id, segment)
    if refused:
        ordinals = np.array([error.ordinal for error in refused])
        rest = ~np.isin(rows.column("ordinal").to_numpy(), ordinals)
        rows = rows.filter(pa.array(rest))
    empty_keys.inspect(rows, route, sink_id)
    form = MESSAGES if route.schemas is None else AVRO_MESSAGES
    columns = [_column(rows, route, name) for name in form.names]
    return pa.RecordBatch.from_arrays(columns, schema=form), refused


def _column(rows: pa.RecordBatch, route: Route, name: str) -> pa.Array[Any]:
    """Return a column of messages, all null if the route does not have it."""
    if route.schemas is not None and name in {"value", "schema"}:
        return _avro_column(rows, route, name)
    own = route.columns.get(name)
    return pa.nulls(rows.num_rows, pa.string()) if own is None else rows.column(own)


def _avro_column(rows: pa.RecordBatch, route: Route, name: str) -> pa.Array[Any]:
    """Return a column of messages in Avro."""
    part: pa.Array[Any] = pc.struct_field(rows.column(route.columns["value"]), name)
    return part


def _refused(rows: pa.RecordBatch, route: Route, sink_id: str, segment: int) -> list[Undeliverable]:
    destination, unmade = rows.column(route.columns["destination"]), rows.column("unmade")
    errors: dict[int, Undeliverable] = {}

    def refuse(row: int, problem: str, advice: str, cause: str) -> None:
        ordinal = cast("int", rows.column("ordinal")[row].as_py())
        event = f"the event at segment {segment}, ordinal {ordinal}"
        text = f"sink {sink_id}: {problem} {event}; {advice}"
        errors.setdefault(ordinal, Undeliverable(text, ordinal, cause))

    if unmade.null_count < len(unmade):
        for row in np.flatnonzero(unmade.is_valid()).tolist():
            if not set(route.columns.values()).isdisjoint(unmade[row].as_py().split()):
                problem = "no message of 2 GiB or more can be made of"
                refuse(row, problem, "leave out what makes it so large", "too_large")
    if route.schemas is not None:
        unfit = _avro_column(rows, route, "unfit")
        for row in np.flatnonzero(unfit.is_valid()).tolist():
            advice = f"{unfit[row].as_py()}; leave the column out (engine.columns), or send JSON"
            refuse(row, "no message in Avro can be made of", advice, "serialization")
    if destination.null_count and route.unresolved is not None:
        for row in np.flatnonzero(destination.is_null()).tolist():
            problem = (
                f"${{{rows.column(route.unresolved)[row].as_py()}}} in {route.template.text!r} has"
            )
            refuse(row, f"{problem} no value for", "use a variable that every event has", "routing")
    return sorted(errors.values(), key=lambda error: error.ordinal)


def _rows_up_to(rows: pa.RecordBatch, ordinal: int) -> int:
    """Return the number of rows whose ordinals are up to this one."""
    return int(np.searchsorted(rows.column("ordinal").to_numpy(), ordinal, side="right"))
