"""Lake tables in Dagster: an asset for each, and a materialization for each commit, on which other assets can wait."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from deltaforge_dagster.assets import lake_tables
from deltaforge_dagster.assets.lake_tables import publish_writes
from deltaforge_dagster.assets.maintenance import observation
from deltaforge_dagster.assets.names import maintenance_key
from deltaforge_dagster.assets.publish import RunObserver
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.lake.maintenance import MaintainedTable
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableFigures, TableWrite
from tests.state.make import NAME, held, position, table

SINK = "lake"
FIGURES = TableFigures(2**60 + 1, 3, 4096, 7, 1)
NAMES = ("orders", "a-b", "a_b", "größe/x y")
"""Tables; Dagster takes some of these names for one when it makes Python names of them."""
KEY = dg.AssetKey([NAME, SINK, "public", f"orders_{SINK}"])
SOURCE_KEY = dg.AssetKey([NAME, "source", "pg", "public", "orders"])


def commit(store: StateStore, lease: Lease, to: int, *names: str) -> None:
    """Record a commit of five changes to each table."""
    columns = [("id", "bigint"), ("total", "decimal(10,2)")]
    changed = store.now() - 60
    with store.fenced(lease) as writer:
        if to == 1:
            writer.table_commits.restart(SINK, 0)
        writes = [
            TableWrite(
                ("public", one), ("raw", one), columns, 5, position(to), changed, figures=FIGURES
            )
            for one in names
        ]
        writer.table_commits.advance(SINK, to, (), writes)


def publish(instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline) -> int:
    """Publish; return how many events were written."""
    return publish_writes(instance, store, loaded, instance.report_runless_asset_event)


def events(instance: dg.DagsterInstance) -> list[dg.AssetMaterialization]:
    """Return the events of `orders`, oldest first."""
    found = instance.fetch_materializations(KEY, limit=10, ascending=True)
    return [one.asset_materialization for one in found.records if one.asset_materialization]


def installation(folder: Path, kind: str) -> Settings:
    """Return the settings of an installation with one pipeline, whose sink writes tables."""
    place: dict[str, object] = {"path": str(folder / "lake")}
    if kind == "iceberg":
        place = {"catalog_properties": {"type": "hadoop", "warehouse": place["path"]}}
    source = {"id": "pg", "dsn": "postgres://u@localhost/app", "slot": "s", "publication": "p"}
    document = {
        "metadata": {"name": NAME, "tenant": "acme"},
        "spec": {
            "source": {"type": "postgres", "config": source | {"tables": ["public.*"]}},
            "sinks": [{"type": kind, "config": {"id": SINK, "mode": "current", **place}}],
        },
    }
    (folder / "orders.yaml").write_text(yaml.safe_dump(document))
    return Settings.from_env(
        {"DELTAFORGE_PIPELINES": str(folder), "DELTAFORGE_HOME": str(folder / "home")}
    )


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPipeline:
    """The pipeline whose tables are published."""
    installation(tmp_path, "delta")
    return load_pipeline(tmp_path / "orders.yaml")


def test_each_commit_is_a_materialization(
    sqlite_store: StateStore,
    instance: dg.DagsterInstance,
    loaded: LoadedPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is written once, with changes, columns, where these come from, lag, and the position as data version."""
    monkeypatch.setattr(lake_tables, "EVENT_SECONDS", 0.0)
    lease = held(sqlite_store, SINK)
    with sqlite_store.fenced(lease) as writer:
        writer.schemas.register("acme", table("id", "note"), position(1))
    commit(sqlite_store, lease, 1, "orders", "a_b")
    assert publish(instance, sqlite_store, loaded) == 2
    commit(sqlite_store, lease, 2, "orders")
    assert publish(instance, sqlite_store, loaded) == 1
    event = instance.get_latest_materialization_event(maintenance_key(NAME, SINK))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["maintenance"].value == "not due yet"
    assert publish(instance, sqlite_store, loaded) == 0
    commit(sqlite_store, lease, 3, "a_b")
    assert publish(instance, sqlite_store, loaded) == 1

    first, second = events(instance)
    assert [one.tags for one in (first, second)] == [
        {"dagster/data_version": f"{number}:{position(number)}"} for number in (1, 2)
    ]
    shown: dict[str, Any] = {name: one.value for name, one in second.metadata.items()}
    assert 60 <= shown.pop("lag_seconds") < 3600
    assert shown.pop("written_at") > 0
    assert shown == {
        "changes": 5,
        "version": str(2**60 + 1),
        "files": 3,
        "bytes": 4096,
        "dagster/row_count": 7,
        "table": "raw.orders",
        "segment": "2",
        "position": position(2),
        "dagster/column_schema": dg.TableSchema(
            [dg.TableColumn("id", "bigint"), dg.TableColumn("total", "decimal(10,2)")]
        ),
        "dagster/column_lineage": dg.TableColumnLineage(
            {"id": [dg.TableColumnDep(SOURCE_KEY, "id")]}
        ),
    }


