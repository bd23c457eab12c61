"""A sink that waits until what it has already is captured again, in real runs."""

from __future__ import annotations

import shutil
import time

import pytest

from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.state.records import CheckpointRow
from tests.e2e.conftest import shop
from tests.pipeline.test_exactly_once import ENDS, NEVER, MakeWorld, make_world, numbers

__all__ = ["make_world", "shop"]

pytestmark = [pytest.mark.spark, pytest.mark.parametrize("ends", ENDS[:1])]


def test_a_run_ends_only_when_the_sink_has_looked(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it looks in what was captured last, a run until caught up delivers that, too."""
    world = make_world(NEVER)
    world.deliver(1, 10)
    world.end()
    shutil.rmtree(world.home)
    looks: list[str] = []
    settle = Resumption.settle

    def late(resumption: Resumption, sink: Sink, checkpoint: CheckpointRow) -> CheckpointRow | None:
        looks.append("")
        if len(looks) == 1:
            return None  # as before anything was captured
        time.sleep(3)
        return settle(resumption, sink, checkpoint)

    monkeypatch.setattr(Resumption, "settle", late)
    world.insert(11, 20)
    world.begin()

    assert len(looks) > 1
    assert world.sink.arrived() == numbers(1, 20)
