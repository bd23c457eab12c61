"""Dead letters: changes that can never be delivered to a sink as they are, kept until a user acts.

An entry is in one of three states:

=============  ====================================================================================
`dead`         the change was refused permanently; a user decides (`redrive`, `ack`)
`redrive`      a user has requested a new delivery, which the sink's deliverer will make
`waiting`      the change is deliverable, but an earlier change of its key is in the queue
=============  ====================================================================================

An entry is removed when it is delivered, acknowledged, or dropped by the queue's limits. There is
at most one entry per sink and event, however often the event is refused, so adding an entry again
does nothing. All entries of a pipeline share one queue and its limits; entries lost to the limits
are counted in the namespace `journal` of the key-value store.

A run's writes are fenced, like its checkpoints; users' actions lock the lease row.

Changes that left the queue, or never entered it, without being delivered are recorded
(`UndeliveredRepository`), since checkpoints pass such changes, so they would look delivered. A
record holds the fate of changes by their ordinals in a segment, and is deleted with that segment.
It is also deleted when the checkpoint of the sink is set back, because the sink gets the changes
again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal, TypeVar

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)

from deltaforge_dagster.state import metrics
from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import dead_letters, read_rows, segments, undelivered
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.metric_families import DLQ_EVENTS, SINK_ROUTING_ERRORS
from deltaforge_dagster.state.records import DeadLetterDepth, DeadLetterRow, NewDeadLetter

Fate = Literal["acknowledged", "evicted", "expired", "rejected"]
"""Whether a user gave the change up (`acknowledged`), or the queue's limits did.

