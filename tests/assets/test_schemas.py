"""Tests of table versions in Dagster: published once, with columns and differences, and approved by materializing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from deltaforge_dagster.assets.names import (
    schemas_key,
    table_of,
    table_partition,
    tables_name,
)
from deltaforge_dagster.assets.schemas import publish_versions
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.records import HoldPart, Lease
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held, position, table

ORDERS = "public.orders"


def register(store: StateStore, lease: Lease, *columns: str, at: int) -> None:
    """Register a version of `orders`, which waits for approval if there are earlier ones."""
    with store.fenced(lease) as writer:
        writer.schemas.register("acme", table(*columns), position(at), pause=True)


def published(
    instance: dg.DagsterInstance, store: StateStore
) -> tuple[int, dg.AssetMaterialization]:
    """Publish; return how many events were written, and the newest event of `orders`."""
    written = publish_versions(instance, store, NAME, instance.report_runless_asset_event)
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=schemas_key(NAME), asset_partitions=[ORDERS]), limit=1
    )
    event = found.records[0].asset_materialization
    assert event is not None
    return written, event


def test_each_version_is_shown_with_its_columns(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """A version is published once, with columns, types and key as column schema, and what it changed."""
    lease = held(sqlite_store)
    register(sqlite_store, lease, "id", at=1)
    written, event = published(instance, sqlite_store)
    assert written == 1
    assert instance.get_dynamic_partitions(tables_name(NAME)) == [ORDERS]
    assert "changes" not in event.metadata

    register(sqlite_store, lease, "id", "note", at=2)
    written, event = published(instance, sqlite_store)
    assert written == 1
    shown: Any = event.metadata["dagster/column_schema"].value
    assert shown == dg.TableSchema(
        [
            dg.TableColumn(
                "id",
                "int4",
                constraints=dg.TableColumnConstraints(nullable=False, other=["primary key"]),
            ),
            dg.TableColumn("note", "int4", description="added"),
        ]
    )
    assert event.metadata["changes"].value == "- `+ note int4`"
    assert event.metadata["version"].value == 2
    assert event.metadata["since"].value == position(2)
    assert event.metadata["waits_for_approval"].value is True
    assert event.tags is not None
    assert event.tags["dagster/data_version"] == event.metadata["fingerprint"].value
    assert published(instance, sqlite_store)[0] == 0


def test_an_event_without_its_note_is_not_written_again(
    sqlite_store: StateStore, instance: dg.DagsterInstance
) -> None:
    """After a kill between event and mark, the next publisher writes only the mark."""
    register(sqlite_store, held(sqlite_store), "id", at=1)

    def report_and_die(event: dg.AssetMaterialization) -> None:
        instance.report_runless_asset_event(event)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        publish_versions(instance, sqlite_store, NAME, report_and_die)
    assert published(instance, sqlite_store)[0] == 0
    assert sqlite_store.schemas.unpublished(NAME) == []


@pytest.mark.parametrize("name", ["shop.größe", "shop.a...b", "shop.a%2Eb", "shop.a\nb", "a.b c,d"])
def test_any_table_has_a_partition(name: str) -> None:
    """Names that Dagster refuses are encoded, and decoded again."""
    partition = table_partition(name)
    dg.StaticPartitionsDefinition([partition])  # refuses what cannot be a partition
    assert table_of(partition) == name


def test_materializing_a_table_approves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    """The op releases the waiting changes of the chosen table only; a second time it changes nothing."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))
    source = {"id": "pg", "dsn": "postgres://u@localhost/app", "slot": "s", "publication": "p"}
    document = {
        "metadata": {"name": NAME, "tenant": "acme"},
        "spec": {
            "source": {"type": "postgres", "config": source | {"tables": ["public.*"]}},
            "sinks": [{"type": "file", "config": {"id": "redis", "path": str(tmp_path / "out")}}],
        },
    }
    (tmp_path / "orders.yaml").write_text(yaml.safe_dump(document))
    store = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = held(store)
    for columns, at in (("a", 1), ("ab", 2)):
        register(store, lease, *columns, at=at)
        with store.fenced(lease) as writer:
            items = table(*columns, name="items")
            writer.schemas.register("acme", items, position(at), pause=True)
    with store.fenced(lease) as writer:
        waiting = [
            HoldPart(SCHEMA, name, "waits", position(1), f"held/{name}", "sum", 4, 10)
            for name in (ORDERS, "public.items")
        ]
        writer.holds.keep(waiting, position(3))
    publish_versions(instance, store, NAME, instance.report_runless_asset_event)
    definitions = build_definitions(Settings.from_env(), single_process=True)

    def materialize() -> dict[str, Any]:
        job = definitions.resolve_implicit_global_asset_job_def()
        result = job.execute_in_process(
            instance=instance, partition_key=ORDERS, asset_selection=[schemas_key(NAME)]
        )
        (event,) = (one for one in result.all_events if one.is_step_materialization)
        return {name: value.value for name, value in event.materialization.metadata.items()}

    shown = materialize()
    assert (shown["version"], shown["approved_changes"]) == (2, 4)
    assert shown["waits_for_approval"] is False
    states = {hold.subject: hold.state for hold in store.holds.read(NAME)}
    assert states == {ORDERS: "released", "public.items": "held"}
    assert "approved_changes" not in materialize()
    store.close()
