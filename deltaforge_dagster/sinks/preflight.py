"""Helpers shared by the preflights of several kinds of sinks."""

from __future__ import annotations

from collections.abc import Collection

from deltaforge_dagster.sources.findings import Finding, listed

_CONNECT_SECONDS = 5.0
"""Maximum timeout of a preflight's connection attempt; runs wait as long as the file says."""


def connect_seconds(configured: float) -> float:
    """Return the timeout of a preflight's connection attempt: the configured one, but not more than 5 seconds."""
    return min(_CONNECT_SECONDS, configured)


def not_known(subject: str, what: str, names: Collection[str], question: str) -> Finding:
    """Return the finding for destinations that depend on the changes.

    Args:
        subject: The sink.
        what: Noun for its destinations: `topics`.
        names: The templates.
        question: What cannot be known about them: `may be written`.
    """
    shown = listed([repr(name) for name in sorted(names)])
    text = f"{what} {shown} depend on the changes: whether they {question} is not known"
    return Finding(subject, "note", text)
