"""Dead letters of one sink: changes that can never be delivered to it as they are.

They are set aside in order. Such a change goes to the queue (`state.dead_letters`), so that later
changes can pass. A lost connection or wrong credentials never make a change a dead letter. The
order of writes:

1. the whole change, a row of the frame, is written to a separate file of the journal (`dead/`), so
   that its segment can be deleted on time, and a change of any size is kept;
2. its entry in the queue is written, fenced by the lease, before any later change is sent. There is
   one entry for a sink and an event: a run that repeats the change after a crash finds the entry;
3. the checkpoint is advanced past the change.

With `engine.dlq.hold_key` later changes of the same key follow it into the queue (`blocked_keys`),
and nothing of that key reaches the sink before it.

An entry shows the event of its change, and the event's place in the source's log (`View`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import JournalDamaged, Retryable, Undeliverable, UnsupportedEvent
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.pipeline.blocked_keys import COLUMNS, BlockedKeys, Keys, keys_of, waiting
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.pipeline.encode.messages import source_origin
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.processors.messages.envelope import EventOrigin, native_envelope
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.state.records import CheckpointRow, NewDeadLetter, SegmentRow

LOOK_SECONDS = 1.0
"""Seconds between two checks of a queue that has entries."""

_MAX_AT_ONCE = 1_000
"""The maximum number of entries in one file and one transaction."""

WAITING = "waiting"
"""The error kind of an entry that only waits behind another dead letter of its key."""

_LARGE_COLUMNS = ("before", "after", "ddl")

_CURSOR_COLUMNS = ("file", "pos", "row", "tx_id")


class QueueFull(Retryable):
    """The queue has no room for a change that must be set aside; the sink waits for room.

    Attributes:
        ordinal: The change's ordinal in its segment.
    """

    kind = "backpressure"

    def __init__(self, message: str, ordinal: int) -> None:
        super().__init__(message)
        self.ordinal = ordinal


@dataclass(frozen=True, slots=True)
class _KeyRows:
    """Consecutive rows of a segment, with the columns from which their keys are derived."""

    segment: int
    rows: pa.RecordBatch

    @property
    def first(self) -> int:
        """The first ordinal."""
        return cast("int", self.rows.column("ordinal")[0].as_py())

    def covers(self, segment: int, first: int, last: int) -> bool:
        """Return whether these rows include the ordinals `first` to `last` of a segment."""
        begin = self.first
        return segment == self.segment and begin <= first and last < begin + self.rows.num_rows


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A change that goes to the queue, and why; only its entry shows `detail`."""

    ordinal: int
    kind: str
    message: str
    detail: str = ""