def test_the_commits_of_a_minute_are_one_materialization(
    sqlite_store: StateStore,
    instance: dg.DagsterInstance,
    loaded: LoadedPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is reported at once, the next ones together later, with the sum of their changes and the newest position."""
    lease = held(sqlite_store, SINK)
    commit(sqlite_store, lease, 1, "orders")
    assert publish(instance, sqlite_store, loaded) == 1
    for number in (2, 3, 4):
        commit(sqlite_store, lease, number, "orders")
        assert publish(instance, sqlite_store, loaded) == 0
    commit(sqlite_store, lease, 5, "a_b")
    assert publish(instance, sqlite_store, loaded) == 1, "another table does not wait for it"
    assert len(sqlite_store.table_commits.unpublished(NAME)) == 3

    monkeypatch.setattr(lake_tables, "EVENT_SECONDS", 0.0)
    assert publish(instance, sqlite_store, loaded) == 1

    first, second = events(instance)
    assert (first.metadata["changes"].value, second.metadata["changes"].value) == (5, 15)
    assert second.tags == {"dagster/data_version": f"4:{position(4)}"}
    assert second.metadata["segment"].value == "4"
    assert sqlite_store.table_commits.unpublished(NAME) == []


def test_an_event_without_its_mark_is_not_written_again(
    sqlite_store: StateStore,
    instance: dg.DagsterInstance,
    loaded: LoadedPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a kill between event and mark, the next publisher writes the mark, and an event of later commits only."""
    monkeypatch.setattr(lake_tables, "EVENT_SECONDS", 0.0)
    lease = held(sqlite_store, SINK)
    commit(sqlite_store, lease, 1, "orders")
    commit(sqlite_store, lease, 2, "orders")

    def report_and_die(event: dg.AssetMaterialization | dg.AssetObservation) -> None:
        instance.report_runless_asset_event(event)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        publish_writes(instance, sqlite_store, loaded, report_and_die)
    commit(sqlite_store, lease, 3, "orders")

    assert publish(instance, sqlite_store, loaded) == 1
    assert [event.metadata["changes"].value for event in events(instance)] == [10, 5]
    assert sqlite_store.table_commits.unpublished(NAME) == []


def test_commits_may_be_observations(
    sqlite_store: StateStore,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what a materialization has, once a minute at most; one whose mark a kill has lost is not written again."""
    path = tmp_path / "orders.yaml"
    installation(tmp_path, "delta")
    document = yaml.safe_load(path.read_text())
    document["spec"]["engine"] = {"dagster": {"events": "observations"}}
    path.write_text(yaml.safe_dump(document))
    loaded = load_pipeline(path)
    lease = held(sqlite_store, SINK)

    def report_and_die(event: dg.AssetMaterialization | dg.AssetObservation) -> None:
        instance.report_runless_asset_event(event)
        raise KeyboardInterrupt

    commit(sqlite_store, lease, 1, "orders")
    with contextlib.suppress(KeyboardInterrupt):
        publish_writes(instance, sqlite_store, loaded, report_and_die)
    commit(sqlite_store, lease, 2, "orders")
    commit(sqlite_store, lease, 3, "orders")
    assert publish(instance, sqlite_store, loaded) == 0
    assert len(sqlite_store.table_commits.unpublished(NAME)) == 2
    monkeypatch.setattr(lake_tables, "EVENT_SECONDS", 0.0)
    assert publish(instance, sqlite_store, loaded) == 1

    assert events(instance) == []
    found = instance.fetch_observations(KEY, limit=9, ascending=True).records
    observed = [one.asset_observation for one in found if one.asset_observation]
    assert [one.metadata["changes"].value for one in observed] == [5, 10]
    assert [one.tags["dagster/data_version"] for one in observed] == [
        f"{number}:{position(number)}" for number in (1, 3)
    ]


def test_a_run_reports_them_as_events_of_no_run(
    sqlite_store: StateStore, instance: dg.DagsterInstance, loaded: LoadedPipeline
) -> None:
    """Dagster+ does not charge for such events."""
    lease = held(sqlite_store, SINK)
    commit(sqlite_store, lease, 1, "orders")
    nothing: Any = None
    run_context = RunContext(sqlite_store, Journal("memory://x"), *[nothing] * 4)

    @dg.asset
    def ranges(context: dg.AssetExecutionContext) -> None:
        RunObserver(context, run_context, loaded).publish()

    dg.materialize([ranges], instance=instance)

    (record,) = instance.fetch_materializations(KEY, limit=9).records
    assert record.run_id == ""
    assert publish(instance, sqlite_store, loaded) == 0


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_other_assets_follow_a_table(
    tmp_path: Path, instance: dg.DagsterInstance, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an asset below its sink's and the source's table; one that waits for new data gets it once per event."""
    monkeypatch.setattr(lake_tables, "EVENT_SECONDS", 0.0)
    settings = installation(tmp_path, kind)
    loaded = load_pipeline(tmp_path / "orders.yaml")
    store = StateStore.open(settings.state_url)
    lease = held(store, SINK)
    commit(store, lease, 1, *NAMES)

    @dg.asset(deps=[KEY], automation_condition=dg.AutomationCondition.eager())
    def report() -> None:
        """What somebody makes of the table."""

    definitions = dg.Definitions.merge(build_definitions(settings), dg.Definitions(assets=[report]))
    dg.Definitions.validate_loadable(definitions)
    graph = definitions.resolve_asset_graph()
    for one in NAMES:
        node = graph.get(dg.AssetKey([NAME, SINK, "public", f"{one}_{SINK}"]))
        assert (node.kinds, node.group_name) == ({kind}, f"{NAME}_{SINK}")
        source = dg.AssetKey([NAME, "source", "pg", "public", one])
        assert node.parent_keys == {dg.AssetKey([NAME, "sinks", SINK]), source}
        assert (graph.get(source).kinds, graph.get(source).is_executable) == ({"postgres"}, False)
        assert graph.get(source).group_name == f"{NAME}_pg"
        assert not node.is_executable
        assert node.metadata["dagster/table_name"] == f"raw.{one}"
        assert node.metadata["dagster/column_schema"].columns[1].type == "decimal(10,2)"

    cursor, asked = None, []
    for step in (0, 1, 0, 2, 0, 3):
        if step == 2:
            commit(store, lease, 2, "orders")
        if step == 3:  # which is no new data
            made = MaintainedTable(("raw", "orders"), compacted=True)
            stored = store.table_commits.tables(NAME)[-1]
            instance.report_runless_asset_event(observation(NAME, stored, made))
        elif step:
            publish(instance, store, loaded)
        found = dg.evaluate_automation_conditions(
            definitions, instance, dg.AssetSelection.assets(report), cursor=cursor
        )
        cursor = found.cursor
        asked.append(found.get_num_requested(report.key))
        if asked[-1]:
            dg.materialize([report], instance=instance)
    store.close()
    assert asked == [0, 1, 0, 1, 0, 0]


def test_a_table_that_two_sinks_keep_is_one_of_the_source(tmp_path: Path) -> None:
    """Its asset is there once, also if a sink is called like the source, or `source`."""
    settings = installation(tmp_path, "delta")
    path = tmp_path / "orders.yaml"
    document = yaml.safe_load(path.read_text())
    (sink,) = document["spec"]["sinks"]
    document["spec"]["sinks"] = [
        {"type": "delta", "config": sink["config"] | {"id": one, "path": f"/{one}"}}
        for one in ("source", "pg")
    ]
    path.write_text(yaml.safe_dump(document))
    write = TableWrite(("public", "orders"), ("raw", "orders"), (), 5, position(1), 0.0)
    with contextlib.closing(StateStore.open(settings.state_url)) as store:
        lease = held(store, "source", "pg")
        with store.fenced(lease) as writer:
            for one in ("source", "pg"):
                writer.table_commits.restart(one, 0)
                writer.table_commits.advance(one, 1, (), [write])

    graph = build_definitions(settings).resolve_asset_graph()

    assert graph.get(SOURCE_KEY).child_keys == {
        dg.AssetKey([NAME, one, "public", f"orders_{one}"]) for one in ("source", "pg")
    }


def test_a_new_table_makes_dagster_reload(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """The sensor of the files asks for it, also if there was no state store when the definitions were loaded."""
    settings = installation(tmp_path, "delta")

    def said() -> str:
        sensor = definitions.get_repository_def().get_sensor_def("pipeline_files")
        data = sensor.evaluate_tick(dg.build_sensor_context(instance))
        return str(data.skip_message)

    definitions = build_definitions(settings)
    assert said() == "Dagster's definitions are up to date"
    store = StateStore.open(settings.state_url)
    lease = held(store, SINK)
    commit(store, lease, 1, "orders")
    assert said().startswith(f"new tables: orders/lake/public/orders_{SINK}: press Reload")

    definitions = build_definitions(settings)
    commit(store, lease, 2, "orders")
    assert said() == "Dagster's definitions are up to date"
    commit(store, lease, 3, "a_b")
    assert said().startswith(f"new tables: orders/lake/public/a_b_{SINK}: press Reload")
    store.close()


def test_captured_tables_are_assets_before_they_are_written(tmp_path: Path) -> None:
    """Those that the file names, from the first load on; for a pattern, those that have been seen.

    The source cannot be reached. A table that no pattern matches any more is not shown.
    """
    settings = installation(tmp_path, "delta")
    path = tmp_path / "orders.yaml"
    document = yaml.safe_load(path.read_text())
    source = document["spec"]["source"]["config"]

    def shown() -> set[str]:
        path.write_text(yaml.safe_dump(document))
        graph = build_definitions(settings).resolve_asset_graph()
        tables = {key for key in graph.get_all_asset_keys() if key.path[1] == SINK}
        for key in tables:
            assert graph.get(key).parent_keys == {
                dg.AssetKey([NAME, "sinks", SINK]),
                dg.AssetKey([NAME, "source", "pg", key.path[2], key.path[3].removesuffix("_lake")]),
            }
        return {key.path[3].removesuffix(f"_{SINK}") for key in tables}

    assert shown() == set()
    source["tables"] = ["public.orders", "customers", "shop_*.orders"]
    assert shown() == {"orders", "customers"}

    with contextlib.closing(StateStore.open(settings.state_url)) as store:
        lease = held(store, SINK)
        with store.fenced(lease) as writer:
            for schema in ("shop_1", "other"):
                seen = replace(table("id", name=f"{schema}_orders"), schema=schema)
                writer.schemas.register("acme", seen, position(1))
        source["tables"] = ["public.customers", "shop_*.*"]
        assert shown() == {"customers", "shop_1_orders"}
        commit(store, lease, 1, "customers", "former")
    assert shown() == {"customers", "shop_1_orders", "former"}
