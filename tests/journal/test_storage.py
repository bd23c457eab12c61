"""Where journal files lie, and what a wrong or failing place looks like."""

from __future__ import annotations

from pathlib import Path

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
    """A URL that names no place fails at once, as a setting."""
    with pytest.raises(SettingsError, match="journal URL"):
        open_storage(url)


def test_object_storage_without_its_package() -> None:
    """A scheme whose fsspec package is not installed says which one to install."""
    with pytest.raises(SettingsError, match=r"[Ii]nstall"):
        open_storage("abfs://bucket/journal")


def test_local_path_with_spaces(tmp_path: Path) -> None:
    """A URL's escapes are undone, so that a directory may have any name."""
    storage = open_storage((tmp_path / "my journal").as_uri())

    assert str(tmp_path / "my journal" / "a b") == storage.locate("a b")


def test_no_permission(tmp_path: Path) -> None:
    """A place that cannot be written names the path and the reason."""
    (tmp_path / "file").write_text("not a directory")
    storage = open_storage(f"file://{tmp_path}/file")

    with pytest.raises(StoreUnavailable, match=f"{tmp_path}/file.*"):
        storage.create("a/b")


class BrokenFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Raises what its package likes, with a secret in the text."""

    protocol = "broken"
    cachable = False

    def exists(self, path: str, **_: object) -> bool:
        """Fail as a cloud's client does."""
        raise LookupError(f"https://{path}?signature=secret")


def test_foreign_errors_are_translated() -> None:
    """What a storage package raises becomes our error: its class is named, its text is not."""
    fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)
    storage = open_storage("broken://bucket")

    with pytest.raises(StoreUnavailable, match="LookupError") as caught:
        storage.exists("a")

    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_missing_remote_file() -> None:
    """A missing object is damage, not an outage."""
    with pytest.raises(JournalDamaged, match="missing"):
        open_storage("memory://bucket").open("none")
