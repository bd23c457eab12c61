"""Find the changes of a key: in which segments of the journal they are, and which sinks have them.

The journal is read with pyarrow, one row group in memory at a time. A key is given by its values;
an update that changes a key is found by the old and by the new one. Processors keep a change's
event id, by which the change is found in their output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import JournalDamaged, NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.blocked_keys import COLUMNS, full_names
from deltaforge_dagster.processors.messages.expansion import changed_keys
from deltaforge_dagster.sources.registry import identify_position
from deltaforge_dagster.state.dead_letters import Fate
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import StateStore

_READ = [*COLUMNS, "ts_us", "file", "pos", "event_id"]
_SEGMENTS_AT_ONCE = 200
_PLAIN = re.compile(r"[A-Za-z0-9_.:+-]+")
"""Text that JSON does not escape, so that it can be searched before a key is parsed."""


class Wanted:
    """The key to search for.

    Args:
        text: A JSON object of columns and values (`{"id": 7}`), all of which must match; or the
            values alone, separated by commas, in the key's order (`7`, `7,eu`).

    Raises:
        NotAllowed: The text is empty, or an invalid JSON object.
    """

    def __init__(self, text: str) -> None:
        self._columns: Mapping[str, str] | None = None
        self._alone = text
        self._values = text.split(",")
        if text.lstrip().startswith("{"):
            try:
                self._columns = _texts(text)
            except ValueError as error:
                raise NotAllowed(f"the key is no JSON object: {error}") from error
            self._values = list(self._columns.values())
        if not any(self._values):
            raise NotAllowed("the key is empty: write its value, or a JSON object of its columns")

    def fits(self, key: str) -> bool:
        """Return whether a key of the journal, JSON text, matches."""
        columns = _texts(key)
        if self._columns is not None:
            return all(columns.get(name) == value for name, value in self._columns.items())
        values = list(columns.values())
        return values in ([self._alone], self._values)

    def among(self, keys: pa.Array[Any]) -> list[int]:
        """Return the indexes of the keys that match."""
        candidates: npt.NDArray[np.bool_] = keys.is_valid().to_numpy(zero_copy_only=False).copy()
        for value in self._values:
            if _PLAIN.fullmatch(value):
                matches: Any = pc.match_substring(keys, value)
                candidates &= matches.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
        return [
            int(index)
            for index in np.flatnonzero(candidates)
            if self.fits(cast("str", keys[int(index)].as_py()))
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """A change of the key.

    Attributes:
        table: Full name of its table.
        op: Its operation, as in the journal.
        ts_us: When it happened, microseconds since 1970.
        range: Its range.
        segment: Its segment.
        ordinal: Its ordinal in the captured segment.
        position: Its place in the source's log, in the notation of the database.
        event_id: Its event id.
        key: The row's key afterwards, JSON text.
        old_key: The key before an update that changed it, else None.
        sinks: Its state at each sink: `delivered`, `waiting`, `dropped` (by processors), `dead
            letter N`, `dead letter, acknowledged` or another way in which an entry left the queue
            undelivered, `detached`, or `never` (the sink began later).
    """

    table: str
    op: str
    ts_us: int
    range: int
    segment: int
    ordinal: int
    position: str
    event_id: str
    key: str
    old_key: str | None
    sinks: Mapping[str, str]


def search(
    store: StateStore,
    journal: Journal,
    pipeline: str,
    wanted: Wanted,
    *,
    tables: Collection[str] = (),
    segments: tuple[int | None, int | None] = (None, None),
    progress: Callable[[SegmentRow], None] = lambda _segment: None,
) -> Iterator[Found]:
    """Yield the changes of a key, in the log's order.

    Args:
        store: The state store.
        journal: The journal.
        pipeline: Name of the pipeline.
        wanted: The key.
        tables: Names of tables, full or without the schema or database; empty for all.
        segments: The first and the last segment to read, both included; None for no limit.
        progress: Called with each segment after it was searched.

    Raises:
        JournalDamaged: A segment's file is missing, or cannot be decoded.
        StoreUnavailable: The store or the journal cannot be read now.
    """
    sinks = _Sinks(store, pipeline)
    after, last = segments
    while page := store.segments.read(pipeline, first=after, last=last, limit=_SEGMENTS_AT_ONCE):
        for segment in page:
            if not tables or any(_named(name, tables) for name in segment.counts):
                try:
                    yield from _of_segment(journal, segment, wanted, tables, sinks)
                except JournalDamaged:
                    if store.segments.get(pipeline, segment.segment) is not None:
                        raise  # otherwise retention has removed it meanwhile
            progress(segment)
        after = page[-1].segment + 1


def _of_segment(
    journal: Journal,
    segment: SegmentRow,
    wanted: Wanted,
    tables: Collection[str],
    sinks: _Sinks,
) -> Iterator[Found]:
    for batch in journal.share(segment.path, _READ, ordinals=None, part=0, of=1):
        moved, old = changed_keys(batch)
        chosen = {*wanted.among(batch.column("key")), *moved[wanted.among(old)].tolist()}
        if not chosen:
            continue
        rows = batch.take(pa.array(sorted(chosen), pa.int64()))
        names = full_names(rows).to_pylist()
        for index, row, name in zip(sorted(chosen), rows.to_pylist(), names, strict=True):
            if tables and not _named(cast("str", name), tables):
                continue
            yield Found(
                table=cast("str", name),
                op=row["op"],
                ts_us=row["ts_us"],
                range=segment.range,
                segment=segment.segment,
                ordinal=row["ordinal"],
                position=_position(segment, row["file"], row["pos"]),
                event_id=row["event_id"],
                key=row["key"],
                old_key=_old_key(moved, old, index),
                sinks=sinks.of(journal, segment, row["ordinal"], row["event_id"]),
            )


class _Sinks:
    """What each sink has; checkpoints and dead letters are read once, so that all results agree."""

    def __init__(self, store: StateStore, pipeline: str) -> None:
        self._store = store
        self._pipeline = pipeline
        self._checkpoints = store.checkpoints.read(pipeline)
        self._dead = {
            (sink, letter.event_id): letter.seq
            for sink in self._checkpoints
            for letter in store.dead_letters.places(pipeline, sink)
        }
        self._processed: tuple[int, dict[str, int]] = (0, {})
        self._undelivered: tuple[int, Mapping[str, Mapping[Fate, list[range]]]] = (0, {})

    def of(
        self, journal: Journal, segment: SegmentRow, ordinal: int, event_id: str
    ) -> dict[str, str]:
        """Return the state of a change at each sink (`Found.sinks`)."""
        output_ordinal: int | None = ordinal
        if segment.chain_hash:
            output_ordinal = self._output_ordinals(journal, segment).get(event_id)
        return {
            sink: self._state_at(checkpoint, segment.segment, output_ordinal, event_id)
            if segment.is_for(sink)
            else "never"
            for sink, checkpoint in self._checkpoints.items()
        }

    def _state_at(
        self, checkpoint: CheckpointRow, segment: int, ordinal: int | None, event_id: str
    ) -> str:
        dead = self._dead.get((checkpoint.sink, event_id))
        if dead is not None:
            return f"dead letter {dead}"
        if segment < checkpoint.first_segment:
            return "never"
        if ordinal is None:
            return "dropped"
        reached = (checkpoint.segment, checkpoint.ordinal)
        if segment > checkpoint.whole_segment and (segment, ordinal) > reached:
            return "waiting" if checkpoint.attached else "detached"
        for fate, runs in self._fates(segment).get(checkpoint.sink, {}).items():
            if any(ordinal in run for run in runs):
                return f"dead letter, {fate}"
        return "delivered"

    def _fates(self, segment: int) -> Mapping[str, Mapping[Fate, list[range]]]:
        """Return which changes of a segment left the dead-letter queue without being delivered."""
        if self._undelivered[0] != segment:
            self._undelivered = (segment, self._store.undelivered.read(self._pipeline, segment))
        return self._undelivered[1]

    def _output_ordinals(self, journal: Journal, segment: SegmentRow) -> Mapping[str, int]:
        """Return, by event id, the ordinals of a segment's events in its processors' output."""
        number, by_event = self._processed
        if number != segment.segment:
            by_event = {}
            if segment.processed_path is not None:
                for batch in journal.batches(segment.delivered, ["ordinal", "event_id"]):
                    ids = cast("list[str]", batch.column("event_id").to_pylist())
                    ordinals = cast("list[int]", batch.column("ordinal").to_pylist())
                    by_event.update(zip(ids, ordinals, strict=True))
            self._processed = (segment.segment, by_event)
        return by_event


def _texts(key: str) -> dict[str, str]:
    """Return the columns of a key as text; numbers keep their spelling.

    Raises:
        ValueError: The key is no JSON object.
    """
    columns = json.loads(key, parse_int=str, parse_float=str)
    if not isinstance(columns, dict):
        raise ValueError("it has no columns")  # noqa: TRY004 - as json's own
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in columns.items()
    }


def _old_key(moved: npt.NDArray[np.int64], old: pa.StringArray, index: int) -> str | None:
    at = np.flatnonzero(moved == index)
    return old[int(at[0])].as_py() if len(at) else None


def _named(table: str, names: Collection[str]) -> bool:
    return table in names or table.rpartition(".")[2] in names


def _position(segment: SegmentRow, file: str | None, pos: int | None) -> str:
    """Return a place in the log in the notation of the database."""
    return identify_position(segment.end_position)[0].place(file, pos)


def segments_of(store: StateStore, pipeline: str, ranges: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last segment of consecutive ranges.

    Raises:
        NotAllowed: The first or the last range does not exist (any more).
    """
    first, last = store.ranges.get(pipeline, ranges[0]), store.ranges.get(pipeline, ranges[-1])
    for number, row in ((ranges[0], first), (ranges[-1], last)):
        if row is None:
            raise NotAllowed(f"{pipeline} has no range {number}")
    assert first is not None
    assert last is not None
    return first.first_segment, last.last_segment
