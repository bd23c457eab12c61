"""Numbers with their nouns and units, for messages and output."""

from __future__ import annotations

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def pluralize(count: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun, singular or plural: `1 segment`, `1,200 segments`."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def size(count: int) -> str:
    """Return a number of bytes as text, such as `12.4 MiB`."""
    value = float(count)
    for unit in _SIZES[:-1]:
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:.1f} {_SIZES[-1]}"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units, such as `1 h 5 min`; `0 s` if it is zero."""
    left = round(max(seconds, 0.0))
    parts = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