For the latter see `records.DeadLetterDepth`.
"""


Overflow = Literal["drop_oldest", "reject", "block"]

T = TypeVar("T")

_NAMESPACE = "journal"
_ERROR_LENGTH = 2000
_AT_ONCE = 500
"""Number of values in one condition, and of segments in one statement, for any database."""


class DeadLetterRepository:
    """The dead letter queues of all pipelines: `StateStore.dead_letters`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(
        self,
        name: str,
        *,
        sink: str | None = None,
        error_kind: str | None = None,
        seqs: Collection[int] | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[DeadLetterRow]:
        """Return entries of a pipeline's queue, oldest first.

        Args:
            name: The pipeline.
            sink: Only entries of this sink.
            error_kind: Only entries of this kind.
            seqs: Only entries with these numbers.
            after: Only entries with a higher number.
            limit: Maximum number of entries.
        """
        where = [dead_letters.c.pipeline == name, dead_letters.c.seq > after]
        if sink is not None:
            where.append(dead_letters.c.sink == sink)
        if error_kind is not None:
            where.append(dead_letters.c.error_kind == error_kind)
        with self._database.read() as connection:
            if seqs is None:
                return read_rows(
                    connection, DeadLetterRow, *where, order=dead_letters.c.seq, limit=limit
                )
            letters = [
                row
                for portion in _portions(sorted(seqs))
                for row in read_rows(
                    connection,
                    DeadLetterRow,
                    *where,
                    dead_letters.c.seq.in_(portion),
                    order=dead_letters.c.seq,
                )
            ]
            return letters[:limit]

    def places(self, name: str, sink: str) -> list[DeadLetterRow]:
        """Return the entries of a sink in the order of the journal, with an empty `event`."""
        columns = [column for column in dead_letters.c if column.name not in {"pipeline", "event"}]
        query = (
            select(*columns, literal("").label("event"))
            .where(dead_letters.c.pipeline == name, dead_letters.c.sink == sink)
            .order_by(dead_letters.c.segment, dead_letters.c.ordinal)
        )
        with self._database.read() as connection:
            return [DeadLetterRow(**row) for row in connection.execute(query).mappings()]

    def state(self, name: str, sink: str) -> tuple[int, int, int]:
        """Return values that change whenever a sink's entries do; the first is their number."""
        dead = case((dead_letters.c.state == "dead", 1), else_=0)
        query = select(func.count(), func.sum(dead), func.max(dead_letters.c.seq)).where(
            dead_letters.c.pipeline == name, dead_letters.c.sink == sink
        )
        with self._database.read() as connection:
            entries, dead_entries, last = connection.execute(query).one()
            return entries, int(dead_entries or 0), last or 0

    def depth(self, name: str) -> DeadLetterDepth:
        """Return the size of a pipeline's queue, and how many entries were lost to its limits."""
        dead = case((dead_letters.c.state == "dead", 1), else_=0)
        query = select(func.count(), func.sum(dead), func.min(dead_letters.c.created_at)).where(
            dead_letters.c.pipeline == name
        )
        with self._database.read() as connection:
            entries, dead_entries, oldest = connection.execute(query).one()
            counts = _counts(connection, name)
            return DeadLetterDepth(
                entries=entries,
                dead=int(dead_entries or 0),
                oldest=oldest,
                evicted=counts.get("evicted", 0),
                rejected=counts.get("rejected", 0),
                expired=counts.get("expired", 0),
            )

    def files(self, name: str) -> set[str]:
        """Return the files of the journal that entries refer to."""
        query = select(dead_letters.c.path).where(dead_letters.c.pipeline == name).distinct()
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    def redrive(
        self, name: str, *, sink: str | None = None, seqs: Collection[int] | None = None
    ) -> int:
        """Request a new delivery of all dead entries or of these; return how many there are.

        The sink's deliverer sends them, in the current live run or in the next one.
        """
        with self._database.write() as connection:
            lock_lease(connection, name)
            return connection.execute(
                update(dead_letters)
                .where(
                    dead_letters.c.pipeline == name,
                    dead_letters.c.state == "dead",
                    _matching(sink=sink, seqs=seqs),
                )
                .values(state="redrive")
            ).rowcount

    def remove(
        self,
        name: str,
        *,
        sink: str | None = None,
        seqs: Collection[int] | None = None,
        up_to: int | None = None,
    ) -> int:
        """Remove entries permanently without delivering them; return how many there were.

        Changes that wait only for these entries are then delivered.

        Args:
            name: The pipeline.
            sink: Only entries of this sink.
            seqs: Only entries with these numbers.
            up_to: Only entries with this number or a lower one.
        """
        with self._database.write() as connection:
            lock_lease(connection, name)
            condition = _matching(sink=sink, seqs=seqs, up_to=up_to)
            return _give_up(connection, name, "acknowledged", condition)

    def expire(self, name: str, older_than: float) -> int:
        """Drop and count the dead entries older than this many seconds; return their number."""
        with self._database.write() as connection:
            lock_lease(connection, name)
            return _expire(connection, name, older_than)


class DeadLetterWrites:
    """Fills and empties the queue of a lease holder: `FencedWriter.dead_letters`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def add(
        self, sink: str, letters: Sequence[NewDeadLetter], *, max_entries: int, overflow: Overflow
    ) -> int:
        """Add letters to the queue, in order; their file must be durable.

        Existing entries are kept.

        Returns:
            The number of `letters`, from the first on, that are settled. With `block`, there was no
            room for the next one; with the other policies all letters are settled, and evicted or
            rejected ones are counted. A letter that only waits for others is never rejected.
        """
        stored = _existing_events(
            self._connection, self._pipeline, sink, [letter.event_id for letter in letters]
        )
        room = max_entries - _entries(self._connection, self._pipeline)
        done = 0
        rejected: list[tuple[str, int, int]] = []
        tally = metrics.Tally()
        for letter in letters:
            if letter.event_id not in stored:
                if room <= 0 and overflow == "block":
                    break
                if room <= 0 and overflow == "reject" and letter.state != "waiting":
                    rejected.append((sink, letter.segment, letter.ordinal))
                else:
                    _insert(self._connection, self._pipeline, sink, letter)
                    tally.add(DLQ_EVENTS, sink=sink, error_kind=letter.error_kind)
                    if letter.state != "waiting":
                        tally.add(SINK_ROUTING_ERRORS, sink=sink, kind=letter.error_kind)
                    stored.add(letter.event_id)
                    room -= 1
            done += 1
        # `room` is also negative if the limit was lowered, which by itself evicts nothing.
        evicted = (
            _evict(self._connection, self._pipeline, -room)
            if room < 0 and overflow == "drop_oldest"
            else 0
        )
        note_undelivered(self._connection, self._pipeline, "rejected", rejected)
        _count(self._connection, self._pipeline, evicted=evicted, rejected=len(rejected))
        metrics.count(self._connection, self._pipeline, tally)
        return done

    def begin_redrive(self, attempt: str, seqs: Mapping[int, int]) -> None:
        """Assign tokens to entries, by their index in a redrive attempt, before any is sent."""
        for index, seq in seqs.items():
            self._connection.execute(
                update(dead_letters)
                .where(dead_letters.c.pipeline == self._pipeline, dead_letters.c.seq == seq)
                .values(token=token_of(attempt, index))
            )

    def redriven(self, seqs: Collection[int]) -> None:
        """Remove entries that have been delivered."""
        self._delivered(_matching(seqs=seqs))

    def redriven_up_to(self, token: str) -> int:
        """Remove the entries of an attempt up to the token stored in the sink; return how many."""
        first = token_of(token.rpartition(":")[0], 0)
        return self._delivered(dead_letters.c.token.between(first, token))

    def redrive_failed(self, seq: int, kind: str, message: str) -> None:
        """Record that an entry was refused again, and why; it is `dead` and waits for a user."""
        self._connection.execute(
            update(dead_letters)
            .where(dead_letters.c.pipeline == self._pipeline, dead_letters.c.seq == seq)
            .values(
                state="dead",
                error_kind=kind,
                error_message=message[:_ERROR_LENGTH],
                attempts=dead_letters.c.attempts + 1,
            )
        )

    def expire(self, older_than: float) -> int:
        """Drop and count the dead entries older than this many seconds; return their number."""
        return _expire(self._connection, self._pipeline, older_than)

    def _delivered(self, condition: ColumnElement[bool]) -> int:
        return self._connection.execute(
            delete(dead_letters).where(dead_letters.c.pipeline == self._pipeline, condition)
        ).rowcount


class UndeliveredRepository:
    """The undelivered changes of all pipelines: `StateStore.undelivered`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str, segment: int) -> Mapping[str, Mapping[Fate, list[range]]]:
        """Return, by sink and fate, the ordinals of a segment that the sink never received.

        These changes left the queue undelivered, or found no room in it.
        """
        with self._database.read() as connection:
            return _undelivered_of(connection, name, segment)


