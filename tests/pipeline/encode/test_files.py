"""Encoded files: slices of batches, one file per task, and the sweep of what dead runs left."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.pipeline.encode.files import (
    SLICES,
    WRITE_BYTES,
    BatchSlice,
    MappedBatches,
    Spares,
    remove,
    remove_job,
    reported,
    slices_of,
    sweep_encoded,
    write_partition,
)


def batch(places: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Return a batch of rows at (segment, ordinal)."""
    return pa.RecordBatch.from_pydict(
        {
            "segment": pa.array([segment for segment, _ in places], pa.int64()),
            "ordinal": pa.array([ordinal for _, ordinal in places], pa.int64()),
            "value": pa.array([f"{segment}/{ordinal}" for segment, ordinal in places]),
        }
    )


def written(folder: Path | str, prefix: str, batches: Sequence[pa.RecordBatch]) -> list[BatchSlice]:
    """Return the slices that a task reports."""
    reports = list(write_partition(str(folder), prefix, iter(batches)))
    return reported(pa.Table.from_batches(reports, SLICES))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1))
def test_pieces_cover_a_batch(places: list[tuple[int, int]]) -> None:
    """Pieces are runs of consecutive ordinals of one segment, and together the whole batch.

    Rows of one change are in one slice.
    """
    slices = slices_of(batch(places), 4, "file")

    changes = [place for number, place in enumerate(places) if place not in places[:number][-1:]]
    covered = [
        (batch_slice.segment, batch_slice.ordinal + index)
        for batch_slice in slices
        for index in range(batch_slice.ordinals)
    ]
    assert covered == changes
    assert sum(batch_slice.rows for batch_slice in slices) == len(places)
    assert [batch_slice.offset for batch_slice in slices] == [
        sum(one.rows for one in slices[:number]) for number in range(len(slices))
    ]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_batch_may_span_segments(tmp_path: Path, scheme: str) -> None:
    """Rows of two files in one batch, the later segment first, are found where they are."""
    folder = f"{scheme}{tmp_path}"
    places = [(8, 0), (8, 1), (7, 3), (7, 4)]
    slices = written(folder, "run.job", [batch(places), batch([])[:0], batch([(7, 5)])])

    assert [(p.batch, p.offset, p.segment, p.ordinal, p.rows) for p in slices] == [
        (0, 0, 8, 0, 2),
        (0, 2, 7, 3, 2),
        (1, 0, 7, 5, 1),
    ]
    reader = MappedBatches.open(slices[0].path, slices[0].end)
    remove(slices[0].path)
    remove(slices[0].path)
    assert reader.batch(0).column("value").to_pylist() == ["8/0", "8/1", "7/3", "7/4"]
    assert reader.batch(1).column("value").to_pylist() == ["7/5"]


def test_a_file_is_written_over(tmp_path: Path) -> None:
    """A spare file may be longer than what is written; what is read is what was written last."""
    (longer,) = written(tmp_path, "run.one", [batch([(1, n) for n in range(2000)])])

    reports = list(write_partition(str(tmp_path), "run.two", [batch([(2, 0)])], longer.path))

    (batch_slice,) = reported(pa.Table.from_batches(reports, SLICES))
    assert [str(path) for path in tmp_path.iterdir()] == [longer.path] == [batch_slice.path]
    assert batch_slice.end < longer.end
    reader = MappedBatches.open(batch_slice.path, batch_slice.end)
    assert reader.batch(0).column("value").to_pylist() == ["2/0"]
    with pytest.raises(ValueError, match="out of range"):
        reader.batch(1)


