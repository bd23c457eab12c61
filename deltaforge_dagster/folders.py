"""Folders that outlive a crash: an entry is durable once the folder that holds it is synced."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path) -> None:
    """Create `path` and its parents, 0700, each entry durable in the directory above it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable (fsync(2), NOTES: the directory needs its own)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
