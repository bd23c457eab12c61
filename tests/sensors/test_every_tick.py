"""Tests of what a code server keeps open between ticks, and when it opens it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.event_log import SqlEventLogStorage

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import Terminal
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sensors.every_tick import TickCache
from tests.fix_postgres import StartPostgres

DAGSTER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance that other processes could open."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as made:
        yield made


@pytest.fixture
def cache(tmp_path: Path) -> TickCache:
    """The cache of an installation."""
    return TickCache(Platform(Settings.from_env({"DELTAFORGE_HOME": str(tmp_path / "home")})))


def a_tick(instance: dg.DagsterInstance) -> dg.SensorEvaluationContext:
    """Return the context of a tick in a code server, which has only a reference to Dagster's instance."""
    return dg.SensorEvaluationContext(
        instance_ref=instance.get_ref(),
        last_tick_completion_time=None,
        last_run_key=None,
        cursor=None,
        repository_name=None,
    )


def test_ticks_share_what_the_first_one_opened(
    cache: TickCache, instance: dg.DagsterInstance
) -> None:
    """A second tick opens neither Dagster's storage nor the state store."""
    with cache.lend(a_tick(instance)) as first:
        first[1].store.pipelines.register("orders", "hash", ["redis"])
    with cache.lend(a_tick(instance)) as second:
        assert second[0] is first[0]
        assert second[1] is first[1]
        assert [one.name for one in second[1].store.pipelines.read()] == ["orders"]


def test_a_tick_by_hand_has_its_own_instance(cache: TickCache) -> None:
    """A context that was given an instance uses that instance."""
    own = dg.DagsterInstance.ephemeral()
    with own, cache.lend(dg.build_sensor_context(own)) as (lent, _):
        assert lent is own


def test_another_storage_of_dagster(cache: TickCache, instance: dg.DagsterInstance) -> None:
    """The cached instance is used only for the same storage."""
    with cache.lend(a_tick(instance)) as (first, _):
        pass
    with dg.DagsterInstance.local_temp() as other, cache.lend(a_tick(other)) as (second, _):
        assert second.get_ref() == other.get_ref() != first.get_ref()


def test_after_an_error_all_is_reopened(cache: TickCache, instance: dg.DagsterInstance) -> None:
    """After an error, such as a replaced store file, the next tick opens everything again."""
    with pytest.raises(Terminal), cache.lend(a_tick(instance)) as (_, first):
        raise Terminal("the file is another one")
    with cache.lend(a_tick(instance)) as (_, second):
        assert second is not first
        assert second.store.pipelines.read() == []


@pytest.mark.postgres
def test_a_restart_of_dagsters_database(
    start_postgres: StartPostgres, cache: TickCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections are kept between ticks, and a restart of the database fails no tick."""
    server = start_postgres(None)
    url = server.create_database().replace("postgres", "postgresql+psycopg2", 1)
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", url)
    (tmp_path / "dagster.yaml").write_text(DAGSTER_YAML.read_text())
    connections = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"

    def looked() -> int:
        with cache.lend(a_tick(central)) as (lent, _):
            lent.get_runs(limit=1)
            lent.get_dynamic_partitions("none")
            storage = lent.event_log_storage
            assert isinstance(storage, SqlEventLogStorage)
            with storage.index_connection() as connection:
                return int(connection.exec_driver_sql(connections).scalar_one())

    with dg.DagsterInstance.from_config(str(tmp_path)) as central:
        assert looked() == looked() == 2, "one of the runs' storage, one of the events'"
        server.restart()
        assert looked() == 2
