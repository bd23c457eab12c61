"""Dead letters: changes that a sink can never be given as they are, kept until somebody acts.

An entry is in one of three states:

=============  ====================================================================================
`dead`         the change was refused for good; a person decides (`redrive`, `ack`)
`redrive`      somebody has asked to deliver it again: the sink's deliverer will
`waiting`      nothing is wrong with it, but an earlier change of its key is in the queue
=============  ====================================================================================

An entry goes when it was delivered, acknowledged, or dropped by the queue's limits. There is one entry
for a sink and an event, however often the event is refused, so writing an entry again does nothing.
All entries of a pipeline share one queue and its limits; what the limits have cost is counted, in the
namespace `journal` of the key-value store. What left without being delivered is noted (`undelivered`).

What is written by a run is fenced, like its checkpoints; what people do takes the lock of the lease.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

from deltaforge_dagster.state import metrics, undelivered
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.metric_families import DLQ_EVENTS, SINK_ROUTING_ERRORS
from deltaforge_dagster.state.primitives import get_value, put_value
from deltaforge_dagster.state.records import DeadLetterDepth, DeadLetterRow, NewDeadLetter
from deltaforge_dagster.state.rows import read_rows
from deltaforge_dagster.state.tables import dead_letters

Overflow = Literal["drop_oldest", "reject", "block"]

T = TypeVar("T")

_NAMESPACE = "journal"
_ERROR_LENGTH = 2000
_AT_ONCE = 500
"""Values in one condition: every database takes that many."""


def add(
    connection: Connection,
    pipeline: str,
    sink: str,
    letters: Sequence[NewDeadLetter],
    *,
    max_entries: int,
    overflow: Overflow,
) -> int:
    """Put letters into the queue, in order; those that are there already stay as they are.

    Returns:
        How many of `letters`, from the first on, are done with. With `block` the first one after them
        found no room; with the other policies all are done with, and what they cost is counted. Nothing
        is wrong with a letter that waits for others: it is never rejected.
    """
    known = _known(connection, pipeline, sink, [one.event_id for one in letters])
    room = max_entries - _entries(connection, pipeline)
    done = 0
    rejected: list[tuple[str, int, int]] = []
    tally = metrics.Tally()
    for letter in letters:
        if letter.event_id not in known:
            if room <= 0 and overflow == "block":
                break
            if room <= 0 and overflow == "reject" and letter.state != "waiting":
                rejected.append((sink, letter.segment, letter.ordinal))
            else:
                _insert(connection, pipeline, sink, letter)
                tally.add(DLQ_EVENTS, sink=sink, error_kind=letter.error_kind)
                if letter.state != "waiting":
                    tally.add(SINK_ROUTING_ERRORS, sink=sink, kind=letter.error_kind)
                known.add(letter.event_id)
                room -= 1
        done += 1
    # Below zero also where the limit was lowered, which costs nothing by itself.
    evicted = _evict(connection, pipeline, -room) if room < 0 and overflow == "drop_oldest" else 0
    undelivered.note(connection, pipeline, "rejected", rejected)
    _count(connection, pipeline, evicted=evicted, rejected=len(rejected))
    metrics.count(connection, pipeline, tally)
    return done


def read(
    connection: Connection,
    pipeline: str,
    *,
    sink: str | None = None,
    error_kind: str | None = None,
    seqs: Collection[int] | None = None,
    after: int = 0,
    limit: int | None = None,
) -> list[DeadLetterRow]:
    """Return entries, the oldest first: those that fulfil every condition given."""
    where = [dead_letters.c.pipeline == pipeline, dead_letters.c.seq > after]
    if sink is not None:
        where.append(dead_letters.c.sink == sink)
    if error_kind is not None:
        where.append(dead_letters.c.error_kind == error_kind)
    if seqs is None:
        return read_rows(connection, DeadLetterRow, *where, order=dead_letters.c.seq, limit=limit)
    found = [
        row
        for some in _portions(sorted(seqs))
        for row in read_rows(
            connection,
            DeadLetterRow,
            *where,
            dead_letters.c.seq.in_(some),
            order=dead_letters.c.seq,
        )
    ]
    return found[:limit]


def entry_json(pipeline: str, row: DeadLetterRow) -> bytes:
    """Return an entry as programs read it, a JSON object in DeltaForge's words."""
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


def places(connection: Connection, pipeline: str, sink: str) -> list[DeadLetterRow]:
    """Return the entries of a sink in the order of the journal, without their events."""
    columns = [column for column in dead_letters.c if column.name not in {"pipeline", "event"}]
    query = (
        select(*columns, literal("").label("event"))
        .where(dead_letters.c.pipeline == pipeline, dead_letters.c.sink == sink)
        .order_by(dead_letters.c.segment, dead_letters.c.ordinal)
    )
    return [DeadLetterRow(**row) for row in connection.execute(query).mappings()]


