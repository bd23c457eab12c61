"""Tests that the demo's proof finds every lost, repeated, reordered and changed event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_lab.arrivals import Arrival, percentile, read_redis
from deltaforge_lab.demo.proof import (
    ArrivalCounter,
    Proof,
    SinkVerdict,
    arrival_rate,
    latencies,
    read_lines,
)
from deltaforge_lab.demo.workload import TABLES, Op, Record
from deltaforge_lab.servers.redis import RedisServer

ORDERS = next(table for table in TABLES if table.name == "orders")
CUSTOMERS = next(table for table in TABLES if table.name == "customers")

HISTORY: list[tuple[str, int, Op, int]] = [
    ("orders", 1, "c", 1),
    ("customers", 1, "c", 1),
    ("orders", 1, "u", 2),
    ("orders", 2, "c", 1),
    ("customers", 1, "u", 2),
    ("orders", 1, "d", 2),
    ("customers", 1, "d", 2),
    ("orders", 1, "c", 3),
]


def recorded() -> Record:
    """Return the record of the history."""
    record = Record()
    for step in HISTORY:
        record.note(*step)
    return record


def event(table: str, key: int, op: Op, version: int) -> dict[str, Any]:
    """Return the sink's event for a change, with the fields of the native envelope that the proof reads."""
    full = ORDERS if table == "orders" else CUSTOMERS
    row = full.row(key, version)
    before = (
        (row if full.full_identity else {**dict.fromkeys(row), "id": key}) if op == "d" else None
    )
    return {
        "before": before,
        "after": None if op == "d" else row,
        "source": {"table": table},
        "op": op,
        "ts_ms": 1,
    }


EVENTS = [event(*step) for step in HISTORY]


def judge(events: list[dict[str, Any]]) -> SinkVerdict:
    """Return the verdict for a sink that has these events."""
    proof = Proof(recorded())
    for one in events:
        proof.see(one)
    return proof.verdict()


def test_all_there_once_in_order_is_good() -> None:
    """A sink with exactly what was written has a good verdict."""
    verdict = judge(EVENTS)

    assert verdict == SinkVerdict(delivered=8, lost=0, duplicated=0, out_of_order=0, wrong=0)
    assert verdict.good


@pytest.mark.parametrize("place", range(len(EVENTS)))
def test_each_missing_event_is_lost(place: int) -> None:
    """If any one event is missing, exactly one is lost."""
    verdict = judge(EVENTS[:place] + EVENTS[place + 1 :])

    assert (verdict.lost, verdict.duplicated, verdict.out_of_order) == (1, 0, 0)
    assert not verdict.good


@given(place=st.integers(0, len(EVENTS) - 1), later=st.integers(0, len(EVENTS)))
def test_each_repeated_event_is_duplicated(place: int, later: int) -> None:
    """If any one event is repeated anywhere, one is duplicated and none is lost."""
    events = list(EVENTS)
    events.insert(max(later, place + 1), EVENTS[place])
    verdict = judge(events)

    assert (verdict.lost, verdict.duplicated, verdict.out_of_order) == (0, 1, 0)
    assert not verdict.good


def test_an_event_before_an_earlier_one_of_its_key_is_out_of_order() -> None:
    """An update before its insert, and a delete before an update, are out of order."""
    for first, second in ((0, 2), (2, 5), (5, 7), (1, 4), (4, 6)):
        events = list(EVENTS)
        events[first], events[second] = events[second], events[first]

        assert judge(events).out_of_order > 0


def test_keys_may_overtake_each_other() -> None:
    """Order matters only per key, not across keys."""
    by_table = sorted(EVENTS, key=lambda one: str(one["source"]["table"]))

    assert judge(by_table).good


