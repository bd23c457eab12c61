"""Segment files: what is written is durable, complete, private, verifiable and never replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.frame import CAPTURED, FRAME
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.journal.writer import WrittenSegment
from tests.journal.changes import batch, change, changes


@dataclasses.dataclass(frozen=True)
class Row(WrittenSegment):
    """A written segment as a row of the state store."""

    segment: int


def write(journal: Journal, *batches: pa.RecordBatch, segment: int = 7, epoch: int = 3) -> Row:
    """Write a segment of pipeline `shop`, uid `u1`."""
    writer = journal.writer("shop", "u1", segment, epoch)
    for rows in batches:
        writer.write(rows)
    written = writer.close()
    fields = {f.name: getattr(written, f.name) for f in dataclasses.fields(written)}
    return Row(**fields, segment=segment)


def content(*batches: pa.RecordBatch) -> str:
    """Return the content hash of `batches`."""
    digest = ContentHash(CAPTURED)
    for rows in batches:
        digest.update(pa.Table.from_batches([rows]))
    return digest.hexdigest()


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    """A journal on a local disk, and one on an fsspec file system."""
    if request.param == "file":
        return Journal(f"file://{tmp_path}/journal")
    return Journal(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def local(tmp_path: Path) -> Journal:
    """A journal on a local disk, at `tmp_path / "journal"`."""
    return Journal(f"file://{tmp_path}/journal")


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce row groups to 64 KiB, so that tests do not need millions of rows."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 64 << 10)


def test_rows_come_back_numbered(journal: Journal) -> None:
    """Every value is read as written, with its segment and ordinals without gaps."""
    row = write(journal, changes(0, 10), changes(10, 1000))

    rows = pa.Table.from_batches(journal.batches(row))

    assert rows.schema.equals(FRAME)
    assert list(range(1000)) == rows.column("ordinal").to_pylist()
    assert pc.unique(rows.column("segment")).to_pylist() == [7]
    assert rows.select(CAPTURED.names).to_pylist() == changes(0, 1000).to_pylist()
    assert rows.column("synthetic").null_count == 1000


def test_a_file_of_before_a_column_was_added(tmp_path: Path) -> None:
    """In a file of an older version, a column that was added later is null."""
    journal = Journal(f"file://{tmp_path}")
    older = pa.schema([field for field in FRAME if field.name != "synthetic"])
    rows = pa.Table.from_batches([changes(0, 3)])
    place = [pa.array([7] * 3), pa.array(range(3))]
    pq.write_table(pa.Table.from_arrays([*place, *rows.columns], schema=older), tmp_path / "a")

    columns = ["synthetic", "ordinal", "op"]
    (found,) = journal.share("a", columns, ordinals=None, part=0, of=1)

    assert found.schema.names == columns
    assert found.column("ordinal").to_pylist() == [0, 1, 2]
    assert found.column("synthetic").null_count == 3


def test_written_segment_describes_the_file(local: Journal, tmp_path: Path) -> None:
    """Checksum and size are those of the bytes on disk, counts and hash those of the rows."""
    row = write(local, changes(0, 30))

    data = (tmp_path / "journal" / row.path).read_bytes()

    assert (hashlib.sha256(data).hexdigest(), len(data)) == (row.checksum, row.bytes)
    assert (30, content(changes(0, 30))) == (row.rows, row.content_hash)
    assert row.counts["public.orders"] == {"c": 5, "u": 5, "d": 5}
    assert row.schema_versions == {"public.orders": "v0", "public.items": "v0"}
    assert row.last_ts_us - row.first_ts_us == 29
    assert f"shop/u1/0000000007-000003-{row.segment_id}.parquet" == row.path


def test_small_batches_share_a_row_group(journal: Journal) -> None:
    """A row group's size depends on its target, not on the batches written."""
    row = write(journal, *(changes(number, number + 10) for number in range(0, 1000, 10)))

    with journal.open(row.path) as file:
        assert file.num_row_groups == 1


@pytest.mark.usefixtures("small_row_groups")
def test_row_groups_are_cut_by_bytes(journal: Journal) -> None:
    """Large batches are split and small ones merged; rows, order and hash stay the same."""
    row = write(journal, changes(0, 1500), *(changes(n, n + 50) for n in range(1500, 3000, 50)))

    with journal.open(row.path) as file:
        sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]

    assert len(sizes) > 5
    assert max(sizes) < 2 * min(sizes[:-1])
    assert content(changes(0, 3000)) == row.content_hash
    journal.verify(row)


@pytest.mark.usefixtures("small_row_groups")
def test_memory_is_bounded_by_the_row_group(local: Journal) -> None:
    """A writer uses no more Arrow memory after a hundred row groups than after a few."""
    writer = local.writer("shop", "u1", 1, 1)
    rows = changes(0, 500)

    def held_after(times: int) -> int:
        for _ in range(times):
            writer.write(rows)
        return pa.total_allocated_bytes()

    early, late = held_after(5), held_after(200)
    writer.abort()

    assert late < early + (2 << 20)


