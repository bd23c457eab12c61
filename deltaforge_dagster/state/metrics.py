"""Metrics in the state store, counted in the same transaction as the events that they count.

A pipeline works in many short runs, so counts in a run's memory would be lost or start at 0 again
and again. A `Tally` collects what happened since the last write, and the transaction that makes it
durable (a segment's row, a checkpoint, a dead letter) adds it to the stored numbers. A row is one
number: the value of a counter, the last value of a gauge, or one bucket of a histogram (not
cumulative).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson
from sqlalchemy import Connection, and_, case, func, not_, or_, select

from deltaforge_dagster.state.database.database import Database, upsert
from deltaforge_dagster.state.database.tables import checkpoints, metrics, segments
from deltaforge_dagster.state.metric_families import (
    PANICS,
    PIPELINE_PAUSES,
    PIPELINE_RESUMES,
    RUN_FAILURES,
    Family,
)
from deltaforge_dagster.state.records import DesiredState

_Series = tuple[str, str]

LE = "le"
"""Label with the upper bound of a bucket; `+Inf` for the last one."""

RunFailure = Literal["failed", "lost"]
"""`failed`: the run reported it; `lost`: the run went silent, and another run took its lease."""

RUN_FAILURE_REASONS: tuple[RunFailure, ...] = get_args(RunFailure)

SUM = "_sum"
"""Suffix of a histogram's name for the sum of the observed values."""


class Tally:
    """Counts that are not stored yet; used by one thread at a time.

    Labels are those of the family except `pipeline`, which is added when the tally is stored.
    """

    def __init__(self) -> None:
        self._added: dict[_Series, float] = {}
        self._last: dict[_Series, float] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._last)

    def add(self, family: Family, amount: float = 1, **labels: str) -> None:
        """Add an amount to a counter."""
        if amount:
            self._add(family.name, _text(family, labels), amount)

    def observe(self, family: Family, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        bucket = bisect.bisect_left(family.buckets, value)
        bound = f"{family.buckets[bucket]:g}" if bucket < len(family.buckets) else "+Inf"
        self._add(family.name, _text(family, labels, le=bound), 1)
        self._add(family.name + SUM, _text(family, labels), value)

    def set(self, family: Family, value: float, **labels: str) -> None:
        """Set a gauge's value."""
        self._last[family.name, _text(family, labels)] = value

    def join(self, other: Tally) -> None:
        """Add the counts of another tally, which must not be used afterwards."""
        for (name, labels), amount in other._added.items():
            self._add(name, labels, amount)
        self._last |= other._last

    def rows(self, pipeline: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows to add to stored values and those to replace them, sorted by series."""
        added, last = (
            [
                {"pipeline": pipeline, "name": name, "labels": labels, "value": value}
                for (name, labels), value in sorted(series.items())
            ]
            for series in (self._added, self._last)
        )
        return added, last

    def _add(self, name: str, labels: str, amount: float) -> None:
        self._added[name, labels] = self._added.get((name, labels), 0) + amount


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored number."""

    pipeline: str
    name: str
    labels: Mapping[str, str]
    value: float


class MetricRepository:
    """The stored numbers of all pipelines: `StateStore.metrics`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> list[Stored]:
        """Return all stored numbers."""
        query = select(metrics).order_by(metrics.c.name, metrics.c.pipeline, metrics.c.labels)
        with self._database.read() as connection:
            return [
                Stored(pipeline, name, orjson.loads(labels), value)
                for pipeline, name, labels, value in connection.execute(query)
            ]

    def lacking_rows(self) -> dict[tuple[str, str], int]:
        """Return, by pipeline and attached sink, how many captured changes are undelivered."""
        behind = or_(
            segments.c.segment > checkpoints.c.segment,
            and_(segments.c.segment == checkpoints.c.segment, not_(checkpoints.c.complete)),
        )
        begun = case((checkpoints.c.complete, 0), else_=checkpoints.c.ordinal + 1)
        query = (
            select(checkpoints.c.pipeline, checkpoints.c.sink, func.sum(segments.c.rows) - begun)
            .join(segments, and_(segments.c.pipeline == checkpoints.c.pipeline, behind))
            .where(checkpoints.c.state != "detached")
            .group_by(
                checkpoints.c.pipeline,
                checkpoints.c.sink,
                checkpoints.c.complete,
                checkpoints.c.ordinal,
            )
        )
        with self._database.read() as connection:
            return {
                (pipeline, sink): int(rows) for pipeline, sink, rows in connection.execute(query)
            }

    def count(self, name: str, tally: Tally) -> None:
        """Add a tally that is not part of another write; needs no lease."""
        with self._database.write() as connection:
            count(connection, name, tally)


class MetricWrites:
    """Counts for a lease holder: `FencedWriter.metrics`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def count(self, tally: Tally) -> None:
        """Add a tally that is not part of another write."""
        count(self._connection, self._pipeline, tally)


def of_desired_state(before: DesiredState, after: DesiredState) -> Tally:
    """Return the tally of a change of the desired state."""
    tally = Tally()
    if after != before and after == "paused":
        tally.add(PIPELINE_PAUSES)
    if after != before and after == "running":
        tally.add(PIPELINE_RESUMES)
    return tally


def run_failure(reason: RunFailure) -> Tally:
    """Return the tally of one failed or lost run."""
    tally = Tally()
    tally.add(RUN_FAILURES, reason=reason)
    return tally


def panic() -> Tally:
    """Return the tally of one defect."""
    tally = Tally()
    tally.add(PANICS)
    return tally


def count(connection: Connection, pipeline: str, tally: Tally | None) -> None:
    """Add a tally to a pipeline's stored numbers, within the caller's transaction."""
    if not tally:
        return
    added, last = tally.rows(pipeline)
    for rows, adds in ((added, True), (last, False)):
        if rows:
            insert = upsert(connection, metrics)
            new = insert.excluded.value
            value = metrics.c.value + new if adds else new
            keys = [metrics.c.pipeline, metrics.c.name, metrics.c.labels]
            connection.execute(
                insert.on_conflict_do_update(index_elements=keys, set_={"value": value}), rows
            )


def _text(family: Family, labels: Mapping[str, str], **more: str) -> str:
    if {*labels, "pipeline"} != {*family.labels, "pipeline"}:
        raise ValueError(f"{family.name} has the labels {family.labels}, not {tuple(labels)}")
    return orjson.dumps({**labels, **more}, option=orjson.OPT_SORT_KEYS).decode()
