"""Positions in a source's log, as ordered values and as JSON text.

The state store, the journal and Dagster's metadata contain positions as JSON text. Only the source
that created a position interprets it; everything else only compares positions of the same source
with `<`. Each kind of source has a class of its own; `sources.registry.parse_position` reads the
text of any of them.
"""

from __future__ import annotations

from typing import Protocol, Self


class Position(Protocol):
    """A position in a source's log, comparable with positions of the same source."""

    def to_json(self) -> str:
        """Return the text that `parse_position` reads back."""
        ...

    def __lt__(self, other: Self, /) -> bool: ...

    def __le__(self, other: Self, /) -> bool: ...


def format_lsn(lsn: int) -> str:
    """Return `lsn` as `X/YYYYYYYY`, the form of the event's `source.lsn`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}"
