"""Numbers of things, as sentences have them."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return a number with the word for what it counts: `1 segment`, `1,200 segments`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
