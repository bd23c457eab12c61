"""From which columns of the source those of a lake table come, under rules and processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from deltaforge_dagster.assets.lake_tables import column_lineage
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.state.schemas import TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.state.make import NAME, held, position, table

SOURCE = dg.AssetKey([NAME, "source", "pg", "public", "orders"])
SCRIPT = {"type": "javascript", "inline": "(event) => [event]"}
WHERE = {"type": "sql", "where": "op <> 'd'"}


def pipeline(
    folder: Path, columns: dict[str, Any] | None = None, *processors: dict[str, Any]
) -> LoadedPipeline:
    """Return a pipeline with column rules and processors."""
    source = {"id": "pg", "dsn": "postgres://u@localhost/app", "slot": "s", "publication": "p"}
    document = {
        "metadata": {"name": NAME, "tenant": "acme"},
        "spec": {
            "source": {"type": "postgres", "config": source | {"tables": ["public.*"]}},
            "processors": [{"id": f"p{i}", **one} for i, one in enumerate(processors)],
            "sinks": [{"type": "delta", "config": {"id": "lake", "path": "/lake"}}],
            "engine": {"columns": columns or {}},
        },
    }
    path = folder / "orders.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_pipeline(path)


@pytest.fixture
def history(sqlite_store: StateStore) -> TableHistory:
    """A table that had `id` and `old` first, later `id`, `Total` and `note`."""
    lease = held(sqlite_store)
    for at, columns in ((1, ["id", "old"]), (3, ["id", "Total", "note"])):
        with sqlite_store.fenced(lease) as writer:
            writer.schemas.register("acme", table(*columns), position(at))
    return sqlite_store.schemas.history(NAME, "public.orders")


def lineage(
    loaded: LoadedPipeline, history: TableHistory, *columns: str, at: int = 4
) -> dict[str, str] | None:
    """Return from which column of the source each column of a lake table comes."""
    written = [(name, "string") for name in columns]
    write = TableWrite(("public", "orders"), ("raw", "orders"), written, 1, position(at), 0.0)
    found = column_lineage(loaded, history, write)
    if found is None:
        return None
    for (dep,) in found.deps_by_column.values():
        assert dep.asset_key == SOURCE
    return {name: dep.column_name for name, (dep,) in found.deps_by_column.items()}


COLUMNS = ("id", "total", "note", "old", "df_op", "df_position")
ALL = {"id": "id", "total": "Total", "note": "note"}


def test_columns_of_the_same_name(tmp_path: Path, history: TableHistory) -> None:
    """Whatever their case; our own columns, and those that the source does not have any more, come from nowhere."""
    loaded = pipeline(tmp_path)

    assert lineage(loaded, history, *COLUMNS) == ALL
    assert lineage(loaded, history, "df_op") is None


def test_as_of_the_commit(tmp_path: Path, history: TableHistory) -> None:
    """A commit that has not reached a change of the table has the columns of before."""
    loaded = pipeline(tmp_path)

    assert lineage(loaded, history, *COLUMNS, at=2) == {"id": "id", "old": "old"}
    assert lineage(loaded, history, *COLUMNS, at=0) is None


def test_rules(tmp_path: Path, history: TableHistory) -> None:
    """A masked value says nothing of the source's; a hashed or shortened one comes from it."""
    rules = {
        "mask": {"orders.note": "***"},
        "hash": {"columns": ["orders.total"], "salt": "0123456789abcdef"},
    }

    assert lineage(pipeline(tmp_path, rules), history, *COLUMNS) == {"id": "id", "total": "Total"}
    of_key = {"mask": {"orders.id": "***"}}  # with which nothing is captured
    assert lineage(pipeline(tmp_path, of_key), history, *COLUMNS) is None


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        pytest.param({"type": "filter", "ops": ["create"]}, ALL, id="filter"),
        pytest.param(WHERE, ALL, id="sql that only filters"),
        pytest.param(
            {"type": "sql", "set": {"after.TOTAL": "1", "before.note": "'x'"}},
            {"id": "id"},
            id="sql",
        ),
        pytest.param(SCRIPT, None, id="script"),
        pytest.param({"type": "flatten"}, None, id="flatten"),
    ],
)
def test_processors(
    tmp_path: Path,
    history: TableHistory,
    processor: dict[str, Any],
    expected: dict[str, str] | None,
) -> None:
    """What a processor computes does not come from the column of its name, and of a script nothing is known."""
    assert lineage(pipeline(tmp_path, None, WHERE, processor), history, *COLUMNS) == expected