class DeadLetterWriter:
    """Sets changes of one sink aside, and filters out later changes that must wait behind them.

    Args:
        context: The sink.
    """

    def __init__(self, context: DeliveryContext) -> None:
        run, spec = context.run, context.spec
        self._pipeline = run.lease.pipeline
        self._origin = source_origin(spec)
        self._options = spec.spec.journal
        self._hold_key = spec.spec.engine.dlq.hold_key
        self._sink_id = context.sink_id
        self._store = run.store
        self._journal = run.journal
        self._lease = run.lease
        self._warn = run.warn
        self._blocked = BlockedKeys()
        self._ahead: dict[int, set[int]] = {}
        self._queue_state: tuple[int, int, int] | None = None
        self._changed = True
        self._entries = 0
        self._looked_at = 0.0
        self._key_rows: _KeyRows | None = None

    @property
    def enabled(self) -> bool:
        """Whether undeliverable changes are set aside; otherwise they stop the sink."""
        return self._options.enabled

    def poll(self, checkpoint: CheckpointRow) -> None:
        """Read the queue again if it has changed.

        The queue says which keys are blocked, and which entries the checkpoint has not passed.

        After its checkpoint was moved back, a sink reaches changes again that are already in the
        queue; they stay there. Only this deliverer adds entries. An entry that is removed elsewhere
        holds its key for up to `LOOK_SECONDS` longer.
        """
        now = time.monotonic()
        if not self._changed and (not self._entries or now - self._looked_at < LOOK_SECONDS):
            return
        state = self._store.dead_letters.state(self._pipeline, self._sink_id)
        self._looked_at, self._entries, self._changed = now, state[0], False
        if state == self._queue_state:
            return
        letters = self._store.dead_letters.places(self._pipeline, self._sink_id) if state[0] else []
        self._blocked = BlockedKeys(letters)
        self._ahead = {}
        reached = (checkpoint.segment, checkpoint.ordinal)
        for letter in letters:
            if (letter.segment, letter.ordinal) > reached:
                self._ahead.setdefault(letter.segment, set()).add(letter.ordinal)
        at = checkpoint
        self._lease.write(
            lambda writer: writer.undelivered.forget_behind(
                self._sink_id, at.segment, at.ordinal, complete=at.complete
            )
        )
        self._queue_state = state

    def passing(self, row: SegmentRow, batches: Iterable[SinkBatch]) -> Iterator[SinkBatch]:
        """Yield a segment's batches without the changes that are set aside, after queueing these.

        Raises:
            QueueFull: There is no room for a change; everything before it was yielded.
        """
        for whole in batches:
            batch = self._left_in_queue(whole)
            ahead = self._ahead.get(row.segment, set())
            refused = [
                _Refusal(error.ordinal, error.cause, str(error))
                for error in whole.refused
                if error.ordinal not in ahead
            ]
            aside = self._aside(row, batch, refused)
            stop = None
            if aside:
                done = self._put(row, aside)
                stop = aside[done].ordinal if done < len(aside) else None
                batch = _without(batch, [refusal.ordinal for refusal in aside], stop)
            if batch.messages.num_rows:
                yield replace(batch, refused=()) if batch.refused else batch
            if stop is not None:
                raise self._full(row, stop)

    def refuse(self, row: SegmentRow, error: Undeliverable | QueueFull) -> None:
        """Set aside a change that the sink has refused.

        Raises:
            Undeliverable: This pipeline sets no changes aside; the message says how to enable that.
            QueueFull: The queue has no room for the change.
        """
        if isinstance(error, QueueFull):
            raise error
        if not self.enabled:
            location = f"segment {row.segment}, ordinal {error.ordinal}"
            where = "" if location in str(error) else f" (the event at {location})"
            raise Undeliverable(
                f"{error}{where}; it stops the sink: to put such changes aside and let the others "
                "pass, set spec.journal.enabled: true",
                error.ordinal,
                error.cause,
            ) from error
        if not self._put(row, [_Refusal(error.ordinal, error.cause, str(error), error.detail)]):
            raise self._full(row, error.ordinal)

    def _left_in_queue(self, batch: SinkBatch) -> SinkBatch:
        """Return a batch without the changes that are in the queue already."""
        ahead = self._ahead.get(batch.segment)
        return batch if ahead is None else _without(batch, sorted(ahead), None)

    def _aside(
        self, row: SegmentRow, batch: SinkBatch, refused: Sequence[_Refusal]
    ) -> list[_Refusal]:
        """Return the changes to set aside now, in order.

        They are the refused ones, and those that wait behind blocked keys.
        """
        numbers = np.array([refusal.ordinal for refusal in refused], np.int64)
        if self._hold_key and refused:
            for keys, refusal in zip(self._keys(row, numbers), refused, strict=True):
                if keys.some:
                    self._blocked.hold((row.segment, refusal.ordinal), keys)
        if not self._blocked or not batch.messages.num_rows:
            return list(refused)
        ordinals = np.unique(np.concatenate([_ordinals(batch), numbers]))
        behind = waiting(self._blocked, row.segment, self._columns(row, ordinals))
        text = "an earlier change of its key is a dead letter"
        aside = {refusal.ordinal: refusal for refusal in refused}
        for ordinal in ordinals[behind].tolist():
            aside.setdefault(ordinal, _Refusal(ordinal, WAITING, text))
        return [aside[ordinal] for ordinal in sorted(aside)]

    def _keys(self, row: SegmentRow, ordinals: npt.NDArray[np.int64]) -> list[Keys]:
        return keys_of(self._columns(row, ordinals), range(len(ordinals)))

    def _columns(self, row: SegmentRow, ordinals: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return the columns that the keys of some changes are derived from.

        A batch's file is read once.
        """
        first, last = int(ordinals[0]), int(ordinals[-1])
        if self._key_rows is None or not self._key_rows.covers(row.segment, first, last):
            batches = self._journal.share(
                row.path, COLUMNS, ordinals=range(first, last + 1), part=0, of=1
            )
            self._key_rows = _KeyRows(row.segment, _joined(batches))
        return self._key_rows.rows.take(pa.array(ordinals - self._key_rows.first, pa.int64()))

    def _put(self, row: SegmentRow, refused: Sequence[_Refusal]) -> int:
        """Put changes into the queue; return how many of them, from the first on, had room."""
        done = 0
        while done < len(refused):
            chunk = refused[done : done + _MAX_AT_ONCE]
            letters = self._letters(row, chunk)
            stored = self._lease.write(
                lambda writer, letters=letters: writer.dead_letters.add(  # type: ignore[misc]
                    self._sink_id,
                    letters,
                    max_entries=self._options.dlq.max_entries,
                    overflow=self._options.dlq.overflow_policy,
                )
            )
            for letter in letters[:stored]:
                if letter.holds:
                    self._blocked.hold((letter.segment, letter.ordinal), _keys_of_letter(letter))
            failpoint("dead-letter-written")
            self._queue_state, self._changed = None, True
            done += stored
            if stored < len(chunk):
                break
        self._log(row, refused[:done])
        return done

    def _letters(self, row: SegmentRow, refused: Sequence[_Refusal]) -> list[NewDeadLetter]:
        """Write changes to a durable file; return their entries, which are not stored yet."""
        changes = self._changes(row, [refusal.ordinal for refusal in refused], FRAME.names)
        writer = self._journal.dead_writer(self._pipeline, self._lease.epoch)
        try:
            for change in changes.to_pylist():
                writer.write(orjson.dumps(change))
            checksum, _ = writer.close()
        except BaseException:
            writer.abort()
            raise
        failpoint("dead-letter-file-written")
        keys = keys_of(changes, range(changes.num_rows))
        shown = views(self._origin, changes, self._options.max_event_bytes)
        ids = changes.column("event_id").to_pylist()
        return [
            NewDeadLetter(
                event_id=cast("str", ids[index]),
                segment=row.segment,
                ordinal=refusal.ordinal,
                state="waiting" if refusal.kind == WAITING else "dead",
                error_kind=refusal.kind,
                error_message=f"{refusal.message}{refusal.detail}",
                table_name=keys[index].table,
                row_key=keys[index].row,
                old_key=keys[index].old,
                holds=keys[index].some and (self._hold_key or refusal.kind == WAITING),
                source_cursor=shown[index].cursor,
                event=shown[index].event,
                payload_truncated=shown[index].truncated,
                path=writer.path,
                checksum=checksum,
                place=index,
            )
            for index, refusal in enumerate(refused)
        ]

    def _changes(
        self, row: SegmentRow, ordinals: Sequence[int], columns: Sequence[str]
    ) -> pa.RecordBatch:
        """Return some changes of a segment, in order."""
        wanted = pa.array(ordinals, pa.int64())
        span = range(ordinals[0], ordinals[-1] + 1)
        batches = [
            batch.filter(pc.is_in(batch.column("ordinal"), value_set=wanted))
            for batch in self._journal.share(row.path, columns, ordinals=span, part=0, of=1)
        ]
        changes = _joined(batches)
        if changes.num_rows != len(ordinals):
            raise JournalDamaged(f"segment {row.segment}: its journal file lacks rows")
        return changes

    def _full(self, row: SegmentRow, ordinal: int) -> QueueFull:
        return QueueFull(
            f"sink {self._sink_id}: the dead letters of {self._pipeline} are full "
            f"({self._options.dlq.max_entries} entries), so the change at segment {row.segment}, "
            f"ordinal {ordinal} has to wait; deltaforge dlq redrive or ack {self._pipeline} makes "
            "room, or raise spec.journal.dlq.max_entries",
            ordinal,
        )

    def _log(self, row: SegmentRow, done: Sequence[_Refusal]) -> None:
        dead = [refusal for refusal in done if refusal.kind != WAITING]
        if dead:
            more = f" ({len(dead)} changes like it)" if len(dead) > 1 else ""
            self._warn(
                f"sink {self._sink_id}: the change at segment {row.segment}, ordinal "
                f"{dead[0].ordinal} is a dead letter now{more}: {dead[0].message}"
            )


def _joined(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """Return consecutive batches of a segment as one."""
    (rows,) = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()
    return rows


def _keys_of_letter(letter: NewDeadLetter) -> Keys:
    return Keys(letter.table_name, letter.row_key, letter.old_key, letter.row_key is None)


def _ordinals(batch: SinkBatch) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = batch.messages.column("ordinal").to_numpy()
    return numbers


def _without(batch: SinkBatch, ordinals: Sequence[int], stop: int | None) -> SinkBatch:
    """Return a batch without the changes at `ordinals`, and without those from `stop` on."""
    numbers = _ordinals(batch)
    left = ~np.isin(numbers, ordinals)
    if stop is not None:
        left &= numbers < stop
    return replace(
        batch, refused=(), messages=batch.messages.take(pa.array(np.flatnonzero(left), pa.int64()))
    )


@dataclass(frozen=True, slots=True)
class View:
    """What is shown of one change.

    Attributes:
        event: The native event, JSON text.
        truncated: Whether the row images were too large, and were left out.
        cursor: Its place in the source's log, a JSON object as text.
    """

    event: str
    truncated: bool
    cursor: str


def views(origin: EventOrigin, changes: pa.RecordBatch, max_event_bytes: int) -> list[View]:
    """Return what is shown of each change.

    Args:
        origin: Where the events come from.
        changes: Rows of the change frame.
        max_event_bytes: A larger event shows a note instead of each of its row images.
    """
    return [
        _view(origin, changes.slice(index, 1), max_event_bytes) for index in range(changes.num_rows)
    ]


def _view(origin: EventOrigin, change: pa.RecordBatch, limit: int) -> View:
    cursor = _cursor(change)
    if sum(change.column(name).nbytes for name in _LARGE_COLUMNS) <= limit:
        event = _event(origin, change)
        if event is not None and len(event.encode()) <= limit:
            return View(event, False, cursor)
    (row,) = change.to_pylist()
    note = f'"<truncated: original payload exceeded {limit} bytes>"'
    row |= {name: note for name in _LARGE_COLUMNS if row[name] is not None}
    short = pa.RecordBatch.from_pylist([row], schema=change.schema)
    return View(_event(origin, short) or "{}", True, cursor)


def _cursor(change: pa.RecordBatch) -> str:
    row: dict[str, Any] = {name: change.column(name)[0].as_py() for name in _CURSOR_COLUMNS}
    cursor = (
        {"file": row["file"], "pos": row["pos"], "gtid": row["tx_id"]}
        if row["file"] is not None
        else {"lsn": None if row["pos"] is None else format_lsn(row["pos"]), "tx_id": row["tx_id"]}
    )
    return orjson.dumps(cursor | {"row": row["row"]}).decode()


def _event(origin: EventOrigin, change: pa.RecordBatch) -> str | None:
    """Return the native event; None when it cannot become text."""
    try:
        return native_envelope(origin, change)[0].as_py()
    except UnsupportedEvent:
        return None
