"""A range is published once, whoever does it and whatever was killed in between."""

from __future__ import annotations

import contextlib

import dagster as dg

from deltaforge_dagster.assets.names import partitions_name
from deltaforge_dagster.assets.publish import publish, recorded
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, held


def test_each_asset_of_a_range_is_published_when_it_is_due(sqlite_store: StateStore) -> None:
    """`changes` once the range is closed, a sink once it has the range; never a second time."""
    instance = dg.DagsterInstance.ephemeral()
    lease = held(sqlite_store, "cache", "search")
    capture(sqlite_store, lease, 1, 2)
    deliver(sqlite_store, lease, "cache", 2)

    def published() -> int:
        return publish(instance, sqlite_store, NAME, instance.report_runless_asset_event)

    assert published() == 2
    assert published() == 0
    assert instance.get_dynamic_partitions(partitions_name(NAME)) == ["0000000001"]
    assert recorded(instance, NAME, "search", 1) is None
    deliver(sqlite_store, lease, "search", 2)
    assert published() == 1
    event = recorded(instance, NAME, "search", 1)
    assert event is not None
    assert event.metadata["events"].value == 6
    assert event.metadata["content_hash"].value == "hash-1"


def test_an_event_without_its_row_is_not_written_again(sqlite_store: StateStore) -> None:
    """Killed between the two: the next publisher finds the event, and writes only the row."""
    instance = dg.DagsterInstance.ephemeral()
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)

    def report_and_die(event: dg.AssetMaterialization) -> None:
        instance.report_runless_asset_event(event)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        publish(instance, sqlite_store, NAME, report_and_die)
    assert sqlite_store.published(NAME, 1, 1) == set()

    assert publish(instance, sqlite_store, NAME, instance.report_runless_asset_event) == 0
    assert sqlite_store.published(NAME, 1, 1) == {(1, "changes")}


def test_a_number_that_begins_again_is_another_range(sqlite_store: StateStore) -> None:
    """After the state store was deleted, what Dagster kept of the old range 1 hides no new one."""
    instance = dg.DagsterInstance.ephemeral()
    instance.add_dynamic_partitions(partitions_name(NAME), ["0000000001"])
    old = dg.AssetMaterialization(
        [NAME, "changes"], partition="0000000001", metadata={"content_hash": "of another life"}
    )
    instance.report_runless_asset_event(old)
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)

    assert publish(instance, sqlite_store, NAME, instance.report_runless_asset_event) == 1

    event = recorded(instance, NAME, "changes", 1)
    assert event is not None
    assert event.metadata["content_hash"].value == "hash-1"
