"""Tests of what is deleted from Dagster's storage, in SQLite and in PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    InProcessCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
    TickData,
    TickStatus,
)
from dagster._core.storage.event_log import SqlEventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    SqlEventLogStorageTable,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from deltaforge_dagster.assets.names import (
    asset_key,
    health_key,
    lake_table_key,
    maintenance_key,
    schemas_key,
    snapshot_key,
    source_table_key,
)
from deltaforge_dagster.sensors import history
from deltaforge_dagster.sensors.history import (
    delete_runs,
    forget_assets,
    forget_events,
    forget_partitions,
    forget_ticks,
)
from deltaforge_lab.servers.postgres import PostgresServer

KEY, OTHER = dg.AssetKey(["shop", "changes"]), dg.AssetKey(["else", "changes"])
DOCKER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def instance(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance with SQLite or PostgreSQL storage."""
    settings = ""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.create_database().replace("postgres", "postgresql+psycopg2", 1)
        monkeypatch.setenv("DAGSTER_POSTGRES_URL", url)
        settings = DOCKER_YAML.read_text()
    (tmp_path / "dagster.yaml").write_text(settings)
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job
def work() -> None:
    """A job for runs to create."""
    nothing()


@dg.asset(key=snapshot_key("shop"), partitions_def=dg.StaticPartitionsDefinition(["a/1"]))
def chunk() -> None:
    """Read a chunk that somebody chose."""


def rows(instance: dg.DagsterInstance, query: sa.Select[tuple[object]]) -> list[object]:
    """Return the first column of a query on the event storage."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    with storage.index_connection() as connection:
        return list(connection.execute(query).scalars())


def test_events_without_a_run(instance: dg.DagsterInstance) -> None:
    """Events of earlier partitions and old evaluations are deleted; the newest of each, and other assets, are kept."""
    for key in (KEY, OTHER):
        for number in range(1, 5):
            instance.report_runless_asset_event(
                dg.AssetMaterialization(key, partition=f"{number:010d}", tags={"a": "b"})
            )
            instance.report_runless_asset_event(dg.AssetObservation(key, tags={"a": "b"}))
            for check in ("source", "holds"):
                evaluation = dg.AssetCheckEvaluation(
                    asset_key=key, check_name=check, passed=number % 2 == 0
                )
                instance.report_runless_asset_event(evaluation)
    log = SqlEventLogStorageTable.c
    everything = len(rows(instance, sa.select(log.id)))

    assert forget_events(instance, [KEY], f"{3:010d}", time.time() - 86400) == 2 + 3
    assert forget_events(instance, [KEY], f"{9:010d}", time.time() + 86400) == 1

    kept = sa.select(log.partition).where(
        log.asset_key == KEY.to_string(), log.partition.is_not(None)
    )
    assert rows(instance, kept) == [f"{4:010d}"]
    checks = AssetCheckExecutionsTable.c
    of_ours = sa.select(checks.id).where(checks.asset_key == KEY.to_string())
    assert len(rows(instance, of_ours)) == 2
    assert len(rows(instance, sa.select(checks.id))) == 10
    assert len(rows(instance, sa.select(log.id))) == everything - 3 - 3 - 6
    newest = instance.get_latest_materialization_event(KEY)
    assert newest is not None
    assert newest.asset_materialization is not None
    assert newest.asset_materialization.partition == f"{4:010d}"
    left = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(KEY, "source"), limit=9
    )
    assert len(left) == 1


def test_chunks_of_former_snapshots(instance: dg.DagsterInstance) -> None:
    """The newest event of each kept partition stays, so that it is shown as filled; those of runs stay, too."""
    key = snapshot_key("shop")

    for number, partition in enumerate(("a/1", "a/2", "gone/1", "a/2"), start=1):
        event = dg.AssetMaterialization(key, partition=partition, metadata={"n": number})
        instance.report_runless_asset_event(event)
    instance.report_runless_asset_event(dg.AssetMaterialization(OTHER, partition="gone/1"))
    dg.materialize([chunk], instance=instance, partition_key="a/1")

    assert forget_partitions(instance, key, {"a/1", "a/2"}) == 2

    records = instance.fetch_materializations(key, limit=9).records
    left = [record.asset_materialization for record in records]
    numbers = [event.metadata["n"].value for event in left if event and "n" in event.metadata]
    assert (len(left), numbers) == (3, [4, 1])
    assert instance.get_materialized_partitions(key) == {"a/1", "a/2"}
    assert len(instance.fetch_materializations(OTHER, limit=9).records) == 1
    assert forget_partitions(instance, key, {"a/1", "a/2"}) == 0


def test_no_more_evaluations_than_a_tick_should_read(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limited number of the newest evaluations of each check is kept, with their events."""
    monkeypatch.setattr(history, "KEPT_EVALUATIONS", 3)
    for number in range(8):
        for check in ("source", "holds")[: 1 + (number < 2)]:
            evaluation = dg.AssetCheckEvaluation(
                asset_key=KEY, check_name=check, passed=True, description=str(number)
            )
            instance.report_runless_asset_event(evaluation)

    assert forget_events(instance, [KEY], f"{1:010d}", time.time() - 86400) == 0

    said = {
        check: [
            one.event.dagster_event.asset_check_evaluation_data.description
            for one in instance.event_log_storage.get_asset_check_execution_history(
                dg.AssetCheckKey(KEY, check), limit=9
            )
            if one.event is not None and one.event.dagster_event is not None
        ]
        for check in ("source", "holds")
    }
    assert said == {"source": ["7", "6", "5"], "holds": ["1", "0"]}
    assert len(rows(instance, sa.select(SqlEventLogStorageTable.c.id))) == 5


