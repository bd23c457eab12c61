"""Tests of the dead letter routes with a real queue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Api
from tests.state.make import dead_letter

DLQ = "/pipelines/orders/journal/dlq"


@pytest.fixture
def letters(api: Api) -> Api:
    """A pipeline with four dead letters, the last of which is of another kind."""
    api.create("orders", journal={"enabled": True})
    lease = api.store.leases.acquire("orders", "run", 600)
    assert lease is not None
    made = [dead_letter(number) for number in (1, 2, 3)]
    made.append(dead_letter(4, error_kind="too_large"))
    with api.store.fenced(lease) as writer:
        writer.dead_letters.add("redis", made, max_entries=100, overflow="block")
    return api


def seqs(api: Api, **query: Any) -> list[int]:
    """Return the numbers of the entries that a query returns."""
    return [one["seq"] for one in api.client.get(DLQ, params=query).json()]


def test_they_are_shown(letters: Api) -> None:
    """Entries are listed oldest first, with their events, filtered by sink and kind, up to the limit."""
    assert seqs(letters) == [1, 2, 3, 4]
    assert seqs(letters, limit=2) == [1, 2]
    assert seqs(letters, error_kind="too_large") == [4]
    assert seqs(letters, sink_id="other") == []
    assert letters.client.get(f"{DLQ}/count").json() == {"count": 4}
    one = letters.client.get(f"{DLQ}/2").json()
    assert (one["event"], one["meta"]["sink_id"]) == ({"after": 2}, "redis")
    assert letters.client.get(f"{DLQ}/9").status_code == 404
    for limit in (0, 1001, "x"):
        assert letters.client.get(DLQ, params={"limit": limit}).status_code == 400


def test_they_are_delivered_again_or_given_up(letters: Api) -> None:
    """Entries are redriven by number, by sink or all; discarded entries are gone."""
    assert letters.client.post(f"{DLQ}/redrive", json={"seqs": [3]}).json() == {"redriven": 1}
    assert letters.client.post(f"{DLQ}/redrive", json={"sink_id": "x"}).json() == {"redriven": 0}
    assert letters.client.post(f"{DLQ}/redrive", json={}).json() == {"redriven": 3}
    assert letters.client.get(f"{DLQ}/3").json()["state"] == "redrive"
    assert letters.client.post(f"{DLQ}/ack", json={"up_to_seq": 2}).json() == {"acked": 2}
    assert seqs(letters) == [3, 4]
    assert letters.client.delete(DLQ).json() == {"purged": 2}
    assert seqs(letters) == []
    wrong: list[Any] = [{}, {"up_to_seq": 0}, {"up_to_seq": 2**70}, []]
    for body in wrong:
        answer = letters.client.post(f"{DLQ}/ack", json=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST")


def test_a_pipeline_without_dead_letters(api: Api) -> None:
    """The error names the field that enables dead letters."""
    api.create("orders")
    for path in ("", "/count", "/1"):
        answer = api.client.get(DLQ + path)
        assert (answer.status_code, answer.json()["code"]) == (500, "NOT_ENABLED")
        assert "spec.journal.enabled" in answer.json()["error"]


def test_a_sink_that_writes_tables_has_none(api: Api) -> None:
    """A redelivery to it is refused."""
    sink = {"type": "delta", "config": {"id": "lake", "path": "/lake"}}
    api.create("orders", journal={"enabled": True}, sinks=[sink])

    answer = api.client.post(f"{DLQ}/redrive", json={"sink_id": "lake"})

    assert answer.status_code == 409
    assert "'lake' of pipeline 'orders' writes tables and has no dead letters" in answer.text
