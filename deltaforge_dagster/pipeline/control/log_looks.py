"""Evaluate looks at the source's log: since when a position is not its end, how fast it grows.

A look is one measurement of the log. Few are kept: the older a look is, the further it is from the
next one, so that times are accurate to a quarter of their age.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import LogLook

_SPACING = 1 / 8
"""The minimum distance between two looks, as a fraction of their age."""

_WINDOW = 120.0
"""Seconds over which growth is measured."""

_SHORTEST = 10.0
"""Fewest seconds over which growth is measured."""


def kept_looks(
    looks: Sequence[LogLook], new: LogLook, positions: Sequence[Position]
) -> list[LogLook]:
    """Return the looks that are worth keeping, in order.

    Args:
        looks: The looks kept so far.
        new: A later look.
        positions: The positions for which `behind_since` will be called.
    """
    passed = [
        number
        for number, look in enumerate(looks)
        if all(parse_position(look.end) <= position for position in positions)
    ]
    first = passed[-1] if passed else 0
    kept = [new]
    for number in range(len(looks) - 1, -1, -1):
        look = looks[number]
        age = new.at - look.at
        if number < first and age > _WINDOW:
            break
        if kept[-1].at - look.at >= _SPACING * age or number in {0, first}:
            kept.append(look)
    return kept[::-1]


def behind_since(looks: Sequence[LogLook], position: Position) -> float | None:
    """Return since when, at the earliest, there has been log after a position.

    Returns None if there is no such log.
    """
    since = None
    for look in reversed(looks):
        end: Position = parse_position(look.end)
        if end <= position:
            return None if since is None else look.at
        since = look.at
    return since


def growth(looks: Sequence[LogLook]) -> float | None:
    """Return by how many bytes a second the log that the server retains grows; None if it does not.

    A server frees log in steps, so the amount goes up and down also while all is well. What counts
    is the least amount: that of the later half of the time compared with that of the earlier half.
    """
    recent = [
        (look.at, look.retained)
        for look in looks
        if look.retained is not None and look.at >= looks[-1].at - _WINDOW
    ]
    if len(recent) < 2 or recent[-1][0] - recent[0][0] < _SHORTEST:
        return None
    middle = (recent[0][0] + recent[-1][0]) / 2
    earlier = [(at, size) for at, size in recent if at < middle]
    later = [(at, size) for at, size in recent if at >= middle]
    grown = min(size for _, size in later) - min(size for _, size in earlier)
    return grown / (later[0][0] - earlier[0][0]) if grown > 0 else None
