"""Statistics of the values of one field, and of the names of objects that are maps.

Of values: enumeration, format, minimum and maximum (`FieldValues`).

Maps are objects whose member names are values, such as ids. Objects at a path are maps if they have
enough names that most of them lack (`judged`). The names that most objects have remain fields; all
others together count as one field, so that the schema does not grow without end and documents with
different names have the same structure. HyperLogLog estimates the number of names, and a
frequent-items sketch finds the most frequent ones (`MapNames`); both need little memory, whatever
the number of names.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
from datasketches import (  # type: ignore[import-untyped]
    frequent_items_error_type,
    frequent_strings_sketch,
    hll_sketch,
    hll_union,
    tgt_hll_type,
)

from deltaforge_dagster.config.sensing import HighCardinality, Tracking
from deltaforge_dagster.sensing.groups import count_values

ENUM_REPEATS = 10
"""An enumeration needs on average at least this many strings for each distinct value."""
_LONGEST = 100
"""The maximum number of characters that are kept of a value."""

_PRECISION = 12
_DIGITS = 18


class FieldValues:
    """The strings and numbers of one field.

    Args:
        tracking: What to record.

    Attributes:
        strings: The number of strings.
        shortest: The length of the shortest string in characters, 0 if there is none.
        longest: The length of the longest string.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self.strings = 0
        self.shortest = self.longest = 0
        self._formats = frozenset(FORMATS)
        self._few: dict[str, int] | None = {} if tracking.enum_detection else None
        self._least: int | float | str | None = None
        self._greatest: int | float | str | None = None
        self._distinct = hll_sketch(_PRECISION) if tracking.field_statistics else None

    def add_strings(self, texts: pa.StringArray) -> None:
        """Add strings, given as JSON without quotes."""
        counts = count_values(texts)
        lengths = [len(value) for value in counts]
        self.shortest = min(lengths) if not self.strings else min(self.shortest, *lengths)
        self.longest = max(self.longest, *lengths)
        self.strings += len(texts)
        for value in counts:
            if not self._formats:
                break
            self._formats = formats_of(value, self._formats)
        self._count_few(counts)
        if self._distinct is not None:
            for value in counts:
                self._distinct.update(value)
            self._bound(min(counts)[:_LONGEST], max(counts)[:_LONGEST])

    def add_numbers(self, texts: pa.StringArray) -> None:
        """Add numbers, given as JSON; ignored unless statistics are tracked."""
        if self._distinct is None:
            return
        numbers = [_number(text) for text in count_values(texts)]
        for value in numbers:
            self._distinct.update(repr(value))
        self._bound(min(numbers), max(numbers))

    def merge(self, other: FieldValues) -> None:
        """Add the values of another field."""
        if other.strings:
            lengths = (self.shortest, other.shortest) if self.strings else (other.shortest,)
            self.shortest = min(lengths)
            self.longest = max(self.longest, other.longest)
            self.strings += other.strings
            self._formats &= other._formats
        if other._few is None:
            self._few = None
        else:
            self._count_few(other._few)
        if self._distinct is not None and other._distinct is not None:
            union = hll_union(_PRECISION)
            union.update(self._distinct)
            union.update(other._distinct)
            self._distinct = union.get_result(tgt_hll_type.HLL_4)
            if other._least is not None and other._greatest is not None:
                self._bound(other._least, other._greatest)

    @property
    def format(self) -> str | None:
        """The format that all strings match, the first by name if several do; None if none."""
        return min(self._formats, default=None) if self.strings else None

    @property
    def enumeration(self) -> list[str] | None:
        """The sorted distinct values if they form an enumeration, otherwise None."""
        if not self._few or self.strings < ENUM_REPEATS * len(self._few):
            return None
        return sorted(self._few)

    def statistics(self) -> dict[str, Any]:
        """Return minimum, maximum and estimated number of distinct values; empty if not tracked."""
        if self._distinct is None or self._distinct.is_empty():
            return {}
        return {
            "min": self._least,
            "max": self._greatest,
            "cardinality": round(self._distinct.get_estimate()),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for `restored`, as JSON values."""
        sketch = None if self._distinct is None else self._distinct.serialize_compact()
        return {
            "strings": self.strings,
            "lengths": [self.shortest, self.longest],
            "formats": sorted(self._formats),
            "few": self._few,
            "bounds": [self._least, self._greatest],
            "distinct": None if sketch is None else b64encode(sketch).decode(),
        }

    @classmethod
    def restored(cls, tracking: Tracking, state: dict[str, Any]) -> FieldValues:
        """Return the values with a state from `state`; newly tracked statistics start empty."""
        values = cls(tracking)
        values.strings = state["strings"]
        values.shortest, values.longest = state["lengths"]
        values._formats = frozenset(state["formats"]) & FORMATS.keys()
        if values.strings or state["few"] is not None:
            values._few = state["few"] if tracking.enum_detection else None
        values._least, values._greatest = state["bounds"]
        if state["distinct"] is not None and tracking.field_statistics:
            values._distinct = hll_sketch.deserialize(b64decode(state["distinct"]))
        return values

    def _count_few(self, counts: dict[str, int]) -> None:
        if self._few is None:
            return
        for value, count in counts.items():
            self._few[value] = self._few.get(value, 0) + count
        most = self._tracking.enum_max_cardinality
        if len(self._few) > most or any(len(value) > _LONGEST for value in counts):
            self._few = None

    def _bound(self, least: Any, greatest: Any) -> None:
        # Numbers order before strings: a field may have both, and they cannot be compared directly.
        def order(value: Any) -> tuple[bool, Any]:
            return isinstance(value, str), value

        bounds = [bound for bound in (self._least, least) if bound is not None]
        self._least = min(bounds, key=order)
        bounds = [bound for bound in (self._greatest, greatest) if bound is not None]
        self._greatest = max(bounds, key=order)


def _number(text: str) -> int | float:
    """Return the number that a text denotes, as a float if it is longer than 18 characters."""
    return cast("int | float", json.loads(text)) if len(text) <= _DIGITS else float(text)


_DATE = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


def _pattern(text: str) -> Callable[[str], bool]:
    pattern = re.compile(text, re.ASCII)
    return lambda value: pattern.fullmatch(value) is not None


def _address(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> Callable[[str], bool]:
    def fits(value: str) -> bool:
        try:
            kind(value)
        except ValueError:
            return False
        return "%" not in value

    return fits


FORMATS: Mapping[str, Callable[[str], bool]] = {
    "date-time": _pattern(f"{_DATE}[Tt]{_TIME}"),
    "date": _pattern(_DATE),
    "time": _pattern(_TIME),
    "uuid": _pattern(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
    "email": _pattern(rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]+@{_LABEL}(?:\.{_LABEL})+"),
    "ipv4": _address(ipaddress.IPv4Address),
    "ipv6": _address(ipaddress.IPv6Address),
    "uri": _pattern(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s<>\"{}|\\^`]+"),
}
"""The test for each string format that sensing detects, by its name in JSON Schema."""


def formats_of(value: str, among: frozenset[str]) -> frozenset[str]:
    """Return those formats of `among` that a string matches."""
    return frozenset(name for name in among if FORMATS[name](value))


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
