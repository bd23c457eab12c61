"""The file sink: whole lines, durable, private, in order; and what a bad place looks like."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import PermissionMissing, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.file import sink as file
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.testing.sinks import allow, messages

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory that the sink's files are below; not there yet."""
    return tmp_path / "out" / "shop"


@pytest.fixture
def sink(folder: Path) -> Iterator[FileSink]:
    """An open sink."""
    sink = FileSink("lines", compile_template(f"{folder}/${{source.table}}.jsonl"))
    sink.open()
    yield sink
    sink.close()


def lines(path: Path) -> list[str]:
    """Return the lines of a file that ends with a line break."""
    text = path.read_text()
    assert text.endswith("\n")
    return text[:-1].split("\n")


def test_appends_over_batches_and_sinks(sink: FileSink, folder: Path) -> None:
    """A later batch, and a later sink, go on after what is there."""
    path = folder / "orders.jsonl"
    other = FileSink("lines", compile_template(str(path)))

    sink.send(messages([(str(path), "1"), (str(path), "2")]), allow)
    sink.send(messages([(str(path), "3")]), allow)
    sink.close()
    other.open()
    other.send(messages([(str(path), "4")]), allow)

    assert lines(path) == ["1", "2", "3", "4"]


def test_many_files_in_one_batch(sink: FileSink, folder: Path) -> None:
    """Each file gets its own values, in order, in directories made for them."""
    rows = [(f"{folder}/{n % 3}/{n % 2}.jsonl", f"v{n}") for n in range(100)]

    sink.send(messages(rows), allow)

    for destination in {destination for destination, _ in rows}:
        assert [v for d, v in rows if d == destination] == lines(Path(destination))


def test_files_are_private(sink: FileSink, folder: Path) -> None:
    """Files are 0600, directories 0700."""
    path = folder / "a" / "orders.jsonl"
    sink.send(messages([(str(path), "1")]), allow)

    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, folder, folder.parent)]

    assert modes == [0o600, 0o700, 0o700, 0o700]


