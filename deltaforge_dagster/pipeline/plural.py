"""Numbers with their nouns, for messages and output."""

from __future__ import annotations


def pluralize(count: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, singular or plural: `1 segment`, `1,200 segments`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