@pytest.mark.parametrize(
    "change",
    [
        {"after": {**ORDERS.row(1, 1), "amount": 1.01}},
        {"after": {**ORDERS.row(1, 1), "extra": 1}},
        {"after": {"id": 1, "version": 1}},
        {"after": None},
        {"op": "u"},
        {"source": {"table": "strangers"}},
        {"source": None},
    ],
)
def test_an_event_with_other_content_is_wrong(change: dict[str, Any]) -> None:
    """An event with a wrong type, a wrong set of columns or an unknown table is wrong, and one is lost."""
    verdict = judge([{**EVENTS[0], **change}, *EVENTS[1:]])

    assert (verdict.wrong, verdict.lost) == (1, 1)


@pytest.mark.redis
def test_redis_is_read_stream_by_stream_in_order(
    redis_server: RedisServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof finds lost, repeated and reordered entries of real streams."""
    monkeypatch.setattr("deltaforge_lab.arrivals._PAGE", 3)  # several pages
    held = [EVENTS[2], EVENTS[0], EVENTS[3], EVENTS[3], *EVENTS[5:], EVENTS[1]]
    for one in held:
        redis_client.xadd(f"demo.{one['source']['table']}", {"df-event": json.dumps(one)})
    redis_client.xadd("other", {"df-event": "not ours"})
    redis_client.set("demo.text", "not a stream")
    proof = Proof(recorded())
    arrivals = list(read_redis(redis_server.uri, "demo.*"))
    for arrival in arrivals:
        proof.see(arrival.event)

    assert proof.verdict() == SinkVerdict(
        delivered=8,
        lost=1,  # customers 1 u 2
        duplicated=1,  # orders 2 c 1
        out_of_order=2,  # orders 1 c 1 after u 2; customers 1 c 1 after its delete
        wrong=0,
    )
    assert all(arrival.at_ms and arrival.at_ms > 1_600_000_000_000 for arrival in arrivals)


def test_files_are_read_in_order(tmp_path: Path) -> None:
    """Lines are read in the order of the file."""
    for one in EVENTS:
        with (tmp_path / f"{one['source']['table']}.jsonl").open("a") as file:
            file.write(json.dumps(one) + "\n")
    (tmp_path / "notes.txt").write_text("not ours")
    proof = Proof(recorded())
    for arrival in read_lines(tmp_path):
        proof.see(arrival.event)

    assert proof.verdict().good


def test_percentiles_of_sorted_values() -> None:
    """A percentile is the value at its place, the last value at the end, and None without values."""
    values = list(range(1, 101))

    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.99) == 100
    assert percentile([7], 0.99) == 7
    assert percentile([], 0.5) is None


@pytest.mark.redis
def test_arrivals_are_counted_while_they_come(
    redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """A partial line does not count yet, and nothing counts twice."""
    with ArrivalCounter(redis_server.uri, "demo.*", tmp_path) as counter:
        assert counter.count() == {"redis": 0, "files": 0}
        redis_client.xadd("demo.orders", {"df-event": "{}"})
        (tmp_path / "orders.jsonl").write_text('{"a": 1}\n{"b"')
        assert counter.count() == {"redis": 1, "files": 1}
        with (tmp_path / "orders.jsonl").open("a") as file:
            file.write(": 2}\n")

        assert counter.count() == {"redis": 1, "files": 2}


def test_latencies_are_of_the_changes_committed_in_a_span() -> None:
    """Latencies are sorted, in milliseconds, and exclude changes outside the span and unknown arrival times."""
    arrivals = [
        Arrival({"ts_ms": ts_ms}, at_ms)
        for ts_ms, at_ms in ((99, 500), (100, 107), (150, 153), (199, None), (200, 201))
    ]

    assert latencies(arrivals, 100, 200) == [3, 7]


def test_the_rate_is_of_what_arrived() -> None:
    """The rate is the burst's changes over the time to the last arrival, None if none arrived."""
    times = [(50, 2_000), (100, 1_100), (200, 2_100), (300, None)]
    arrivals = [Arrival({"ts_ms": ts_ms}, at_ms) for ts_ms, at_ms in times]

    assert arrival_rate(arrivals, 100) == 1.0
    assert arrival_rate(arrivals, 250) is None
    assert arrival_rate([], 100) is None