class UndeliveredWrites:
    """Forgets undelivered changes that a lease holder sends again: `FencedWriter.undelivered`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def forget_behind(self, sink: str, segment: int, ordinal: int, *, complete: bool) -> None:
        """Delete the records of changes after a checkpoint, because the sink will get these again.

        Args:
            sink: The sink.
            segment: Segment of the checkpoint.
            ordinal: The last row of this segment that the checkpoint has passed.
            complete: Whether the checkpoint has passed the whole segment.
        """
        of_sink = (undelivered.c.pipeline == self._pipeline) & (undelivered.c.sink == sink)
        kept = (
            {}
            if complete
            else _undelivered_of(self._connection, self._pipeline, segment).get(sink, {})
        )
        last = segment if complete else segment - 1
        self._connection.execute(delete(undelivered).where(of_sink, undelivered.c.segment > last))
        for fate, runs in kept.items():
            passed = [number for run in runs for number in run if number <= ordinal]
            note_undelivered(
                self._connection,
                self._pipeline,
                fate,
                [(sink, segment, number) for number in passed],
            )


def entry_json(pipeline: str, row: DeadLetterRow) -> bytes:
    """Return an entry in the format for programs: a JSON object with DeltaForge's field names."""
    return orjson.dumps(
        {
            "seq": row.seq,
            "timestamp": int(row.created_at),
            "pipeline": pipeline,
            "stream": "dlq",
            "event_id": row.event_id,
            "source_cursor": orjson.Fragment(row.source_cursor),
            "event": orjson.Fragment(row.event),
            "payload_truncated": row.payload_truncated,
            "state": row.state,
            "segment": row.segment,
            "ordinal": row.ordinal,
            "meta": {
                "sink_id": row.sink,
                "error_kind": row.error_kind,
                "error_message": row.error_message,
                "attempts": row.attempts,
            },
        }
    )


def token_of(attempt: str, index: int) -> str:
    """Return the token of an entry, which sorts by its index in the attempt."""
    return f"{attempt}:{index:06d}"


def note_undelivered(
    connection: Connection, pipeline: str, fate: Fate, places: Iterable[tuple[str, int, int]]
) -> None:
    """Record the fate of changes, given as (sink, segment, ordinal), whose segments still exist."""
    grouped: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for sink, segment, ordinal in places:
        grouped[sink, segment].append(ordinal)
    wanted = sorted({segment for _, segment in grouped})
    for start in range(0, len(wanted), _AT_ONCE):
        portion = wanted[start : start + _AT_ONCE]
        kept = set(
            connection.execute(
                select(segments.c.segment).where(
                    segments.c.pipeline == pipeline, segments.c.segment.in_(portion)
                )
            ).scalars()
        )
        query = select(undelivered.c.sink, undelivered.c.segment, undelivered.c.ordinals).where(
            undelivered.c.pipeline == pipeline,
            undelivered.c.fate == fate,
            undelivered.c.segment.in_(portion),
        )
        stored = {(sink, segment): runs for sink, segment, runs in connection.execute(query)}
        rows = [
            {
                "pipeline": pipeline,
                "sink": sink,
                "segment": segment,
                "fate": fate,
                "ordinals": _joined(stored.get((sink, segment), []), ordinals),
            }
            for (sink, segment), ordinals in grouped.items()
            if segment in kept
        ]
        if rows:
            insert = upsert(connection, undelivered)
            connection.execute(
                insert.on_conflict_do_update(
                    index_elements=["pipeline", "sink", "segment", "fate"],
                    set_={"ordinals": insert.excluded.ordinals},
                ),
                rows,
            )


