"""What a code server keeps open between ticks, and when it opens it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import Terminal
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sensors.kept import Kept


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance that other processes could open, too."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as made:
        yield made


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """An installation's."""
    return Kept(Platform(Settings.from_env({"DELTAFORGE_HOME": str(tmp_path / "home")})))


def a_tick(instance: dg.DagsterInstance) -> dg.SensorEvaluationContext:
    """Return the context of a tick in a code server, which knows only where Dagster's storage is."""
    return dg.SensorEvaluationContext(
        instance_ref=instance.get_ref(),
        last_tick_completion_time=None,
        last_run_key=None,
        cursor=None,
        repository_name=None,
    )


def test_ticks_share_what_the_first_one_opened(kept: Kept, instance: dg.DagsterInstance) -> None:
    """A second tick opens neither Dagster's storage nor the state store."""
    with kept.lend(a_tick(instance)) as first:
        first[1].store.register_pipeline("orders", "hash", ["redis"])
    with kept.lend(a_tick(instance)) as second:
        assert second[0] is first[0]
        assert second[1] is first[1]
        assert [one.name for one in second[1].store.pipelines()] == ["orders"]


def test_a_tick_by_hand_has_its_own_instance(kept: Kept) -> None:
    """A context that was given an instance lends that one."""
    own = dg.DagsterInstance.ephemeral()
    with own, kept.lend(dg.build_sensor_context(own)) as (lent, _):
        assert lent is own


def test_another_storage_of_dagster(kept: Kept, instance: dg.DagsterInstance) -> None:
    """What was kept is lent only for the storage that a tick names."""
    with kept.lend(a_tick(instance)) as (first, _):
        pass
    with dg.DagsterInstance.local_temp() as other, kept.lend(a_tick(other)) as (second, _):
        assert second.get_ref() == other.get_ref() != first.get_ref()


def test_a_store_that_cannot_be_used_is_opened_anew(
    kept: Kept, instance: dg.DagsterInstance
) -> None:
    """After an error that no repetition mends, the next tick opens the store again."""
    with pytest.raises(Terminal), kept.lend(a_tick(instance)) as (_, first):
        raise Terminal("the file is another one")
    with kept.lend(a_tick(instance)) as (_, second):
        assert second is not first
        assert second.store.pipelines() == []
