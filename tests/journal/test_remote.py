"""A journal on remote storage, and how it handles failures."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.journal import storage
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode.files import SLICES, reported, write_partition
from tests.journal.changes import changes


class FarFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """An object store without folders, which can fail while a file is read."""

    protocol = "far"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    cut = False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Fail: this would create a bucket."""
        raise AssertionError(path)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Return a file whose reads time out while `cut` is set."""
        file = super().open(path, mode, **options)
        if "r" not in mode:
            return file

        def read(size: int = -1) -> bytes:
            if FarFileSystem.cut:
                raise TimeoutError
            return bytes(file.read(size))

        return SimpleNamespace(read=read, seek=file.seek, tell=file.tell, close=file.close)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """A journal on that file system."""
    fsspec.register_implementation("far", FarFileSystem, clobber=True)
    monkeypatch.setattr(storage, "_OBJECT_STORES", {"far"})
    monkeypatch.setattr(FarFileSystem, "cut", False)
    yield Journal(f"far://{uuid.uuid4().hex}/journal")
    FarFileSystem.store.clear()


def test_an_outage_is_no_damage(far: Journal) -> None:
    """A timeout in the middle of a file is retryable; afterwards the same file can be read."""
    writer = far.writer("shop", "u1", 1, 1)
    writer.write(changes(0, 100))
    written = writer.close()
    row: Any = SimpleNamespace(path=written.path, segment=1)

    with far.open(written.path) as file:
        FarFileSystem.cut = True
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            file.read_row_group(0)
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        list(far.batches(row))
    FarFileSystem.cut = False
    assert sum(rows.num_rows for rows in far.batches(row)) == 100


def test_a_task_that_fails_leaves_no_prepared_object() -> None:
    """Its partial output is not completed, and its error is reported."""
    folder = f"memory://{uuid.uuid4().hex}/prepared"
    numbers = pa.array(range(10), pa.int64())

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([numbers, numbers], ["segment", "ordinal"])
        raise JournalDamaged("a segment is missing")

    report = pa.Table.from_batches(list(write_partition(folder, "run.job", batches())), SLICES)

    with pytest.raises(JournalDamaged, match="a segment is missing"):
        reported(report)
    fs, path = fsspec.core.url_to_fs(folder)
    assert not fs.exists(path) or fs.ls(path) == []
