"""Tests that a range is published once, whoever publishes it and whatever was killed in between."""

import contextlib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from deltaforge_dagster.assets.checks import evaluate
from deltaforge_dagster.assets.names import partitions_name
from deltaforge_dagster.assets.publish import RunObserver, publish, recorded
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, expire, held, new_segment, position, table

JOURNAL = Journal("memory://links")
"""The journal that links of materializations point to; nothing is read from it."""


def test_each_asset_of_a_range_is_published_when_it_is_due(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """`changes` is published once the range is closed, a sink once it has the range; never twice."""
    lease = held(sqlite_store, "cache", "search")
    capture(sqlite_store, lease, 1, 2)
    deliver(sqlite_store, lease, "cache", 2)

    def published() -> int:
        return publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL)

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


def test_an_event_without_its_row_is_not_written_again(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """After a kill between event and row, the next publisher writes only the row."""
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)

    def report_and_die(event: dg.AssetMaterialization) -> None:
        instance.report_runless_asset_event(event)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        publish(instance, sqlite_store, NAME, report_and_die, JOURNAL)
    assert sqlite_store.ranges.published(NAME, 1, 1) == set()

    assert publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL) == 0
    assert sqlite_store.ranges.published(NAME, 1, 1) == {(1, "changes")}


def test_a_number_that_begins_again_is_another_range(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """After the state store was deleted, Dagster's event of the old range 1 does not hide the new one."""
    instance.add_dynamic_partitions(partitions_name(NAME), ["0000000001"])
    old = dg.AssetMaterialization(
        [NAME, "changes"], partition="0000000001", metadata={"content_hash": "of another life"}
    )
    instance.report_runless_asset_event(old)
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)

    assert publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL) == 1

    event = recorded(instance, NAME, "changes", 1)
    assert event is not None
    assert event.metadata["content_hash"].value == "hash-1"


def test_a_range_leads_to_its_run_and_its_files(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """A range links to its run, if the lease still names it, and to its first file, and has checkpoint ages."""
    lease = held(sqlite_store, "cache", run_id="run-1")
    capture(sqlite_store, lease, 1)
    publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL)

    event = recorded(instance, NAME, "changes", 1)
    assert event is not None
    assert event.metadata["run"] == dg.MetadataValue.dagster_run("run-1")
    assert str(event.metadata["journal"].value).endswith(f"{NAME}/1.parquet")
    age = event.metadata["sinks/cache/checkpoint_age_seconds"].value
    assert isinstance(age, float)
    assert age >= 0

    capture(sqlite_store, lease, 2)
    expire(sqlite_store)
    later = sqlite_store.leases.acquire(NAME, "run-2", 60)
    assert later is not None
    deliver(sqlite_store, later, "cache", 2)
    publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL)

    other = recorded(instance, NAME, "changes", 2)
    assert other is not None
    assert "run" not in other.metadata, "nobody knows which run captured it"
    sink = recorded(instance, NAME, "cache", 2)
    assert sink is not None
    assert sink.metadata["run"] == dg.MetadataValue.dagster_run("run-2")
    assert "sinks/cache/checkpoint_age_seconds" in sink.metadata


def test_a_range_names_the_versions_in_it(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """A range has the numbers and fingerprints of its table versions, the newest last, and no others."""
    lease = held(sqlite_store, "cache")
    stamps = []
    with sqlite_store.fenced(lease) as writer:
        for number, columns in enumerate(("a", "ab", "abc")):
            stamps.append(writer.schemas.register("acme", table(*columns), position(number)))
        number = writer.ranges.open(position(0), "spec-1", 1)
        for segment in (1, 2):
            of = {"public.orders": stamps[segment].fingerprint}
            writer.segments.add(new_segment(segment, schema_versions=of), number)
        writer.ranges.close(number, "max_events", "hash")
    publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL)

    event = recorded(instance, NAME, "changes", number)
    assert event is not None
    assert event.metadata["schema_version/public.orders"].value == "2, 3"
    fingerprints = ", ".join(one.fingerprint for one in stamps[1:])
    assert event.metadata["schema/public.orders"].value == fingerprints


FILE = """\
metadata: {{name: orders, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}}
  sinks:
    - {{type: redis, config: {{id: cache, uri: "redis://localhost", stream: s}}}}
  engine: {{dagster: {{events: {events}}}}}
"""


@pytest.mark.parametrize("events", ["tables", "observations"])
def test_ranges_need_not_be_reported(
    sqlite_store: StateStore, instance: dg.DagsterInstance, tmp_path: Path, events: str
) -> None:
    """They count as published, so they can expire, and are partitions that can be chosen; a chosen one is reported.

    Dagster's records agree with the store nevertheless, but not any more once a range lacks its event that should have one.
    """
    path = tmp_path / "orders.yaml"
    path.write_text(FILE.format(events=events))
    loaded = load_pipeline(path)
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)
    capture(sqlite_store, lease, 2)
    deliver(sqlite_store, lease, "cache", 2)
    nothing: Any = None
    run_context = RunContext(sqlite_store, JOURNAL, *[nothing] * 4)

    @dg.asset
    def ranges(context: dg.AssetExecutionContext) -> None:
        RunObserver(context, run_context, loaded, [("cache", 2)]).publish()

    dg.materialize([ranges], instance=instance)

    assert instance.get_dynamic_partitions(partitions_name(NAME)) == ["0000000001", "0000000002"]
    assert sqlite_store.ranges.unpublished(NAME) == []
    reported = {
        (asset, number)
        for asset in ("changes", "cache")
        for number in (1, 2)
        if recorded(instance, NAME, asset, number) is not None
    }
    assert reported == {("cache", 2)}

    def disagreement() -> str | None:
        checks = evaluate(instance, sqlite_store, loaded, None, [])
        return next(check.description for check in checks if check.check_name == "agreement")

    assert disagreement() is None
    capture(sqlite_store, lease, 3)
    assert publish(instance, sqlite_store, NAME, instance.report_runless_asset_event, JOURNAL) == 1
    assert disagreement() is None
    capture(sqlite_store, lease, 4)
    sqlite_store.ranges.mark_published(NAME, 4, "changes")
    assert disagreement() == "range 4 of changes is published, but Dagster has no record of it"
