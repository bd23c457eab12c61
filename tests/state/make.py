"""Values and small situations that the state store's tests share."""

from __future__ import annotations

from sqlalchemy import update

from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.database.database import clock
from deltaforge_dagster.state.database.tables import leases
from deltaforge_dagster.state.records import Lease, NewDeadLetter, NewSegment
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema

NAME = "orders"


def position(number: int) -> str:
    """Return a position; later for a larger number."""
    return LsnPosition(number * 0x100, number).to_json()


def new_segment(number: int, **changes: object) -> NewSegment:
    """Return segment `number` with three changes of one table."""
    fields: dict[str, object] = {
        "segment": number,
        "segment_id": f"id-{number}",
        "path": f"{NAME}/{number}.parquet",
        "checksum": f"checksum-{number}",
        "content_hash": f"content-{number}",
        "rows": 3,
        "bytes": 100,
        "start_position": position(number - 1),
        "end_position": position(number),
        "counts": {"public.orders": {"c": 2, "u": 1}},
        "schema_versions": {"public.orders": "sha256:one"},
        "first_ts_us": number * 1000,
        "last_ts_us": number * 1000 + 2,
    }
    return NewSegment(**{**fields, **changes})  # type: ignore[arg-type]


def dead_letter(number: int, **changes: object) -> NewDeadLetter:
    """Return the dead letter of an event, which stands in segment 1 at that ordinal."""
    fields: dict[str, object] = {
        "event_id": f"event-{number}",
        "segment": 1,
        "ordinal": number,
        "state": "dead",
        "error_kind": "routing",
        "error_message": "nowhere to go",
        "table_name": "public.orders",
        "row_key": f'{{"id":{number}}}',
        "old_key": None,
        "holds": False,
        "source_cursor": "{}",
        "event": f'{{"after":{number}}}',
        "payload_truncated": False,
        "path": "orders/dead/1.arrow",
        "checksum": "sum",
        "place": number,
    }
    return NewDeadLetter(**{**fields, **changes})  # type: ignore[arg-type]


def table(*columns: str, name: str = "orders") -> TableSchema:
    """Return a table version with integer columns, the first one its primary key."""
    return TableSchema(
        db="shop",
        schema="public",
        table=name,
        columns=tuple(
            Column(column, "int4", 23, index > 0, index + 1) for index, column in enumerate(columns)
        ),
        primary_key=columns[:1],
    )


def held(store: StateStore, *sinks: str, run_id: str = "run-1", seconds: float = 60) -> Lease:
    """Register the pipeline with its sinks, fix its start, and take its lease."""
    store.pipelines.register(NAME, "spec-1", sinks or ("redis",))
    store.pipelines.set_start(NAME, position(0))
    lease = store.leases.acquire(NAME, run_id, seconds)
    assert lease is not None
    return lease


def expire(store: StateStore) -> None:
    """Let the lease's time be over, as after a long sleep of its holder."""
    with store.database.write() as connection:
        connection.execute(update(leases).values(expires_at=clock() - 0.001))


def capture(store: StateStore, lease: Lease, *numbers: int, close: bool = True) -> int:
    """Add segments as one new range and return the range's number."""
    with store.fenced(lease) as writer:
        number = writer.ranges.open(position(numbers[0] - 1), "spec-1", numbers[0])
        for one in numbers:
            writer.segments.add(new_segment(one), number)
        if close:
            writer.ranges.close(number, "max_events", f"hash-{number}")
    return number


def deliver(store: StateStore, lease: Lease, sink: str, segment: int) -> None:
    """Let `sink` acknowledge everything up to the end of `segment`."""
    with store.fenced(lease) as writer:
        writer.checkpoints.advance(sink, segment, 2, True, position(segment))


def everything(store: StateStore) -> list[object]:
    """Return all that the store says about the pipeline, except publication."""
    return [
        store.pipelines.read(),
        store.leases.get(NAME),
        store.ranges.read(NAME),
        store.segments.read(NAME),
        store.checkpoints.read(NAME),
    ]
