"""What the version of a row is: a number of 128 bits that grows in the order of the source's log.

======  ===========================================================================================
bits
======  ===========================================================================================
127-64  position in the source's log at which the segment of the change ends
        (`SourceType.position_number`)
63-22   when the segment was added to the journal, in milliseconds since 1970
21-0    place of the change in the segment; that of a later one than 4,194,303 runs over into the
        milliseconds
======  ===========================================================================================

A segment ends between two transactions, and all of its changes have committed up to there: so
versions are in the order of commits, and within a transaction in that of its changes. PostgreSQL's
log alone has no such number, because transactions are interleaved in it. If two segments end at the
same position, one has changes that were read from the log, and the other was added after it without
reading the log: snapshot rows or released changes.

The version of a change depends on how the log is cut into segments, which is not the same if it is
captured again (a rebuilt journal, another state store). But the newest change of a row has the
greatest version whatever was delivered before. Let `a` be delivered from a segment that ends at
`A`, and let `b` be a later change of the row, now in a segment that ends at `B`. If `B` is below
`A`, the segment of `a` had `b` in it as well, and so its commit has delivered `b` already, after
`a`. Otherwise the version of `b` is greater.

With `version_source: ts_ms` the upper half is the time of the change in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.sinks.tables.staged import ChangePlace, StagedSegment
from deltaforge_dagster.sources.registry import identify_position

_PLACE_BITS = 22
_HALF = 64
_WORDS = np.dtype([("low", "<u8"), ("high", "<u8")])


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where a segment is in the source's log.

    Attributes:
        start, position: Numbers of the positions at which it starts and ends; None if they have
            none.
        created_at: See `StagedSegment`.
    """

    start: int | None
    position: int | None
    created_at: float


def segment_place(segment: StagedSegment) -> SegmentPlace:
    """Return where a segment is in the source's log."""
    start, end = (_number(text) for text in (segment.start, segment.end))
    return SegmentPlace(start, end, segment.created_at)


def _number(text: str) -> int | None:
    kind, position = identify_position(text)
    return kind.position_number(position)


@dataclass(frozen=True, slots=True)
class VersionMaker:
    """Makes the versions of the changes of a commit.

    Args:
        segments: The segments of the commit.
        by_time: Whether the upper half is the time of the change.
    """

    segments: Mapping[int, SegmentPlace]
    by_time: bool

    @property
    def unknown(self) -> bool:
        """Whether a segment ends at a position without a number, so that there are no versions."""
        if self.by_time:
            return False
        return any(None in {segment.start, segment.position} for segment in self.segments.values())

    def floor(self, span: VersionSpan) -> int:
        """Return a lower bound of the versions that the commit's changes have had in any delivery.

        It holds however the log was cut into segments when they were delivered before.

        Args:
            span: The versions of the changes.
        """
        if self.by_time:
            return span.first >> _HALF << _HALF
        return min(_lowest(segment) for segment in self.segments.values())

    def version(self, change: ChangePlace, time_us: int) -> int:
        """Return the version of one change."""
        segment = self.segments[change.segment]
        high = time_us // 1000 if self.by_time else segment.position
        assert high is not None
        return (high << _HALF) + (_milliseconds(segment) << _PLACE_BITS) + change.ordinal

    def versions(self, rows: pa.RecordBatch) -> npt.NDArray[Any]:
        """Return the versions of rows, in low and high words.

        The rows have the columns `df_segment`, `df_ordinal` and `df_event_time`.
        """
        numbers = rows.column("df_segment").to_numpy()
        distinct, inverse = np.unique(numbers, return_inverse=True)
        ordinals = rows.column("df_ordinal").to_numpy().astype(np.uint64)
        segments = [self.segments[number] for number in distinct.tolist()]
        bases = np.array([_milliseconds(segment) << _PLACE_BITS for segment in segments], np.uint64)
        words = np.empty(len(numbers), _WORDS)
        words["low"] = bases[inverse] + ordinals
        if self.by_time:
            times = rows.column("df_event_time").cast(pa.int64()).to_numpy()
            words["high"] = np.maximum(times // 1000, 0)
        else:
            positions = np.array([segment.position for segment in segments], np.uint64)
            words["high"] = positions[inverse]
        return words


def version_column(versions: npt.NDArray[Any]) -> pa.Array[Any]:
    """Return versions as 16 bytes each, which ClickHouse reads as `UInt128`."""
    data = pa.py_buffer(versions.tobytes())
    return pa.Array.from_buffers(pa.binary(16), len(versions), [None, data])


@dataclass(slots=True)
class VersionSpan:
    """The smallest and the greatest of some versions."""

    first: int = (1 << 128) - 1
    last: int = 0

    def add(self, version: int) -> None:
        """Include a version."""
        self.first, self.last = min(self.first, version), max(self.last, version)

    def add_all(self, versions: npt.NDArray[Any]) -> None:
        """Include versions."""
        for high, pick in ((versions["high"].min(), min), (versions["high"].max(), max)):
            low = pick(versions["low"][versions["high"] == high].tolist())
            self.add((int(high) << _HALF) + low)


def has_version(versions: npt.NDArray[Any], version: int) -> bool:
    """Return whether `version` is among `versions`."""
    low, high = version & ((1 << _HALF) - 1), version >> _HALF
    return bool(((versions["low"] == low) & (versions["high"] == high)).any())


def _lowest(segment: SegmentPlace) -> int:
    assert segment.start is not None
    assert segment.position is not None
    if segment.start == segment.position:  # nothing was read from the log
        return (segment.position << _HALF) + (_milliseconds(segment) << _PLACE_BITS)
    return segment.start + 1 << _HALF


def _milliseconds(segment: SegmentPlace) -> int:
    return int(segment.created_at * 1000)
