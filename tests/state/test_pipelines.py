"""Pipelines that the store keeps itself, and what stays of one that is removed."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.database.primitives import Kv, Log
from deltaforge_dagster.state.database.tables import metadata
from deltaforge_dagster.state.pipelines import StoredSpec
from deltaforge_dagster.state.records import Failure
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, dead_letter, expire, held


def test_a_document_is_kept_once(store: StateStore) -> None:
    """By name; its version rises, and of two changes to the same version one wins."""
    assert store.pipelines.add_document("b", "{}")
    assert store.pipelines.add_document("a", '{"x": 1}')
    assert not store.pipelines.add_document("a", '{"x": 2}')
    assert store.pipelines.documents() == [StoredSpec("a", '{"x": 1}', 1), StoredSpec("b", "{}", 1)]
    assert store.pipelines.replace_document("a", 1, '{"x": 3}')
    assert not store.pipelines.replace_document("a", 1, '{"x": 4}')
    assert not store.pipelines.replace_document("c", 1, "{}")
    assert store.pipelines.document("a") == StoredSpec("a", '{"x": 3}', 2)
    assert store.pipelines.remove_document("a")
    assert not store.pipelines.remove_document("a")
    assert store.pipelines.document("a") is None


def test_a_removed_pipeline_leaves_nothing_but_its_numbers(store: StateStore) -> None:
    """No row names it any more, other pipelines keep theirs, and its numbers and epochs go on."""
    store.pipelines.register("other", "hash", ["redis"])
    Kv(store.database, "spec/other").put("key", b"value")
    store.pipelines.add_document(NAME, "{}")
    lease = held(store)
    capture(store, lease, 1, 2)
    with store.fenced(lease) as writer:
        writer.dead_letters.add("redis", [dead_letter(1)], max_entries=9, overflow="block")
    store.snapshots.request(NAME, cause="always")
    Kv(store.database, f"spec/{NAME}").put("key", b"value")
    Log(store.database, f"schemas/{NAME}").append("key", b"value")

    with pytest.raises(NotAllowed, match="run-1"):
        store.pipelines.remove(NAME)
    assert store.pipelines.document(NAME) is not None
    row = store.pipelines.get(NAME)
    assert row is not None
    expire(store)
    assert store.pipelines.remove(NAME) == row.uid

    assert store.pipelines.documents() == []
    with store.database.read() as connection:
        for table in metadata.sorted_tables:
            if "pipeline" in table.c and table.name != "lease":
                names = {one.pipeline for one in connection.execute(table.select())}
                assert names <= {"other"}, table.name
    assert Log(store.database, f"schemas/{NAME}").entries() == []
    assert Kv(store.database, f"spec/{NAME}").items() == {}
    assert Kv(store.database, "spec/other").items() == {"key": b"value"}
    assert [one.name for one in store.pipelines.read()] == ["other"]
    assert store.pipelines.remove(NAME) is None

    again = store.pipelines.register(NAME, "hash", ["redis"])
    assert again.uid != row.uid
    assert (again.next_segment, again.next_range) == (3, 2)
    new = store.leases.acquire(NAME, "run-2", 60)
    assert new is not None
    capture(store, new, 3)
    with pytest.raises(LeaseLost), store.fenced(lease):
        pass


def test_why_a_pipeline_failed_is_kept(store: StateStore) -> None:
    """Until it is taken back, or the pipeline starts over."""
    store.pipelines.register(NAME, "hash", ["redis"])

    def failure() -> str | None:
        row = store.pipelines.get(NAME)
        assert row is not None
        return row.failure

    assert failure() is None
    store.pipelines.set_failure(NAME, Failure("tick", "checkpoint", "the slot is gone", 1.0))
    assert "the slot is gone" in str(failure())
    store.pipelines.set_failure(NAME, None)
    assert failure() is None
    store.pipelines.set_failure(NAME, Failure("run", "schema", "an odd event", 1.0))
    store.journals.reset(NAME)
    assert failure() is None
