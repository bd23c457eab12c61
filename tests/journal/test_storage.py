"""Storage of journal files, and the errors of unusable or failing storage."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from deltaforge_dagster.errors import JournalDamaged, SettingsError, StoreUnavailable
from deltaforge_dagster.journal.storage import open_storage


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