def test_synced_before_acknowledged(
    sink: FileSink, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When `send` returns the lines are on disk; the name of a new file is before its first line.

    After a crash in between, a file with lines is not looked at again.
    """
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    path = folder / "orders.jsonl"

    sink.send(messages([(str(path), "1")]), allow)
    sink.send(messages([(str(path), "2")]), allow)

    assert [str(folder), str(path), str(path)] == synced


@pytest.mark.parametrize("left", ["", "x", '{"id":', "x" * 200_000])
def test_partial_line_is_cut(sink: FileSink, folder: Path, left: str) -> None:
    """What a crash left after the last line break goes, however long; whole lines stay."""
    path = folder / "orders.jsonl"
    path.write_text("1\n2\n" + left)
    alone = folder / "items.jsonl"
    alone.write_text(left)

    sink.send(messages([(str(path), "3"), (str(alone), "1")]), allow)

    assert (lines(path), lines(alone)) == (["1", "2", "3"], ["1"])


def test_full_disk_and_retry(sink: FileSink, folder: Path) -> None:
    """A full disk is retryable and named; the retry repairs the line that was cut off."""
    path = folder / "orders.jsonl"
    rows = [(str(path), f"{n:0100}") for n in range(100)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5050, before[1]))
    try:
        with pytest.raises(SinkUnavailable, match=rf"cannot write {path}: .*large"):
            sink.send(messages(rows), allow)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 5050

    sink.send(messages(rows), allow)

    values = [value for _, value in rows]
    assert values[:50] + values == lines(path)


def test_file_in_use(sink: FileSink, folder: Path) -> None:
    """A file that another writer holds is left alone, and can be written later."""
    path = folder / "orders.jsonl"
    batch = messages([(str(path), "1")])
    with path.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(SinkUnavailable, match=f"cannot write {path}"):
            sink.send(batch, allow)

    sink.send(batch, allow)

    assert lines(path) == ["1"]


@pytest.mark.parametrize("where", ["../x", "a/../../x", "/etc/x", "", "sub/.."])
def test_values_choose_no_other_place(sink: FileSink, folder: Path, where: str) -> None:
    """Whatever a row says, nothing is written outside the sink's directory."""
    destination = where if where.startswith("/") or not where else f"{folder}/{where}"

    with pytest.raises(SinkRejected, match="not below"):
        sink.send(messages([(destination, "1")]), allow)


def test_line_break_in_a_value(sink: FileSink, folder: Path) -> None:
    """A value that would become two lines is refused, and not shown."""
    path = folder / "orders.jsonl"

    with pytest.raises(SinkRejected, match="line break") as caught:
        sink.send(messages([(str(path), "secret\n1")]), allow)

    assert (path.read_text(), "secret" in str(caught.value)) == ("", False)


def test_place_is_a_directory(sink: FileSink, folder: Path) -> None:
    """A directory where the file should be needs a person."""
    (folder / "orders.jsonl").mkdir()

    with pytest.raises(SinkRejected, match=r"orders\.jsonl"):
        sink.send(messages([(f"{folder}/orders.jsonl", "1")]), allow)


def test_place_is_below_a_file(tmp_path: Path) -> None:
    """A directory that cannot be is found when the sink opens."""
    (tmp_path / "file").touch()

    with pytest.raises(SinkRejected, match="file/out"):
        FileSink("lines", compile_template(f"{tmp_path}/file/out/a.jsonl")).open()


def test_no_permission(tmp_path: Path) -> None:
    """A directory that is closed to us needs a person; the message names path and user."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o000)
    sink = FileSink("lines", compile_template(f"{folder}/out/a.jsonl"))
    ours = os.geteuid()
    if ours == 0:  # to root nothing is closed
        os.seteuid(NOBODY)
    try:
        with pytest.raises(PermissionMissing, match=rf"{folder}/out.*user {os.geteuid()}"):
            sink.open()
    finally:
        os.seteuid(ours)
        folder.chmod(0o700)


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path starts at the working directory of the time the sink was made."""
    monkeypatch.chdir(tmp_path)
    sink = FileSink("lines", compile_template("out/${source.table}.jsonl"))
    sink.open()

    sink.send(messages([("out/orders.jsonl", "1")]), allow)

    assert lines(tmp_path / "out/orders.jsonl") == ["1"]


def test_replay_goes_beside_the_file(sink: FileSink, folder: Path) -> None:
    """A replay leaves the file as it is, and its values are byte for byte the same."""
    path = folder / "orders.jsonl"
    rows = [(str(path), json.dumps({"id": n, "name": "ä\u2028"})) for n in range(3)]
    sink.send(messages(rows), allow)
    before = path.read_bytes()

    sink.send(messages(rows, replay="r7"), allow)

    assert before == path.read_bytes() == (folder / "orders.jsonl.replay-r7").read_bytes()


def test_large_batch_in_pieces(
    sink: FileSink, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is asked before each piece, and pieces make the same file."""
    monkeypatch.setattr(file, "_PIECE_BYTES", 1000)
    path = folder / "orders.jsonl"
    rows = [(str(path), f"{n:050}") for n in range(200)]
    calls: list[int] = []

    sink.send(messages(rows), lambda: calls.append(path.stat().st_size))

    assert [value for _, value in rows] == lines(path)
    assert len(calls) > 10
    assert max(b - a for a, b in itertools.pairwise(calls)) <= 1100


def test_slice_of_a_batch(sink: FileSink, folder: Path) -> None:
    """A batch that is a window of a larger one writes its own rows only."""
    path = folder / "orders.jsonl"
    batch = messages([(str(path), f"v{n}") for n in range(100)])
    window = type(batch)(1, "5e9", batch.messages.slice(10, 5))

    last = sink.send(window, allow)

    assert (lines(path), last) == (["v10", "v11", "v12", "v13", "v14"], 21)
