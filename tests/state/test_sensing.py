"""Findings of sensing in the state store: with the segment that they are of, once."""

from __future__ import annotations

import orjson
import pytest

from deltaforge_dagster.errors import LeaseLost
from deltaforge_dagster.state.metric_families import SCHEMA_EVENTS
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.sensing import Findings, Progress
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held

EVOLUTION = {"subject": "public.a:doc", "sequence": 2, "old": "1", "new": "2"}


def findings(segment: int, state: bytes) -> Findings:
    """Return findings of one table."""
    tally = Tally()
    tally.add(SCHEMA_EVENTS, 5, table="public.a")
    return Findings(
        segment,
        1,
        {"public.a": state},
        {"public.a": {"drift/public.a": segment}},
        [EVOLUTION],
        tally,
    )


def test_a_segment_counts_once(store: StateStore) -> None:
    """What is stored already is not stored again: neither states, evolutions nor counts."""
    lease = held(store, "redis")
    assert store.sensing.progress(NAME) is None
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.sensing.note(findings(3, b"first"))
    with store.fenced(lease) as writer:
        writer.sensing.note(findings(2, b"older"))

    assert store.sensing.progress(NAME) == Progress(3, 1)
    assert store.sensing.tables(NAME) == {"public.a": b"first"}
    assert store.sensing.facts(NAME) == {"drift/public.a": 3}
    (entry,) = store.sensing.evolutions(NAME, "public.a:doc")
    assert orjson.loads(entry.value) == {"sequence": 2, "old": "1", "new": "2"}
    assert store.sensing.evolutions(NAME, "public.b") == []
    assert [one.value for one in store.metrics.read() if one.name == SCHEMA_EVENTS.name] == [5]


def test_a_problem_stays_until_it_goes_on(sqlite_store: StateStore) -> None:
    """A failure moves nothing, and is past with the next findings."""
    lease = held(sqlite_store, "redis")
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.note(Findings(3))
        writer.sensing.fail("no server")
    assert sqlite_store.sensing.progress(NAME) == Progress(3, 0, "no server")
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.note(findings(4, b"next"))
    assert sqlite_store.sensing.progress(NAME) == Progress(4, 1)


def test_findings_are_fenced(sqlite_store: StateStore) -> None:
    """A run that has lost its lease stores nothing."""
    lost = held(sqlite_store, "redis")
    with sqlite_store.fenced(lost) as writer:
        writer.lease.release()
    assert sqlite_store.leases.acquire(NAME, "another", 60) is not None
    with pytest.raises(LeaseLost), sqlite_store.fenced(lost) as writer:
        writer.sensing.note(findings(1, b"late"))
    assert sqlite_store.sensing.progress(NAME) is None
