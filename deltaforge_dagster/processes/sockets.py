"""Remove the files of Unix domain sockets that killed processes have left behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

_NAME = re.compile(r"\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.sock")
"""Matches the names that Spark gives to its sockets in a folder."""

_BOUND = Path("/proc/net/unix")
"""Linux's list of all bound sockets (proc(5)).

Connecting to each socket instead would use up one that waits for a single client.
"""

_YOUNG_SECONDS = 60.0
"""Younger files are kept, because a socket's file appears a moment before the socket is listed."""


def remove_abandoned_sockets(folder: Path) -> None:
    """Remove the files of Spark's sockets in a folder that no process has bound; only on Linux."""
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
