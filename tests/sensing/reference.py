"""A plain Python reference that learns schemas of documents one document at a time.

It keeps all documents and counts them from scratch for each question, so there is no state to merge.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from deltaforge_dagster.config.sensing import SchemaSensing

Path = tuple[str, ...]
Pair = tuple[Path, str]


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"),
                       (list, "array"), (dict, "object")):  # fmt: skip
        if isinstance(value, kind):
            return name
    return "null"


class Reference:
    """The schema of one stream of documents."""

    def __init__(self, options: SchemaSensing) -> None:
        self.options = options
        self.documents: list[Any] = []
        self.maps: dict[Path, set[str]] = {}
        self.known: set[Pair] = set()
        self.learned_from = 0
        self.sequence = 0
        self.stabilized = False
        self.hits = self.misses = 0
        self.structures: set[frozenset[Pair]] = set()

    def values(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
        """Yield every value of a document with its path; names in maps count as one unless stable."""
        yield path, value
        if len(path) >= self.options.deep_inspect.max_depth:
            return
        if isinstance(value, list):
            for one in value:
                yield from self.values(one, (*path, "[]"))
        elif isinstance(value, dict):
            for name, one in value.items():
                told_apart = path not in self.maps or name in self.maps[path]
                yield from self.values(one, (*path, "." + name if told_apart else "<*>"))

    def observe(self, text: str) -> bool:
        """Observe a document; return whether it differs from what was learned."""
        document = json.loads(text)
        pairs = {(path, type_of(value)) for path, value in self.values(document)}
        self.documents.append(document)
        new = pairs - self.known
        strange = self.stabilized and bool(new)
        evolved = bool(new) and not self.stabilized
        if evolved:
            self.known |= new
            self.sequence += 1
        self._remember(frozenset(pairs), evolved=evolved)
        if not self.stabilized:
            self.learned_from += 1
        self._turn()
        return strange

    def counts(self) -> Counter[Pair]:
        """Return how often each known pair of path and type occurred."""
        return Counter(
            pair
            for document in self.documents
            for path, value in self.values(document)
            if (pair := (path, type_of(value))) in self.known
        )

    def strings(self) -> dict[Path, Counter[str]]:
        """Return the strings at each path of the documents that were learned from."""
        found: dict[Path, Counter[str]] = {}
        for document in self.documents[: self.learned_from]:
            for path, value in self.values(document):
                if isinstance(value, str):
                    found.setdefault(path, Counter())[value] += 1
        return found

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint, computed from its definition."""
        order = ["null", "boolean", "integer", "number", "string", "array", "object"]
        paths = {path for path, _ in self.known}
        lines = sorted(
            [*path, *(one for one in order if (path, one) in self.known)] for path in paths
        )
        text = json.dumps(lines, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def _remember(self, structure: frozenset[Pair], *, evolved: bool) -> None:
        if not self.options.sampling.structure_cache:
            return
        if evolved:
            self.structures.clear()
        if structure in self.structures:
            self.hits += 1
            return
        self.misses += 1
        if len(self.structures) < self.options.sampling.structure_cache_size:
            self.structures.add(structure)

    def _turn(self) -> None:
        high, count = self.options.high_cardinality, len(self.documents)
        most = self.options.deep_inspect.max_sample_size
        full = not self.stabilized and 0 < most <= count
        again = high.reevaluate_interval
        due = count == high.min_events or (again > 0 and count % again == 0)
        if high.enabled and count >= high.min_events and (due or full):
            self._find_maps()
        self.stabilized = self.stabilized or full

    def _find_maps(self) -> None:
        looked_at: set[Path] = set()
        while True:
            left = {path for path, kind in self.known if kind == "object"}
            left -= looked_at | self.maps.keys()
            if not left:
                return
            path = min(left, key=lambda one: (len(one), one))
            looked_at.add(path)
            stable = self._stable_names_of_map(path)
            if stable is not None:
                self._fold(path, stable)

    def _stable_names_of_map(self, path: Path) -> set[str] | None:
        """Return the names that are fields if the object is a map, otherwise None."""
        high, counts = self.options.high_cardinality, self.counts()
        objects = counts[path, "object"]
        shares: Counter[str] = Counter()
        for (one, _), count in counts.items():
            if len(one) == len(path) + 1 and one[:-1] == path and one[-1].startswith("."):
                shares[one[-1][1:]] += count
        stable = {one for one, count in shares.items() if count / objects >= high.stable_threshold}
        others = shares.keys() - stable
        if not others or len(others) < high.min_dynamic_fields:
            return None
        usual = math.fsum(shares[one] / objects for one in stable) / len(stable) if stable else 1.0
        unusual = math.fsum(shares[one] / objects for one in others) / len(others)
        confidence = 0.5 * math.sqrt(min(objects / high.min_events, 1)) + 0.5 * max(
            0, usual - unusual
        )
        return stable if confidence >= high.confidence_threshold else None

    def _fold(self, path: Path, stable: set[str]) -> None:
        self.maps[path] = stable
        maps: dict[Path, set[str]] = {}
        for one, names in self.maps.items():
            maps.setdefault(self._folded(one), set()).update(names)
        self.maps = maps
        self.known = {(self._folded(one), kind) for one, kind in self.known}
        self.structures.clear()
        self.sequence += 1

    def _folded(self, path: Path) -> Path:
        made: Path = ()
        for step in path:
            inside = made in self.maps and step.startswith(".") and step[1:] not in self.maps[made]
            made = (*made, "<*>" if inside else step)
        return made
