"""Folders that are created durably, the cache of a user, and files that users name.

An entry of a folder survives a crash once the folder that contains it is synced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache() -> Path:
    """Return this user's cache folder: `$XDG_CACHE_HOME/deltaforge`, or `~/.cache/deltaforge`.

    Everything in it can be created again.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltaforge"


def make_folder(path: Path) -> None:
    """Create `path` and its parents with mode 0700, and make each of them durable."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable (fsync(2): a directory needs its own fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unreadable_file(files: Mapping[str, str | None]) -> str | None:
    """Return which of the files that options name cannot be read, and why; None if all can.

    Errors of the modules `ssl` and `redis` have only the reason, without the file's name.

    Args:
        files: Their paths by option; None for an option that is not set.
    """
    for option, path in files.items():
        try:
            if path is not None:
                Path(path).open("rb").close()
        except OSError as error:
            return (
                f"{option} names the file {path}, which cannot be read ({error.strerror or error})"
            )
    return None
