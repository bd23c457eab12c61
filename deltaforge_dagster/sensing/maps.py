"""Maps: objects whose member names are values, such as ids, and statistics of those names.

Objects at a path are maps if they have enough names that most of them lack. The names that most
objects have remain fields; all others together count as one field, so that the schema does not grow
without end and documents with different names have the same structure. HyperLogLog estimates the
number of names, and a frequent-items sketch finds the most frequent ones; both need little memory,
whatever the number of names.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from datasketches import (  # type: ignore[import-untyped]
    frequent_items_error_type,
    frequent_strings_sketch,
    hll_sketch,
    hll_union,
    tgt_hll_type,
)

from deltaforge_dagster.config.sensing import HighCardinality


@dataclass(frozen=True, slots=True)
class MapVerdict:
    """The decision whether objects at a path are maps.

    Attributes:
        stable: The names that most of the objects have.
        dynamic: The number of other names.
        confidence: The confidence that the other names are values; 0 if there are too few of them.
        is_map: Whether the confidence reaches the threshold.
    """

    stable: frozenset[str]
    dynamic: int
    confidence: float
    is_map: bool


def judged(options: HighCardinality, objects: int, names: Mapping[str, int]) -> MapVerdict:
    """Decide whether objects are maps.

    Args:
        options: The thresholds.
        objects: The number of objects.
        names: How many of the objects had each name.
    """
    share = {name: count / objects for name, count in names.items()}
    stable = frozenset(
        name for name, fraction in share.items() if fraction >= options.stable_threshold
    )
    dynamic = len(share) - len(stable)
    if not dynamic or dynamic < options.min_dynamic_fields:
        return MapVerdict(stable, dynamic, 0.0, False)
    # Exact sums: the order of the names must not change the verdict.
    stable_share = math.fsum(share[name] for name in stable) / len(stable) if stable else 1.0
    dynamic_share = math.fsum(share[name] for name in share.keys() - stable) / dynamic
    maturity = math.sqrt(min(objects / max(options.min_events, 1), 1.0))
    confidence = 0.5 * maturity + 0.5 * max(0.0, stable_share - dynamic_share)
    return MapVerdict(stable, dynamic, confidence, confidence >= options.confidence_threshold)


class MapNames:
    """Statistics of the names of a map that are not fields.

    Args:
        options: The precision of the sketches.
        stable: The names that are fields.
    """

    def __init__(self, options: HighCardinality, stable: Iterable[str]) -> None:
        self._options = options
        self.stable = set(stable)
        self._distinct = hll_sketch(options.hll_precision)
        self._frequent = frequent_strings_sketch(_size(options.heavy_hitter_capacity))

    def add(self, names: Mapping[str, int]) -> None:
        """Count names."""
        for name, count in sorted(names.items()):
            self._distinct.update(name)
            self._frequent.update(name, count)

    def merge(self, other: MapNames) -> None:
        """Add the names of another map."""
        self.stable |= other.stable
        union = hll_union(self._options.hll_precision)
        union.update(self._distinct)
        union.update(other._distinct)
        self._distinct = union.get_result(tgt_hll_type.HLL_4)
        self._frequent.merge(other._frequent)

    @property
    def unique(self) -> int:
        """The estimated number of distinct names."""
        estimate: int = round(self._distinct.get_estimate())
        return estimate

    @property
    def frequent(self) -> list[str]:
        """The most frequent names in descending order, at most `sample_size`."""
        items = self._frequent.get_frequent_items(frequent_items_error_type.NO_FALSE_NEGATIVES)
        most = sorted(items, key=lambda pair: (-pair[1], pair[0]))
        return [name for name, *_ in most[: self._options.sample_size]]

    def state(self) -> dict[str, Any]:
        """Return the state for `restored`, as JSON values."""
        return {
            "stable": sorted(self.stable),
            "distinct": b64encode(self._distinct.serialize_compact()).decode(),
            "frequent": b64encode(self._frequent.serialize()).decode(),
        }

    @classmethod
    def restored(cls, options: HighCardinality, state: Mapping[str, Any]) -> MapNames:
        """Return the names with a state that `state` returned."""
        names = cls(options, state["stable"])
        names._distinct = hll_sketch.deserialize(b64decode(state["distinct"]))
        names._frequent = frequent_strings_sketch.deserialize(b64decode(state["frequent"]))
        return names


def _size(capacity: int) -> int:
    """Return the binary logarithm of the size of a table for `capacity` names at 3/4 load."""
    return max(3, math.ceil(math.log2(max(capacity, 1) / 0.75)))