def test_dictionaries_that_differ(journal: Journal) -> None:
    """Batches with their own dictionaries keep their values, even within a row group."""
    batches = [batch([change(n, table=f"t{n}", tx_id=f"tx{n}")]) for n in range(100)]

    row = write(journal, *batches)
    rows = pa.Table.from_batches(journal.batches(row, columns=["table", "tx_id"]))

    assert [f"t{n}" for n in range(100)] == rows.column("table").cast(pa.string()).to_pylist()
    assert [f"tx{n}" for n in range(100)] == rows.column("tx_id").cast(pa.string()).to_pylist()


def test_parquet_is_plain(local: Journal, tmp_path: Path) -> None:
    """Names are dictionary-encoded strings, compression is LZ4, and only the ordinal has statistics."""
    row = write(local, changes(0, 1000))

    group = pq.read_metadata(tmp_path / "journal" / row.path).row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}

    assert {"BYTE_ARRAY"} == {columns[name].physical_type for name in ("op", "table", "after")}
    assert "RLE_DICTIONARY" in columns["table"].encodings
    assert "RLE_DICTIONARY" not in columns["after"].encodings
    assert (
        columns["after"].compression,
        columns["event_id"].compression,
    ) == ("LZ4", "UNCOMPRESSED")
    assert [name for name, column in columns.items() if column.is_stats_set] == ["ordinal"]


def test_files_are_private(local: Journal, tmp_path: Path) -> None:
    """Files have mode 0600 and every new directory 0700, whatever the umask."""
    before = os.umask(0)
    try:
        row = write(local, changes(0, 3))
        prepared = local.encoded_dir("shop")
    finally:
        os.umask(before)
    root = tmp_path / "journal"

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(root / row.path) == 0o600
    assert {0o700} == {mode(p) for p in (root, root / "shop", root / "shop/u1", Path(prepared))}


def test_file_and_folders_are_synced(
    local: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, its folder, and each folder above a new one are fsynced before `close` returns."""
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    row = write(local, changes(0, 3))
    root = tmp_path / "journal"

    assert [str(root / row.path), str(root / "shop/u1")] == synced[-2:]
    assert {str(tmp_path), str(root), str(root / "shop")} <= set(synced)


def test_nothing_is_replaced(journal: Journal) -> None:
    """Writing the same segment twice, even in the same epoch, creates two files."""
    first, second = write(journal, changes(0, 3)), write(journal, changes(0, 5))

    journal.verify(first)
    journal.verify(second)

    assert first.path != second.path


def test_existing_name_is_refused(local: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a random name ever repeated, the writer would fail and the older file would stay."""
    same = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: same)
    row = write(local, changes(0, 3))

    with pytest.raises(StoreUnavailable, match="exists"):
        local.writer("shop", "u1", 7, 3)

    local.verify(row)


def test_abort_removes_the_file(journal: Journal) -> None:
    """After `abort` no file is left; it may be called again."""
    writer = journal.writer("shop", "u1", 7, 3)
    writer.write(changes(0, 100))

    writer.abort()
    writer.abort()

    assert journal.sweep("shop", "u1", set(), epoch=9, older_than=-1) == []


def test_abort_after_close_keeps_the_file(journal: Journal) -> None:
    """A closed segment cannot be aborted."""
    writer = journal.writer("shop", "u1", 7, 3)
    writer.write(changes(0, 100))
    written = writer.close()

    writer.abort()

    assert journal.exists(written.path)


def test_empty_segment_is_refused(journal: Journal) -> None:
    """A segment must have rows; a writer without any leaves no file."""
    writer = journal.writer("shop", "u1", 7, 3)
    writer.write(changes(0, 0))

    with pytest.raises(ValueError, match="no rows"):
        writer.close()

    assert journal.sweep("shop", "u1", set(), epoch=9, older_than=-1) == []


def test_other_columns_are_refused(journal: Journal) -> None:
    """Only the change frame can be written."""
    writer = journal.writer("shop", "u1", 7, 3)

    with pytest.raises(ValueError, match="not the change frame"):
        writer.write(changes(0, 3).drop_columns(["tags"]))

    writer.abort()


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Limit the size of any file that this process writes, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_row_groups")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_full_disk(local: Journal, file_size_limit: Callable[[int], None]) -> None:
    """A full disk is a retryable error that names the cause, and leaves no partial file behind."""
    writer = local.writer("shop", "u1", 7, 3)
    file_size_limit(100 << 10)

    with pytest.raises(StoreUnavailable, match="no space left"):  # noqa: PT012
        for number in range(0, 50_000, 1000):
            writer.write(changes(number, number + 1000))
        writer.close()
    del writer
    gc.collect()

    assert local.sweep("shop", "u1", set(), epoch=9, older_than=-1) == []