def test_runs_with_everything_of_theirs(instance: dg.DagsterInstance) -> None:
    """Ended runs are deleted with events and output, up to a limit; others are kept."""
    runs = [work.execute_in_process(instance=instance).run_id for _ in range(3)]
    left = instance.create_run_for_job(work, status=dg.DagsterRunStatus.STARTED).run_id
    folder = Path(instance.storage_directory()) / runs[0]
    folder.mkdir(parents=True, exist_ok=True)

    later = datetime.now(UTC) + timedelta(hours=1)
    assert delete_runs(instance, later - timedelta(days=1), 2, job="work") == 0
    assert delete_runs(instance, later, 2, job="work") == 2

    assert {run.run_id for run in instance.get_runs()} == {runs[2], left}
    assert not folder.exists()
    log = SqlEventLogStorageTable.c
    assert set(rows(instance, sa.select(log.run_id))).isdisjoint(runs[:2])
    storage = instance.event_log_storage
    if isinstance(storage, SqliteEventLogStorage):
        files = [Path(storage.path_for_shard(run_id)).exists() for run_id in runs]
        assert files == [False, False, True]


def test_ticks(instance: dg.DagsterInstance) -> None:
    """Skipped ticks are deleted after an hour, others after a week; those of other sensors are kept."""
    location = InProcessCodeLocationOrigin(
        LoadableTargetOrigin(module_name="m"), location_name="here"
    )
    now = time.time()
    kept = {}
    for name in ("shop_work", "foreign"):
        origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "repository"), name)
        state = InstigatorState(
            origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData()
        )
        instance.add_instigator_state(state)
        for age, status in (
            (60, TickStatus.SKIPPED),
            (2 * 3600, TickStatus.SKIPPED),
            (2 * 3600, TickStatus.SUCCESS),
            (8 * 86400, TickStatus.SUCCESS),
        ):
            instance.create_tick(
                TickData(
                    instigator_origin_id=state.instigator_origin_id,
                    instigator_name=name,
                    instigator_type=InstigatorType.SENSOR,
                    status=status,
                    timestamp=now - age,
                    selector_id=state.selector_id,
                    run_ids=["run"] if status == TickStatus.SUCCESS else None,
                )
            )
        kept[name] = state

    forget_ticks(instance, {"shop_work"})

    left = {
        name: [
            one.status for one in instance.get_ticks(state.instigator_origin_id, state.selector_id)
        ]
        for name, state in kept.items()
    }
    assert left["shop_work"] == [TickStatus.SKIPPED, TickStatus.SUCCESS]
    assert len(left["foreign"]) == 4


def test_assets_of_removed_pipelines(instance: dg.DagsterInstance) -> None:
    """All of a pipeline's go, and none of somebody else's whose keys begin with the same name."""
    ours = [
        asset_key("shop", "changes"),
        asset_key("shop", "lake"),
        health_key("shop"),
        lake_table_key("shop", "lake", ("public", "orders")),
        maintenance_key("shop", "lake"),
        schemas_key("shop"),
        snapshot_key("shop"),
        source_table_key("shop", "pg", ("public", "orders")),
    ]
    theirs = [["shop"], ["shop", "orders"], ["shop", "marts", "public", "orders"]]
    theirs += [["shop_2", "changes"], ["shop", "dbt", "x", "y_dbt"]]
    for key in [*ours, *map(dg.AssetKey, theirs)]:
        instance.report_runless_asset_event(dg.AssetMaterialization(key))

    assert forget_assets(instance, ["shop"]) == len(ours)

    assert sorted(list(key.path) for key in instance.get_asset_keys()) == sorted(theirs)
    assert forget_assets(instance, ["shop"]) == 0