def _matching(
    *, sink: str | None = None, seqs: Collection[int] | None = None, up_to: int | None = None
) -> ColumnElement[bool]:
    """Return the SQL condition that selects these entries; without arguments, all entries."""
    chosen = [dead_letters.c.seq > 0]
    if sink is not None:
        chosen.append(dead_letters.c.sink == sink)
    if seqs is not None:
        chosen.append(dead_letters.c.seq.in_(sorted(seqs)))
    if up_to is not None:
        chosen.append(dead_letters.c.seq <= up_to)
    return and_(*chosen)


def _give_up(
    connection: Connection, pipeline: str, fate: Fate, *conditions: ColumnElement[bool]
) -> int:
    """Remove entries that will never be delivered and record their fate; return how many."""
    columns = (dead_letters.c.sink, dead_letters.c.segment, dead_letters.c.ordinal)
    gone = connection.execute(
        delete(dead_letters)
        .where(dead_letters.c.pipeline == pipeline, *conditions)
        .returning(*columns)
    )
    places = [(sink, segment, ordinal) for sink, segment, ordinal in gone]
    note_undelivered(connection, pipeline, fate, places)
    return len(places)


def _expire(connection: Connection, pipeline: str, older_than: float) -> int:
    """Drop the dead entries older than this many seconds; count them and return their number."""
    gone = _give_up(
        connection,
        pipeline,
        "expired",
        dead_letters.c.state == "dead",
        dead_letters.c.created_at < clock() - older_than,
    )
    _count(connection, pipeline, expired=gone)
    return gone


def _insert(connection: Connection, pipeline: str, sink: str, letter: NewDeadLetter) -> None:
    fields = asdict(letter) | {"error_message": letter.error_message[:_ERROR_LENGTH]}
    connection.execute(
        insert(dead_letters).values(
            pipeline=pipeline,
            sink=sink,
            attempts=0 if letter.state == "waiting" else 1,
            created_at=clock(),
            **fields,
        )
    )


def _evict(connection: Connection, pipeline: str, count: int) -> int:
    """Drop the oldest entries; `waiting` ones only if there are no others."""
    waits = case((dead_letters.c.state == "waiting", 1), else_=0)
    oldest = (
        select(dead_letters.c.seq)
        .where(dead_letters.c.pipeline == pipeline)
        .order_by(waits, dead_letters.c.seq)
        .limit(count)
    )
    return _give_up(connection, pipeline, "evicted", dead_letters.c.seq.in_(oldest))


def _existing_events(
    connection: Connection, pipeline: str, sink: str, events: Sequence[str]
) -> set[str]:
    event_ids: set[str] = set()
    for portion in _portions(events):
        query = select(dead_letters.c.event_id).where(
            dead_letters.c.pipeline == pipeline,
            dead_letters.c.sink == sink,
            dead_letters.c.event_id.in_(portion),
        )
        event_ids.update(connection.execute(query).scalars())
    return event_ids


def _entries(connection: Connection, pipeline: str) -> int:
    query = select(func.count()).where(dead_letters.c.pipeline == pipeline)
    return int(connection.execute(query).scalar_one())


def _portions(values: Sequence[T]) -> list[Sequence[T]]:
    return [values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE)]


def _counts(connection: Connection, pipeline: str) -> dict[str, int]:
    stored = get_value(connection, _NAMESPACE, f"{pipeline}:dlq")
    return {} if stored is None else dict(orjson.loads(stored))


def _count(connection: Connection, pipeline: str, **more: int) -> None:
    if not any(more.values()):
        return
    counts = _counts(connection, pipeline)
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
    put_value(connection, _NAMESPACE, f"{pipeline}:dlq", orjson.dumps(counts))


def _undelivered_of(
    connection: Connection, pipeline: str, segment: int
) -> Mapping[str, Mapping[Fate, list[range]]]:
    query = select(undelivered.c.sink, undelivered.c.fate, undelivered.c.ordinals).where(
        undelivered.c.pipeline == pipeline, undelivered.c.segment == segment
    )
    fates: defaultdict[str, dict[Fate, list[range]]] = defaultdict(dict)
    for sink, fate, runs in connection.execute(query):
        fates[sink][fate] = [range(first, last + 1) for first, last in runs]
    return fates


def _joined(runs: Iterable[list[int]], more: Iterable[int]) -> list[list[int]]:
    """Add ordinals to runs, given as [first, last]; return the merged runs in order."""
    joined: list[list[int]] = []
    for first, last in sorted([*runs, *([ordinal, ordinal] for ordinal in more)]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined
