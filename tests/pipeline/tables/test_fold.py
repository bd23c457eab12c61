"""Folding, compared with a plain model that applies one change after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import encoder
from deltaforge_dagster.pipeline.tables import stage as staging
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.sinks.tables.staged import StagedStep
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.encode.test_encoder import segment
from tests.pipeline.tables.changes import change, stager_here, table
from tests.processors.rows import Row
from tests.state.make import held, position

KEYS = range(5)
COLUMNS = ("a", "b")
Values = dict[str, int | None]


@dataclass
class Source:
    """A table that changes: its rows now, the changes so far, and the versions of its rows."""

    version: str
    rows: dict[Any, Values]
    changes: list[Row]
    versions: list[list[Any]]
    time: int = 0

    def _log(self, op: str, **images: Any) -> None:
        pos = len(self.changes)
        self.changes.append({**change(op, pos, self.version, **images), "ts_us": self.time})

    def _end(self, key: Any) -> None:
        for one in self.versions:
            if one[0] == key and one[3] is None:
                one[3] = self.time

    def _begin(self, key: Any, values: Values) -> None:
        self._end(key)
        self.rows[key] = values
        self.versions.append([key, dict(values), self.time, None])

    def insert(self, key: Any, values: Values, *, snapshot: bool) -> None:
        """Insert a row that does not exist, or read one."""
        if key in self.rows:
            if not snapshot:
                return
            values = self.rows[key]
        self._log("r" if snapshot else "c", after={"id": key, **values})
        self._begin(key, values)

    def update(self, key: Any, new: Any, values: Values, absent: frozenset[str]) -> None:
        """Update a row; the log lacks some columns, which keep their values."""
        if key not in self.rows or (new != key and new in self.rows):
            return
        values |= {name: self.rows[key][name] for name in absent}
        image = {name: {"_unchanged": True} if name in absent else values[name] for name in COLUMNS}
        before = {"before": {"id": key}} if new != key else {}
        self._log("u", after={"id": new, **image}, **before)
        if new != key:
            self._end(key)
            del self.rows[key]
        self._begin(new, values)

    def delete(self, key: Any) -> None:
        """Delete a row, if it exists."""
        if key in self.rows:
            self._log("d", before={"id": key})
            self._end(key)
            del self.rows[key]

    def truncate(self) -> None:
        """Delete all rows."""
        self._log("t", key=None)
        for key in self.rows:
            self._end(key)
        self.rows.clear()


VALUES = st.fixed_dictionaries({name: st.integers(0, 9) | st.none() for name in COLUMNS})
ABSENT = st.frozensets(st.sampled_from(COLUMNS))
KEY = st.sampled_from(KEYS)
OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), KEY, VALUES, st.booleans()),
    st.tuples(st.just("update"), KEY, VALUES, ABSENT),
    st.tuples(st.just("rekey"), KEY, KEY, VALUES, ABSENT),
    st.tuples(st.just("delete"), KEY),
    st.tuples(st.just("truncate")),
)


def play(source: Source, operations: Sequence[tuple[Any, ...]]) -> None:
    """Apply operations to a source."""
    for number, (name, *rest) in enumerate(operations):
        source.time += number % 2  # some changes happen at the same time
        match name:
            case "insert":
                source.insert(rest[0], dict(rest[1]), snapshot=rest[2])
            case "update":
                source.update(rest[0], rest[0], dict(rest[1]), rest[2])
            case "rekey":
                source.update(rest[0], rest[1], dict(rest[2]), rest[3])
            case "delete":
                source.delete(rest[0])
            case _:
                source.truncate()


@dataclass(frozen=True)
class Place:
    """Where changes are staged without Spark's server.

    Attributes:
        version: Fingerprint of the table's version.
        journal: Has the segments.
        stagers: A stager for each mode.
    """

    version: str
    journal: Journal
    stagers: dict[str, TableStager]

    def stage(self, changes: Sequence[Row], mode: str, size: int) -> Sequence[StagedStep]:
        """Return the steps of changes that are in segments of `size` rows; a task and a bucket have few rows as well."""
        segments = [
            segment(self.journal, start + 1, changes[start : start + size])
            for start in range(0, len(changes), size)
        ]
        few = patch.object(staging, "BUCKET_ROWS", 4)
        with few, patch.object(encoder, "TASK_BYTES", 20_000):
            commit = self.stagers[mode].stage(segments)
        assert not commit.failed
        assert sum(one.changes for one in commit.tables) == len(changes)
        return [step for one in commit.tables for step in one.steps]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A journal, a store that knows the table, and stagers."""
    folder = tmp_path_factory.mktemp("folds")
    store = StateStore.open(f"sqlite:///{folder}/state.db")
    with store.fenced(held(store)) as writer:
        stamp = writer.schemas.register("acme", table("id", *COLUMNS), position(1))
    journal = Journal((folder / "journal").as_uri())
    stagers = {
        mode: stager_here(folder, journal, store, f"mode: {mode}")
        for mode in ("current", "history", "changelog")
    }
    yield Place(stamp.fingerprint, journal, stagers)
    store.close()


def rows_of(step: StagedStep) -> list[dict[str, Any]]:
    """Return the rows of a step's files."""
    return [row for path in step.files for row in pq.read_table(path).to_pylist()]


def merged(row: dict[str, Any], known: Values | None) -> Values:
    """Return the values of a row, what it lacks from the row that the table has."""
    lacks = row["df_absent"] or []
    return {
        name: (known[name] if known is not None else None) if name in lacks else row[name]
        for name in COLUMNS
    }


def write_current(target: dict[int, Values], steps: Sequence[StagedStep]) -> None:
    """Apply steps as the writer does: all rows of a step at once."""
    for step in steps:
        if step.kind == "truncate":
            target.clear()
            continue
        rows, before = rows_of(step), dict(target)
        if step.reads:
            assert all(one["df_op"] == "u" and one["df_absent"] is None for one in rows)
        assert len(rows) == step.rows == len({one["id"] for one in rows})
        for one in rows:
            if step.kind == "rekey":
                del target[one["df_old_id"]]
        for one in rows:
            if one["df_op"] == "d":
                target.pop(one["id"], None)
            else:
                known = before.get(one["df_old_id" if step.kind == "rekey" else "id"])
                target[one["id"]] = merged(one, known)


def write_history(target: list[list[Any]], steps: Sequence[StagedStep]) -> None:
    """Apply steps as the writer does: the first row of a key ends the version that the table has."""
    for step in steps:
        open_ones = {version[0]: version for version in target if version[3] is None}
        if step.kind == "truncate":
            for version in open_ones.values():
                version[3] = step.event_time_us
            continue
        rows = sorted(rows_of(step), key=lambda one: (one["df_segment"], one["df_ordinal"]))
        assert len(rows) == step.rows
        met = set()
        for row in rows:
            key, begin, end = row["id"], micros(row["df_valid_from"]), micros(row["df_valid_to"])
            known = open_ones.get(row.get("df_old_id", key))
            assert row["df_op"] == "u" or key not in met  # a delete behind other rows ends none
            if key not in met and known is not None:
                known[3] = begin
            if row["df_op"] == "u":
                target.append([key, merged(row, None if known is None else known[1]), begin, end])
            met.add(key)


def micros(time: datetime | None) -> int | None:
    """Return microseconds since 1970."""
    return None if time is None else round(time.timestamp() * 1e6)


@given(
    before=st.lists(OPERATIONS, max_size=8),
    operations=st.lists(OPERATIONS, max_size=30),
    size=st.integers(1, 9),
)
def test_folds(
    place: Place,
    before: list[tuple[Any, ...]],
    operations: list[tuple[Any, ...]],
    size: int,
) -> None:
    """Applying the steps gives the table, and the history, that applying one change after the other gives."""
    source = Source(place.version, {}, [], [])
    play(source, before)
    source.changes.clear()
    source.time += 1
    rows = {key: dict(values) for key, values in source.rows.items()}
    versions = [[key, dict(values), *times] for key, values, *times in source.versions]
    play(source, operations)
    write_current(rows, place.stage(source.changes, "current", size))
    assert rows == source.rows
    write_history(versions, place.stage(source.changes, "history", size))
    assert ordered(versions) == ordered(source.versions)


def ordered(versions: list[list[Any]]) -> list[str]:
    """Return versions so that they can be compared."""
    return sorted(repr([key, sorted(values.items()), *rest]) for key, values, *rest in versions)