def depth(connection: Connection, pipeline: str) -> DeadLetterDepth:
    """Return how full a pipeline's queue is."""
    dead = case((dead_letters.c.state == "dead", 1), else_=0)
    query = select(func.count(), func.sum(dead), func.min(dead_letters.c.created_at)).where(
        dead_letters.c.pipeline == pipeline
    )
    entries, of_these, oldest = connection.execute(query).one()
    counts = _counts(connection, pipeline)
    return DeadLetterDepth(
        entries=entries,
        dead=int(of_these or 0),
        oldest=oldest,
        evicted=counts.get("evicted", 0),
        rejected=counts.get("rejected", 0),
        expired=counts.get("expired", 0),
    )


def state_of(connection: Connection, pipeline: str, sink: str) -> tuple[int, int, int]:
    """Return what changes whenever a sink's entries do: how many, how many are dead, the last one."""
    dead = case((dead_letters.c.state == "dead", 1), else_=0)
    query = select(func.count(), func.sum(dead), func.max(dead_letters.c.seq)).where(
        dead_letters.c.pipeline == pipeline, dead_letters.c.sink == sink
    )
    entries, of_these, last = connection.execute(query).one()
    return entries, int(of_these or 0), last or 0


def files(connection: Connection, pipeline: str) -> set[str]:
    """Return the files of the journal that entries need."""
    query = select(dead_letters.c.path).where(dead_letters.c.pipeline == pipeline).distinct()
    return set(connection.execute(query).scalars())


def redrive(connection: Connection, pipeline: str, *which: ColumnElement[bool]) -> int:
    """Ask for a new delivery of dead entries; return how many there are."""
    return connection.execute(
        update(dead_letters)
        .where(dead_letters.c.pipeline == pipeline, dead_letters.c.state == "dead", *which)
        .values(state="redrive")
    ).rowcount


def delivered(connection: Connection, pipeline: str, *which: ColumnElement[bool]) -> int:
    """Remove entries that have been delivered; return how many there were."""
    return connection.execute(
        delete(dead_letters).where(dead_letters.c.pipeline == pipeline, *which)
    ).rowcount


def give_up(
    connection: Connection, pipeline: str, fate: undelivered.Fate, *which: ColumnElement[bool]
) -> int:
    """Remove entries that are never delivered, and note that; return how many there were."""
    place = (dead_letters.c.sink, dead_letters.c.segment, dead_letters.c.ordinal)
    gone = connection.execute(
        delete(dead_letters).where(dead_letters.c.pipeline == pipeline, *which).returning(*place)
    )
    places = [(sink, segment, ordinal) for sink, segment, ordinal in gone]
    undelivered.note(connection, pipeline, fate, places)
    return len(places)


def these(
    *, sink: str | None = None, seqs: Collection[int] | None = None, up_to: int | None = None
) -> ColumnElement[bool]:
    """Return the condition that an entry is one of these; without a choice, of all."""
    chosen = [dead_letters.c.seq > 0]
    if sink is not None:
        chosen.append(dead_letters.c.sink == sink)
    if seqs is not None:
        chosen.append(dead_letters.c.seq.in_(sorted(seqs)))
    if up_to is not None:
        chosen.append(dead_letters.c.seq <= up_to)
    return and_(*chosen)


def token(attempt: str, place: int) -> str:
    """Return the token of an entry: the attempt, and its place in it; they sort by that."""
    return f"{attempt}:{place:06d}"


def begin_attempt(
    connection: Connection, pipeline: str, attempt: str, seqs: Mapping[int, int]
) -> None:
    """Give entries, by their place in an attempt, their tokens."""
    for place, seq in seqs.items():
        connection.execute(
            update(dead_letters)
            .where(dead_letters.c.pipeline == pipeline, dead_letters.c.seq == seq)
            .values(token=token(attempt, place))
        )


def arrived(connection: Connection, pipeline: str, last: str) -> int:
    """Remove the entries of an attempt up to the one whose token a sink holds."""
    first = token(last.rpartition(":")[0], 0)
    return delivered(connection, pipeline, dead_letters.c.token.between(first, last))


def failed(connection: Connection, pipeline: str, seq: int, kind: str, message: str) -> None:
    """Note that an entry was refused again."""
    connection.execute(
        update(dead_letters)
        .where(dead_letters.c.pipeline == pipeline, dead_letters.c.seq == seq)
        .values(
            state="dead",
            error_kind=kind,
            error_message=message[:_ERROR_LENGTH],
            attempts=dead_letters.c.attempts + 1,
        )
    )


def expire(connection: Connection, pipeline: str, older_than: float) -> int:
    """Drop the dead entries older than so many seconds, and count them."""
    gone = give_up(
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
    """Drop the oldest entries; those that wait for others only when there are no others."""
    waits = case((dead_letters.c.state == "waiting", 1), else_=0)
    oldest = (
        select(dead_letters.c.seq)
        .where(dead_letters.c.pipeline == pipeline)
        .order_by(waits, dead_letters.c.seq)
        .limit(count)
    )
    return give_up(connection, pipeline, "evicted", dead_letters.c.seq.in_(oldest))


def _known(connection: Connection, pipeline: str, sink: str, events: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for some in _portions(events):
        query = select(dead_letters.c.event_id).where(
            dead_letters.c.pipeline == pipeline,
            dead_letters.c.sink == sink,
            dead_letters.c.event_id.in_(some),
        )
        found.update(connection.execute(query).scalars())
    return found


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