def test_a_batch_leaves_memory(tmp_path: Path) -> None:
    """Only the one that is let go; it can be read again."""
    size, count = 1 << 20, 12
    rows = [{"segment": 1, "ordinal": n, "value": f"{n:02}" * (size // 2)} for n in range(count)]
    slices = written(tmp_path, "run.job", [pa.RecordBatch.from_pylist([row]) for row in rows])
    path = slices[0].path

    mapped = MappedBatches.open(path, slices[0].end)
    read = [mapped.batch(n).column("value")[0].as_py() == rows[n]["value"] for n in range(count)]
    before = resident(path)
    for number in range(3, count):
        mapped.let_go(number)

    assert read == [True] * count
    assert before >= count * size
    assert 3 * size <= resident(path) < 4 * size
    for number in (0, 5, count - 1):
        assert mapped.batch(number).column("value")[0].as_py() == rows[number]["value"]


def test_a_batch_without_values_leaves_memory(tmp_path: Path) -> None:
    """A column of nulls has no memory; the others leave it."""
    nothing = pa.RecordBatch.from_pydict(
        {"segment": pa.array([1]), "ordinal": pa.array([0]), "value": pa.nulls(1)}
    )
    (batch_slice,) = written(tmp_path, "run.job", [nothing])
    mapped = MappedBatches.open(batch_slice.path, batch_slice.end)

    mapped.let_go(0)

    assert mapped.batch(0).equals(nothing)


def resident(path: str) -> int:
    """Return the bytes of a mapped file that are in this process's memory (proc_pid_smaps(5))."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    assert any(line.endswith(path) for line in lines)
    size = next(line for line in lines if line.startswith("Rss:"))
    return int(size.split()[1]) << 10


def test_a_large_batch_is_written_in_small_steps(tmp_path: Path) -> None:
    """A column of megabytes arrives whole, although no system call writes more than `WRITE_BYTES`."""
    value = "x" * (9 * WRITE_BYTES)
    row = {"segment": 1, "ordinal": 0, "value": value}

    begun = write_calls()
    (batch_slice,) = written(tmp_path, "run.job", [pa.RecordBatch.from_pylist([row])])

    assert write_calls() - begun >= 9
    reader = MappedBatches.open(batch_slice.path, batch_slice.end)
    assert reader.batch(0).column("value").to_pylist() == [value]


def write_calls() -> int:
    """Return how often this thread has called the system to write (proc_pid_io(5), `syscw`)."""
    lines = Path("/proc/thread-self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["syscw"])


def test_no_more_spares_are_kept_than_wanted(tmp_path: Path) -> None:
    """Each is given out once; what is too many is deleted."""
    paths = [tmp_path / str(number) for number in range(4)]
    for path in paths:
        path.touch()
    spares = Spares(3)
    spares.add(map(str, paths))

    assert spares.reuse(2) == [str(path) for path in paths[:2]]
    spares.clear()
    assert spares.reuse(9) == []
    assert [path.exists() for path in paths] == [True, True, False, False]


def test_errors_are_reported(tmp_path: Path) -> None:
    """What is wrong with a task's input comes back as the error it is, not as a failed task."""

    def damaged() -> Iterator[pa.RecordBatch]:
        yield batch([(1, 0)])
        raise JournalDamaged("journal file x is missing")

    (report,) = write_partition(str(tmp_path), "run.job", damaged())

    with pytest.raises(JournalDamaged, match="journal file x is missing"):
        reported(pa.Table.from_batches([report]))


def test_files_are_private(tmp_path: Path) -> None:
    """An encoded file holds row values: only its owner may read it."""
    (batch_slice,) = written(tmp_path, "run.job", [batch([(1, 0)])])

    assert stat.S_IMODE(Path(batch_slice.path).stat().st_mode) == 0o600


def test_a_task_without_rows_writes_nothing(tmp_path: Path) -> None:
    """A task that gets no rows leaves no file and reports no slice."""
    assert written(tmp_path, "run.job", []) == []
    assert list(tmp_path.iterdir()) == []


def test_remove_job(tmp_path: Path) -> None:
    """A failed job's files go, those of other jobs stay."""
    (mine,) = written(tmp_path, "run.one", [batch([(1, 0)])])
    (other,) = written(tmp_path, "run.two", [batch([(1, 0)])])

    remove_job(str(tmp_path), "run.one")

    assert [str(path) for path in tmp_path.iterdir()] == [other.path]
    assert mine.path != other.path


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_sweep(tmp_path: Path, scheme: str) -> None:
    """Old files of runs that are gone go; young ones, other files and kept runs' files stay."""
    folder = f"{scheme}{tmp_path}"
    (dead,) = written(folder, "dead-1.2.job", [batch([(1, 0)])])
    written(folder, "live-1.job", [batch([(1, 0)])])
    (tmp_path / "notes.txt").touch()
    typed = Path(f"{tmp_path}/dead-1.2.job.0.parquet")
    typed.touch()
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 100,) * 2)
    written(folder, "young.job", [batch([(1, 0)])])

    swept = sweep_encoded(folder, {"live-1"}, older_than=50)
    assert sorted(swept) == sorted([dead.path, f"{scheme}{typed}"])
    assert len(list(tmp_path.iterdir())) == 3
    assert sweep_encoded(folder, set(), older_than=10**6) == []
    assert sweep_encoded(f"{folder}/missing", set(), older_than=0) == []
