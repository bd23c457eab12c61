"""Unix domain sockets in the file system, of which a process that is killed leaves the files behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

_NAME = re.compile(r"\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.sock")
"""As Spark names its sockets in a folder."""

_BOUND = Path("/proc/net/unix")
"""Linux lists all sockets there (proc(5)). Asking each by a connection would use up one that waits for a single client."""

_YOUNG_SECONDS = 60.0
"""A file is there a moment before its socket is listed."""


def remove_abandoned_sockets(folder: Path) -> None:
    """Remove the files of Spark's sockets in a folder that no process has bound any more; only on Linux."""
    files = [
        path
        for path in folder.iterdir()
        if _NAME.fullmatch(path.name) and path.is_socket() and _age(path) > _YOUNG_SECONDS
    ]
    if not files or not _BOUND.exists():
        return
    bound = {line.rpartition(" ")[2] for line in _BOUND.read_text().splitlines()}
    for path in files:
        if str(path) not in bound:
            path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0
