"""Storage of journal files, and the errors of unusable or failing storage."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from deltaforge_dagster.errors import JournalDamaged, SettingsError, StoreUnavailable
from deltaforge_dagster.journal import storage as module
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.storage import open_located, open_storage


@pytest.mark.parametrize(
    "url",
    ["", "journal", "/var/journal", "file://host/journal", "file:journal", "nothing://x", "s4://b"],
)
def test_unusable_url(url: str) -> None:
    """An unusable URL fails at once, as an error of the settings."""
    with pytest.raises(SettingsError, match="journal URL"):
        open_storage(url)


def test_object_storage_without_its_package() -> None:
    """For a scheme whose fsspec package is not installed, the error names the package."""
    with pytest.raises(SettingsError, match=r"[Ii]nstall"):
        open_storage("abfs://bucket/journal")


def test_local_path_with_spaces(tmp_path: Path) -> None:
    """Escapes in a URL are decoded, so a directory may have any name."""
    storage = open_storage((tmp_path / "my journal").as_uri())

    assert str(tmp_path / "my journal" / "a b") == storage.locate("a b")


def test_no_permission(tmp_path: Path) -> None:
    """If the storage cannot be written, the error names the path and the reason."""
    (tmp_path / "file").write_text("not a directory")
    storage = open_storage(f"file://{tmp_path}/file")

    with pytest.raises(StoreUnavailable, match=f"{tmp_path}/file.*"):
        storage.create("a/b")


class BrokenFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system that raises its own errors, with a secret in the text."""

    protocol = "broken"
    cachable = False

    def exists(self, path: str, **_: object) -> bool:
        """Fail as the client of a cloud provider does."""
        raise LookupError(f"https://{path}?signature=secret")


@pytest.mark.parametrize("flags", [0, os.ST_RDONLY])
def test_a_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """It is found without writing, also where the folder is still to be made; with the command that changes it."""
    storage = open_storage((tmp_path / "made" / "later").as_uri())
    storage.check_writable("shop")
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    said = "is read-only" if flags else f"run: chmod u\\+rwx {tmp_path}"
    with pytest.raises(StoreUnavailable, match=f"journal folder {tmp_path}: .*{said}"):
        storage.check_writable("shop")

    (tmp_path / "made").write_text("no folder")
    with pytest.raises(StoreUnavailable, match="not a directory"):
        storage.check_writable("shop")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full if a row group does not fit, or a whole segment where segments are smaller."""
    journal = Journal((tmp_path / "later").as_uri())
    journal.check_writable("shop", "u1", 64 << 20)

    disk = SimpleNamespace(f_bavail=3 << 10, f_frsize=4 << 10)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    journal.check_writable("shop", "u1", 8 << 20)
    said = (
        f"no space left for the journal in {tmp_path}/later/shop/u1 .less than 16 MiB are free.: "
    )
    with pytest.raises(StoreUnavailable, match=said):
        journal.check_writable("shop", "u1", 64 << 20)
    assert list(tmp_path.iterdir()) == []


class ProbedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """An object store that counts what is put, and fails or hangs on command."""

    protocol = "probed"
    cachable = False
    puts = 0
    fault: Callable[[], None] = staticmethod(lambda: None)

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        """Put an object."""
        ProbedFileSystem.puts += 1
        ProbedFileSystem.fault()
        super().pipe_file(path, value, **options)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """A journal on that object store."""
    fsspec.register_implementation("probed", ProbedFileSystem, clobber=True)
    monkeypatch.setattr(module, "_OBJECT_STORES", {"probed"})
    monkeypatch.setattr(module, "_PROBE_SECONDS", 3600.0)
    monkeypatch.setattr(module, "_PROBE_PATIENCE", 300.0)
    monkeypatch.setattr(ProbedFileSystem, "puts", 0)
    monkeypatch.setattr(ProbedFileSystem, "fault", staticmethod(lambda: None))
    return Journal("probed://bucket/journal")


def test_a_bucket_is_tried_out_once_a_minute(
    probed: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pipeline's folder is; nothing remains there, and what was found holds until the next attempt."""

    def look(name: str = "shop") -> int:
        probed.check_writable(name, "u1", 1)
        return ProbedFileSystem.puts

    def refuse() -> None:
        raise PermissionError(13, "Access Denied")

    assert (look(), look(), look("bank"), look()) == (1, 1, 2, 2)
    assert list(ProbedFileSystem().find("bucket")) == []
    monkeypatch.setattr(ProbedFileSystem, "fault", refuse)
    assert look() == 2
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.0)
    with pytest.raises(StoreUnavailable, match=r"bucket/journal/shop/u1/.*: Access Denied"):
        look()
    monkeypatch.setattr(module, "_PROBE_SECONDS", 3600.0)
    monkeypatch.setattr(ProbedFileSystem, "fault", lambda: None)
    with pytest.raises(StoreUnavailable, match="Access Denied"):
        look()
    assert ProbedFileSystem.puts == 3
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.0)
    assert look() == 4


def test_a_bucket_that_is_gone(probed: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no damaged file, but a journal that cannot be written now."""

    def gone() -> None:
        raise FileNotFoundError

    monkeypatch.setattr(ProbedFileSystem, "fault", gone)
    with pytest.raises(StoreUnavailable, match="probed://bucket/journal/shop/u1: there is no such"):
        probed.check_writable("shop", "u1", 1)


def test_a_bucket_that_does_not_answer(probed: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long, and nobody asks again before the answer is there."""
    answers = threading.Event()
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_PROBE_PATIENCE", 0.2)
    monkeypatch.setattr(ProbedFileSystem, "fault", answers.wait)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="does not answer within"):
            probed.check_writable("shop", "u1", 1)
    assert ProbedFileSystem.puts == 1

    answers.set()
    monkeypatch.setattr(module, "_PROBE_PATIENCE", 300.0)
    probed.check_writable("shop", "u1", 1)


def test_foreign_errors_are_translated() -> None:
    """An error of a storage package is translated: its class is named, its text is not."""
    fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)
    storage = open_storage("broken://bucket")

    with pytest.raises(StoreUnavailable, match="LookupError") as caught:
        storage.exists("a")

    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_missing_remote_file() -> None:
    """A missing object is reported as damage, not as an outage."""
    with pytest.raises(JournalDamaged, match="missing"):
        open_storage("memory://bucket").open("none")


@pytest.mark.parametrize("folder", ["memory://located", "a [b] {c} *? \\d"])
def test_a_file_is_opened_by_its_location(tmp_path: Path, folder: str) -> None:
    """Also if Spark would expand wildcards in its path."""
    storage = open_storage(folder if "://" in folder else (tmp_path / folder).as_uri())
    file = storage.create("x*.parquet")
    file.write(b"rows")
    file.commit()
    with open_located(storage.locate("x*.parquet")) as found:
        assert found.read() == b"rows"
    with pytest.raises(JournalDamaged):
        open_located(storage.locate("gone"))
