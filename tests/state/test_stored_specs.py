"""Pipelines that the store keeps itself, and what stays of one that is removed."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.primitives import Kv, Log
from deltaforge_dagster.state.records import Failure
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.stored_specs import StoredSpec
from deltaforge_dagster.state.tables import metadata
from tests.state.make import NAME, capture, dead_letter, expire, held


def test_a_document_is_kept_once(store: StateStore) -> None:
    """By name; its version rises, and of two changes to the same version one wins."""
    assert store.add_stored_spec("b", "{}")
    assert store.add_stored_spec("a", '{"x": 1}')
    assert not store.add_stored_spec("a", '{"x": 2}')
    assert store.stored_specs() == [StoredSpec("a", '{"x": 1}', 1), StoredSpec("b", "{}", 1)]
    assert store.replace_stored_spec("a", 1, '{"x": 3}')
    assert not store.replace_stored_spec("a", 1, '{"x": 4}')
    assert not store.replace_stored_spec("c", 1, "{}")
    assert store.stored_spec("a") == StoredSpec("a", '{"x": 3}', 2)
    assert store.remove_stored_spec("a")
    assert not store.remove_stored_spec("a")
    assert store.stored_spec("a") is None


def test_a_removed_pipeline_leaves_nothing_but_its_numbers(store: StateStore) -> None:
    """No row names it any more, other pipelines keep theirs, and its numbers and epochs go on."""
    store.register_pipeline("other", "hash", ["redis"])
    Kv(store.database, "spec/other").put("key", b"value")
    store.add_stored_spec(NAME, "{}")
    lease = held(store)
    capture(store, lease, 1, 2)
    with store.fenced(lease) as writer:
        writer.add_dead_letters("redis", [dead_letter(1)], max_entries=9, overflow="block")
    store.request_snapshot(NAME, cause="always")
    Kv(store.database, f"spec/{NAME}").put("key", b"value")
    Log(store.database, f"schemas/{NAME}").append("key", b"value")

    with pytest.raises(NotAllowed, match="run-1"):
        store.remove_pipeline(NAME)
    assert store.stored_spec(NAME) is not None
    row = store.pipeline(NAME)
    assert row is not None
    expire(store)
    assert store.remove_pipeline(NAME) == row.uid

    assert store.stored_specs() == []
    with store.database.read() as connection:
        for table in metadata.sorted_tables:
            if "pipeline" in table.c and table.name != "lease":
                names = {one.pipeline for one in connection.execute(table.select())}
                assert names <= {"other"}, table.name
    assert Log(store.database, f"schemas/{NAME}").entries() == []
    assert Kv(store.database, f"spec/{NAME}").items() == {}
    assert Kv(store.database, "spec/other").items() == {"key": b"value"}
    assert [one.name for one in store.pipelines()] == ["other"]
    assert store.remove_pipeline(NAME) is None

    again = store.register_pipeline(NAME, "hash", ["redis"])
    assert again.uid != row.uid
    assert (again.next_segment, again.next_range) == (3, 2)
    new = store.acquire_lease(NAME, "run-2", 60)
    assert new is not None
    capture(store, new, 3)
    with pytest.raises(LeaseLost), store.fenced(lease):
        pass


def test_why_a_pipeline_failed_is_kept(store: StateStore) -> None:
    """Until it is taken back, or the pipeline begins anew."""
    store.register_pipeline(NAME, "hash", ["redis"])

    def failure() -> str | None:
        row = store.pipeline(NAME)
        assert row is not None
        return row.failure

    assert failure() is None
    store.set_failure(NAME, Failure("tick", "checkpoint", "the slot is gone", 1.0))
    assert "the slot is gone" in str(failure())
    store.set_failure(NAME, None)
    assert failure() is None
    store.set_failure(NAME, Failure("run", "schema", "an odd event", 1.0))
    store.reset_all(NAME)
    assert failure() is None
