"""What sinks lack of tables with gaps, and the commands that give it to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.health.health import HealthProblem, health
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import LoggedTable
from tests.pipeline.control.test_recover import FILE

A, B = "public.a", "public.b"


@pytest.fixture
def shop(sqlite_store: StateStore, tmp_path: Path) -> LoadedPipeline:
    """A registered pipeline with a Redis sink and one that keeps tables."""
    path = tmp_path / "shop.yaml"
    path.write_text(FILE.format(snapshot="", start=""))
    loaded = load_pipeline(path)
    register(sqlite_store, loaded)
    return loaded


def problems(store: StateStore, shop: LoadedPipeline) -> list[HealthProblem]:
    """Return the problems of tables."""
    return [one for one in health(store, shop).problems if one.subject.startswith("table ")]


def test_several_tables_have_one_remedy(sqlite_store: StateStore, shop: LoadedPipeline) -> None:
    """One snapshot and one resync for all tables: each snapshot would have to wait for the one before."""
    sqlite_store.gaps.note("shop", {A: LoggedTable("1", whole=False, empty=False)}, 1.0)
    later = {one: LoggedTable(f"{one} 2", whole=False, empty=False) for one in (A, B)}
    sqlite_store.gaps.note("shop", later, 2.0)
    first, second = problems(sqlite_store, shop)
    assert (first.subject, second.subject) == (f"table {A}", f"table {B}")
    assert first.text.startswith(
        "the table was dropped and another one made between 1970-01-01 00:00:02 UTC and "
    )
    assert second.text.startswith("rows written before ")
    assert first.remedy == (
        f"deltaforge snapshot start shop --tables {A},{B} --sinks copy,redis",
        f"deltaforge resync shop --sink copy --tables {A}",
    )
    assert second.remedy == ()

    sqlite_store.snapshots.request("shop", tables=[A, B], cause="command", sinks=["copy", "redis"])
    first, second = problems(sqlite_store, shop)
    assert first.remedy == (f"deltaforge resync shop --sink copy --tables {A}",)
    sqlite_store.table_commits.resync("shop", "copy", {("copied", "a"): A})
    first, second = problems(sqlite_store, shop)
    assert (first.severity, first.remedy, second.remedy) == ("error", (), ())
    assert sqlite_store.gaps.acknowledge("shop") == [A, B]
    assert problems(sqlite_store, shop) == []


def test_a_log_that_has_every_row(sqlite_store: StateStore, shop: LoadedPipeline) -> None:
    """Messages lack nothing of a table that was made again; the copy has rows of the former."""
    sqlite_store.gaps.note("shop", {A: LoggedTable("1", whole=True, empty=False)}, 1.0)
    sqlite_store.gaps.note("shop", {A: LoggedTable("2", whole=True, empty=False)}, 2.0)
    (problem,) = problems(sqlite_store, shop)
    assert problem.remedy == (f"deltaforge resync shop --sink copy --tables {A}",)
    assert "gone; this concerns copy (if" in problem.text