def damage(journal: Path, row: Row, how: str) -> Row:
    """Damage the file of `row` on disk, or the row itself; return the row to verify."""
    path = journal / row.path
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "rows":
        return dataclasses.replace(row, rows=row.rows + 1)
    elif how == "segment":
        return dataclasses.replace(row, segment=8)
    else:
        return dataclasses.replace(row, content_hash="0" * 64)
    return row


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "missing"),
        ("cut", "bytes"),
        ("empty", "bytes 0"),
        ("flipped", "checksum"),
        ("rows", "rows 100, but 101"),
        ("segment", "another segment"),
        ("hash", "content hash"),
    ],
)
def test_verify_names_the_damage(local: Journal, tmp_path: Path, how: str, message: str) -> None:
    """Each kind of damage is found; the message has the file and the difference."""
    row = write(local, changes(0, 100))
    local.verify(row)

    row = damage(tmp_path / "journal", row, how)

    with pytest.raises(JournalDamaged, match=message) as caught:
        local.verify(row)
    assert row.path in str(caught.value)


def test_verify_finds_rows_out_of_order(local: Journal, tmp_path: Path) -> None:
    """A gap in the ordinals is found even if the checksum matches the file."""
    row = write(local, changes(0, 100))
    path = tmp_path / "journal" / row.path
    rows = pq.read_table(path)
    pq.write_table(pa.concat_tables([rows.slice(0, 50), rows.slice(51)]), path)
    data = path.read_bytes()

    row = dataclasses.replace(row, checksum=hashlib.sha256(data).hexdigest(), bytes=len(data))

    with pytest.raises(JournalDamaged, match="contiguous"):
        local.verify(row)


@pytest.mark.parametrize("how", ["missing", "cut", "empty"])
def test_reading_a_damaged_file(local: Journal, tmp_path: Path, how: str) -> None:
    """Reading an incomplete file raises `JournalDamaged` with its name."""
    row = write(local, changes(0, 100))
    damage(tmp_path / "journal", row, how)

    with pytest.raises(JournalDamaged, match="shop/u1"):
        list(local.batches(row))


def test_flipped_bits(local: Journal, tmp_path: Path) -> None:
    """Wherever a bit is flipped, reading gives rows or `JournalDamaged`, and `verify` always finds it."""
    row = write(local, changes(0, 100))
    path = tmp_path / "journal" / row.path
    data = path.read_bytes()

    for at in range(0, len(data), 37):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with contextlib.suppress(JournalDamaged):
            list(local.batches(row))
        with pytest.raises(JournalDamaged):
            local.verify(row)


def test_delete_is_idempotent(journal: Journal) -> None:
    """Deleting a file twice is allowed, because retention may repeat it after a crash."""
    row = write(journal, changes(0, 3))

    journal.delete(row.path)
    journal.delete(row.path)

    assert not journal.exists(row.path)


def test_sweep_takes_orphans_alone(journal: Journal) -> None:
    """Files with a row, recent files, and files of the current or a newer epoch stay."""
    known = write(journal, changes(0, 3), segment=1, epoch=1)
    orphan = write(journal, changes(0, 3), segment=2, epoch=1)
    current = write(journal, changes(0, 3), segment=2, epoch=2)
    newer = write(journal, changes(0, 3), segment=2, epoch=3)
    paths = {known.path}

    young = journal.sweep("shop", "u1", paths, epoch=2, older_than=60)
    time.sleep(0.01)
    swept = journal.sweep("shop", "u1", paths, epoch=2, older_than=0)

    assert ([], [orphan.path]) == (young, swept)
    assert [journal.exists(row.path) for row in (known, current, newer)] == [True] * 3


def test_sweep_of_nothing(journal: Journal) -> None:
    """There is nothing to sweep for a pipeline that has never captured."""
    assert journal.sweep("shop", "u1", set(), epoch=2, older_than=0) == []


def test_writers_share_a_journal(journal: Journal) -> None:
    """Two threads write two segments at the same time."""
    rows: dict[int, Row] = {}

    def work(segment: int) -> None:
        rows[segment] = write(
            journal, *(changes(n, n + 500) for n in range(0, 5000, 500)), segment=segment
        )

    threads = [threading.Thread(target=work, args=(segment,)) for segment in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for segment in (1, 2):
        journal.verify(rows[segment])
    assert rows[1].content_hash == rows[2].content_hash


def test_killed_writer_leaves_an_orphan(local: Journal, tmp_path: Path) -> None:
    """The unfinished segment file of a killed process is an orphan of its epoch, and is swept."""
    url = f"file://{tmp_path}/journal"
    program = f"""
import os, signal
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal import writer as writing
from tests.journal.changes import changes
writing.ROW_GROUP_BYTES = 1000
writer = Journal({url!r}).writer("shop", "u1", 7, 3)
writer.write(changes(0, 1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", program], check=False)

    swept = local.sweep("shop", "u1", set(), epoch=4, older_than=0)

    assert (process.returncode, len(swept)) == (-signal.SIGKILL, 1)
    assert local.sweep("shop", "u1", set(), epoch=4, older_than=0) == []
