"""Writing the objects of a commit: once, under the guard, and again after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltaforge_dagster.errors import LeaseLost, SinkUnavailable, StoreUnavailable
from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig
from deltaforge_dagster.sinks.objects.stores import LocalStore
from deltaforge_dagster.sinks.objects.writer import ObjectWriter
from deltaforge_dagster.sinks.tables.staged import (
    ChangePlace,
    ObjectPart,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.sources.value_types import INT64
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema

OWNER = TableOwner("uid", "shop", "files")


@pytest.fixture
def writer(tmp_path: Path) -> ObjectWriter:
    """A writer into a local folder."""
    config = S3SinkConfig(id="files", bucket=str(tmp_path / "lake"), local=True)
    return ObjectWriter(config, OWNER, LocalStore(config))


def staged(folder: Path, *contents: str) -> StagedTable:
    """Return a table with an object for each content, each of another day."""
    steps = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.staged"
        path.write_text(content)
        part = ObjectPart(number * 86_400, "v")
        steps.append(
            StagedStep("rows", [str(path)], 1, inserts_only=True, last=ChangePlace(1, 1), part=part)
        )
    columns = TypedSchema((TypedColumn("id", INT64),))
    table = ("shop", "public", "orders")
    return StagedTable(("public", "orders"), table, columns, (), frozenset(), steps, len(contents))


def contents(folder: Path) -> list[str]:
    """Return what is in the lake, by name."""
    return [one.read_text() for one in sorted((folder / "lake").rglob("*")) if one.is_file()]


def never() -> None:
    """The guard of a run that has its lease."""


def test_a_commit(writer: ObjectWriter, tmp_path: Path) -> None:
    """Its objects are in their folders; the answer tells the columns."""
    made = writer.commit(staged(tmp_path, "a", "b"), 7, never)
    assert contents(tmp_path) == ["a", "b"]
    names = [name for name, _ in made.columns]
    assert names[:2] == ["op", "op_ts"]
    assert made.columns[-2:] == [("before_id", "int64"), ("after_id", "int64")]


def test_a_repeated_commit_adds_what_is_missing(writer: ObjectWriter, tmp_path: Path) -> None:
    """What is there stays as it is."""
    writer.commit(staged(tmp_path, "a"), 7, never)
    writer.commit(staged(tmp_path, "other", "b"), 7, never)
    assert contents(tmp_path) == ["a", "b"]
    writer.commit(staged(tmp_path, "c"), 8, never)
    assert sorted(contents(tmp_path)) == ["a", "b", "c"]


def lost_after(calls: int) -> Callable[[], None]:
    """Return the guard of a run that loses its lease after some calls."""
    left = [calls]

    def guard() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise LeaseLost("another run has it")

    return guard


@pytest.mark.parametrize("calls", [0, 1])
def test_a_lost_lease(writer: ObjectWriter, tmp_path: Path, calls: int) -> None:
    """Nothing becomes visible, even if it is lost while an object is copied."""
    with pytest.raises(LeaseLost):
        writer.commit(staged(tmp_path, "a"), 7, lost_after(calls))
    assert contents(tmp_path) == []


def test_closing_ends_a_commit(writer: ObjectWriter, tmp_path: Path) -> None:
    """The object that is being copied is dropped."""
    writer.close()
    writer.close()
    with pytest.raises(SinkUnavailable, match="it was closed"):
        writer.commit(staged(tmp_path, "a"), 7, never)
    assert contents(tmp_path) == []


def test_a_staged_file_that_is_gone(writer: ObjectWriter, tmp_path: Path) -> None:
    """The commit is staged again."""
    table = staged(tmp_path, "a")
    (tmp_path / "0.staged").unlink()
    with pytest.raises(StoreUnavailable, match="is gone"):
        writer.commit(table, 7, never)
