"""Staging files of snapshot chunks: complete, verified, and removed when they are not needed any more."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import WrittenSegment
from tests.journal.changes import changes


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal on a local disk."""
    return Journal(f"file://{tmp_path}")


def stage(journal: Journal, chunk: int = 1, *batches: pa.RecordBatch) -> WrittenSegment:
    """Write the staging file of a chunk."""
    writer = journal.stager("shop", 3, chunk)
    for rows in batches or (changes(0, 50),):
        writer.write(rows)
    return writer.close()


def test_rows_come_back_as_they_were(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read as written, one row group at a time."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 4096)
    written = stage(journal, 1, changes(0, 60), changes(60, 100))

    found = list(journal.staged(written.path))
    journal.check_staged(written.path, written.checksum)

    assert len(found) > 2
    rows = pa.Table.from_batches(found, CAPTURED)
    assert rows.to_pylist() == pa.Table.from_batches([changes(0, 100)]).to_pylist()


def test_a_file_that_differs_is_found_out(journal: Journal, tmp_path: Path) -> None:
    """A damaged or missing file is detected before any of its rows is used."""
    written = stage(journal)
    path = tmp_path / written.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(JournalDamaged, match="checksum differs"):
        journal.check_staged(written.path, written.checksum)
    path.unlink()
    with pytest.raises(JournalDamaged, match="missing"):
        journal.check_staged(written.path, written.checksum)


def test_what_nobody_needs_is_swept(journal: Journal) -> None:
    """An old orphan is removed; segments and other files of the pipeline are not touched."""
    kept, orphan = stage(journal, 1).path, stage(journal, 2).path
    writer = journal.writer("shop", "u1", 1, 1)
    writer.write(changes(0, 5))
    segment = writer.close().path

    assert journal.sweep_staged("shop", {kept}, older_than=60) == []
    assert journal.sweep_staged("shop", {kept}, older_than=-1) == [orphan]
    assert journal.exists(kept)
    assert journal.exists(segment)
    assert not journal.exists(orphan)
