"""Tests of the checks of sensing."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.sensing import DAY, sensing_checks
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.sensed import documents, pipeline, sense
from tests.processors.rows import Row

WARN = dg.AssetCheckSeverity.WARN


def at(rows: list[Row], seconds: float) -> list[Row]:
    """Return rows whose events happened at this time."""
    return [{**one, "ts_us": int(seconds * 1e6)} for one in rows]


def outcomes(store: StateStore, loaded: LoadedPipeline) -> dict[str, tuple[bool, str | None]]:
    """Return for each check whether it passed, and its description."""
    found = list(sensing_checks(store, loaded))
    assert {one.severity for one in found} <= {WARN}
    return {one.check_name: (one.passed, one.description) for one in found}


def test_only_where_it_is_enabled(sqlite_store: StateStore, tmp_path: Path) -> None:
    """A pipeline without sensing does not have its checks."""
    for sensing, names in (("enabled: true", {"sensing", "drift"}), ("enabled: false", set())):
        loaded = pipeline(tmp_path, sensing)
        assert {one.name for one in check_specs(loaded)} & {"sensing", "drift"} == names
        assert outcomes(sqlite_store, loaded).keys() == names


def test_drift_warns_for_a_day(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Differing columns are named with the kind of difference and without values; old drift is not."""
    loaded = pipeline(tmp_path)
    sense(sqlite_store, loaded, at(documents(31), time.time()))
    assert outcomes(sqlite_store, loaded) == {
        "sensing": (True, None),
        "drift": (False, "public.orders.gone: missing_column\npublic.orders.id: unexpected_null"),
    }


def test_what_is_long_past_passes(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Drift that was last seen more than a day ago no longer counts."""
    loaded = pipeline(tmp_path, "enabled: true")
    sense(sqlite_store, loaded, at(documents(31), time.time() - DAY - 60))
    assert outcomes(sqlite_store, loaded)["drift"] == (True, None)


def test_a_failure_warns(sqlite_store: StateStore, tmp_path: Path) -> None:
    """The check has the reason why sensing has stopped."""
    loaded = pipeline(tmp_path)
    lease = sense(sqlite_store, loaded, documents(2))
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.fail("segment 2: missing")
    assert outcomes(sqlite_store, loaded)["sensing"] == (False, "segment 2: missing")
