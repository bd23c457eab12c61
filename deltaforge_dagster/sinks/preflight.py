"""What the preflights of several kinds of sinks have in common."""

from __future__ import annotations

from collections.abc import Collection

from deltaforge_dagster.sources.findings import Finding, listed

_CONNECT_SECONDS = 5.0
"""For one attempt to connect; a run is more patient."""


def connect_seconds(configured: float) -> float:
    """Return the time for one attempt to connect: that of the file, or less."""
    return min(_CONNECT_SECONDS, configured)


def not_known(subject: str, what: str, names: Collection[str], question: str) -> Finding:
    """Return the finding for destinations that depend on the changes.

    Args:
        subject: The sink.
        what: What its destinations are called.
        names: The templates.
        question: What cannot be known about them: `may be written`.
    """
    shown = listed([repr(name) for name in sorted(names)])
    text = f"{what} {shown} depend on the changes: whether they {question} is not known"
    return Finding(subject, "note", text)
