"""Helpers shared by the preflights of several kinds of sinks."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from deltaforge_dagster.sources.findings import Finding, listed

_CONNECT_SECONDS = 5.0
"""Maximum timeout of a preflight's connection attempt; runs wait as long as the file says."""


def connect_seconds(configured: float) -> float:
    """Return the timeout of a preflight's connection: the configured one, at most 5 seconds."""
    return min(_CONNECT_SECONDS, configured)


def not_known(subject: str, what: str, names: Collection[str], question: str) -> Finding:
    """Return the note that destinations whose names depend on the changes cannot be checked.

    Args:
        subject: The sink.
        what: Noun for its destinations: `topics`.
        names: The templates of the destinations.
        question: What cannot be known about them: `may be written`.
    """
    shown = listed([repr(name) for name in sorted(names)])
    text = f"{what} {shown} depend on the changes: whether they {question} is not known"
    return Finding(subject, "note", text)


def folder_finding(subject: str, folder: Path, contents: str, correction: str) -> Finding:
    """Return the finding on whether a run can write in a folder, which need not exist yet.

    Args:
        subject: The sink.
        folder: The folder.
        contents: What the sink has there: `files`.
        correction: What to do if the folder cannot exist.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return Finding(subject, "error", f"{existing} is no directory", correction)
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"user {os.geteuid()} may not write in {existing}"
        return Finding(subject, "error", text, f"chown {os.geteuid()} {existing}")
    suffix = "" if existing == folder else " will be made"
    return Finding(subject, "ok", f"{contents} in {folder}{suffix}")
