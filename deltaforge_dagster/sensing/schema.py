"""The schema of documents: learned from the first documents, and then compared with later ones.

A `DocumentSchema` observes documents in order. The result does not depend on how they are divided
into batches: decisions that depend on a count (finding maps, and the end of learning) are made
after exactly that many documents, even within a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.sensing.fields import DocumentField, Fields, displayed
from deltaforge_dagster.sensing.groups import KIND_BITS, Flags, Groups, count_values
from deltaforge_dagster.sensing.scan import (
    ANY,
    INTEGER,
    NUMBER,
    OBJECT,
    ROOT,
    STRING,
    TYPES,
    Cells,
    Path,
    child,
    path_number,
    scan,
)
from deltaforge_dagster.sensing.values import FieldValues, MapNames, judged

MOST_FIELDS = 5_000
"""A schema with more fields than this stops learning; checked every `LOOK` documents."""
LOOK = 1_000
_SHOWN = 20
"""How many additions are listed in an evolution."""

_Pairs: TypeAlias = dict[int, tuple[Path, int]]

_MANY = 1 << 40


class DocumentSchema:
    """The schema of one sequence of documents.

    Args:
        options: The pipeline's `schema_sensing`.
        around: The number of levels above the documents: 1 if they are columns of a row, else 0.

    Attributes:
        fields: The fields by path; see `Fields`.
        maps: The names of maps, by path.
        sampled: How many documents were observed.
        sequence: Version of the schema: 1 for the first, and one more with each evolution.
        stabilized: Whether the schema has stopped learning.
        hits: How many documents had a structure that was in the structure cache.
        misses: How many documents had a structure that was not.
        evolutions: The changes since the schema was created or restored; each with the old and the
            new fingerprint, and what was added.
        first_us: Event time of the first observed document.
        last_us: Event time of the latest observed document.
    """

    def __init__(self, options: SchemaSensing, around: int = 0) -> None:
        self._options = options
        self._around = around
        self.fields: Fields = {}
        self.maps: dict[Path, MapNames] = {}
        self.sampled = 0
        self.sequence = 0
        self.stabilized = False
        self.hits = self.misses = 0
        self.evolutions: list[dict[str, Any]] = []
        self.first_us = self.last_us = 0
        self._structures: set[int] = set()
        self._pairs: _Pairs = {}

    @property
    def fingerprint(self) -> str:
        """`sha256:` and the hexadecimal SHA-256 of the sorted paths and their types."""
        typed_paths = sorted([*path, *field.types] for path, field in self.fields.items())
        return "sha256:" + hashlib.sha256(orjson.dumps(typed_paths)).hexdigest()

    @property
    def depth(self) -> int:
        """The depth at which values are not inspected further."""
        inspection = self._options.deep_inspect
        return self._around + (inspection.max_depth if inspection.enabled else 1)

    @property
    def structures(self) -> int:
        """The number of structures in the structure cache."""
        return len(self._structures)

    def observe(self, documents: pa.StringArray, times_us: npt.NDArray[np.int64]) -> Flags:
        """Observe the next documents; return a mask of those that differ from a stabilized schema.

        Args:
            documents: JSON texts, not null.
            times_us: The event time of each document.
        """
        differing = np.zeros(len(documents), np.bool_)
        at = 0
        while at < len(documents):
            size = min(self._until_next_turn(), len(documents) - at)
            differing[at : at + size] = self._observe(documents.slice(at, size), times_us[at])
            at += size
            self.last_us = max(self.last_us, int(times_us[at - 1]))
            self._turn()
        return differing

    def _until_next_turn(self) -> int:
        high, most = self._options.high_cardinality, self._options.deep_inspect.max_sample_size
        turns = [] if self.stabilized else [LOOK - self.sampled % LOOK]
        if self.sampled < high.min_events:
            turns.append(high.min_events - self.sampled)
        if high.reevaluate_interval:
            turns.append(high.reevaluate_interval - self.sampled % high.reevaluate_interval)
        if self.sampled < most:
            turns.append(most - self.sampled)
        return min(turns, default=_MANY)

    def _turn(self) -> None:
        """Make the decisions that are due after this number of documents."""
        high, most = self._options.high_cardinality, self._options.deep_inspect.max_sample_size
        again = high.reevaluate_interval
        full = not self.stabilized and (
            0 < most <= self.sampled
            or (self.sampled % LOOK == 0 and len(self.fields) > MOST_FIELDS)
        )
        due = self.sampled == high.min_events or (again > 0 and self.sampled % again == 0)
        if high.enabled and self.sampled >= high.min_events and (full or due):
            self._find_maps()
        self.stabilized = self.stabilized or full

    def _observe(self, documents: pa.StringArray, first_us: int) -> Flags:
        if not self.sampled:
            self.first_us = int(first_us)
        self.sampled += len(documents)
        maps = {path_number(path): path for path in self.maps}
        stable = {
            child(number, "." + name)
            for number, path in maps.items()
            for name in self.maps[path].stable
        }
        cells = scan(documents, self.depth, maps, stable)
        groups = Groups(cells)
        structures = groups.structures().tolist()
        cached = self._options.sampling.structure_cache and self._structures.issuperset(structures)
        differing = np.zeros(len(documents), np.bool_)
        evolved: set[int] = set()
        if self.stabilized:
            differing = groups.lacking(self._pairs)
        elif not cached:
            evolved = self._grow(cells, groups)
        self._count(groups)
        if self.maps:
            self._count_names(cells, maps)
        if not self.stabilized:
            self._take_values(cells, groups)
        self._remember(structures, evolved)
        return differing

    def _grow(self, cells: Cells, groups: Groups) -> set[int]:
        """Add new paths and types to the schema; return the documents where they first occurred."""
        places: dict[int, Path] = {ROOT: ()} | {
            pair >> KIND_BITS: path for pair, (path, _) in self._pairs.items()
        }
        added: dict[int, list[str]] = {}
        fresh = [n for n, pair in enumerate(groups.pairs.tolist()) if pair not in self._pairs]
        before = self.fingerprint if self.sequence else None
        for index in sorted(fresh, key=lambda position: int(groups.first[position])):
            cell = int(groups.first[index])
            document = int(cells.document[cell])
            if added and document not in added:
                before = self._evolved(before, added[max(added)])
            pair = int(groups.pairs[index])
            number, kind = pair >> KIND_BITS, pair & ((1 << KIND_BITS) - 1)
            if number not in places:
                places[number] = (*places[int(cells.parent[cell])], cells.step(cell))
            path = places[number]
            if path not in self.fields:
                self.fields[path] = DocumentField(FieldValues(self._options.tracking))
            # The real count is added at the end of the batch; until then 1 marks the type as known.
            self.fields[path].counts[kind] = 1
            self._pairs[pair] = (path, kind)
            added.setdefault(document, []).append(f"{displayed(path)}: {TYPES[kind]}")
        if added:
            self._evolved(before, added[max(added)])
        for index in fresh:
            path, kind = self._pairs[int(groups.pairs[index])]
            self.fields[path].counts[kind] = 0
        return set(added)

    def _evolved(self, before: str | None, added: list[str]) -> str:
        """Record an evolution of the schema; return the new fingerprint."""
        self.sequence += 1
        after = self.fingerprint
        if before is not None:
            self.evolutions.append(
                {
                    "sequence": self.sequence,
                    "old": before,
                    "new": after,
                    "added": added[:_SHOWN],
                    "more": max(0, len(added) - _SHOWN),
                }
            )
        return after

    def _count(self, groups: Groups) -> None:
        for pair, count in zip(groups.pairs.tolist(), groups.counts.tolist(), strict=True):
            if pair in self._pairs:
                path, kind = self._pairs[pair]
                self.fields[path].counts[kind] += count

    def _count_names(self, cells: Cells, maps: Mapping[int, Path]) -> None:
        for number, path in maps.items():
            inside = np.flatnonzero(cells.path == child(number, ANY))
            if len(inside):
                self.maps[path].add(count_values(cells.names(inside)))

    def _take_values(self, cells: Cells, groups: Groups) -> None:
        tracking = self._options.tracking
        for index, pair in enumerate(groups.pairs.tolist()):
            path, kind = self._pairs[pair]
            values = self.fields[path].values
            if kind == STRING:
                values.add_strings(cells.texts(groups.cells(index), inside=1))
            elif kind in {INTEGER, NUMBER} and tracking.field_statistics:
                values.add_numbers(cells.texts(groups.cells(index)))

    def _remember(self, structures: list[int], evolved: set[int]) -> None:
        """Look up each document's structure in the structure cache, and add it if there is room."""
        sampling = self._options.sampling
        if not sampling.structure_cache:
            return
        for document, structure in enumerate(structures):
            if document in evolved:
                self._structures.clear()
            if structure in self._structures:
                self.hits += 1
                continue
            self.misses += 1
            if len(self._structures) < sampling.structure_cache_size:
                self._structures.add(structure)

    def _find_maps(self) -> None:
        """Find the objects that are maps, outermost first, and convert them."""
        examined: set[Path] = set()
        while True:
            objects = [
                path for path, field in self.fields.items()
                if field.counts[OBJECT] and path not in self.maps and path not in examined
            ]  # fmt: skip
            if not objects:
                return
            path = min(objects, key=lambda candidate: (len(candidate), candidate))
            examined.add(path)
            names = {
                member[-1][1:]: field.total
                for member, field in self.fields.items()
                if len(member) == len(path) + 1 and member[:-1] == path and member[-1][0] == "."
            }
            high = self._options.high_cardinality
            verdict = judged(high, self.fields[path].counts[OBJECT], names)
            if verdict.is_map:
                self._fold(path, verdict.stable, names)

    def _fold(self, path: Path, stable: Iterable[str], names: Mapping[str, int]) -> None:
        """Merge the fields of a map, except stable ones, into a single field."""
        before = self.fingerprint
        kept = set(stable)
        self.maps[path] = MapNames(self._options.high_cardinality, kept)
        self.maps[path].add({name: count for name, count in names.items() if name not in kept})
        depth = len(path)

        def folded(old: Path) -> Path:
            inside = len(old) > depth and old[:depth] == path and old[depth][0] == "."
            if inside and old[depth][1:] not in kept:
                return (*path, ANY, *old[depth + 1 :])
            return old

        fields: Fields = {}
        for old, field in self.fields.items():
            new = folded(old)
            if new in fields:
                fields[new].merge(field)
            else:
                fields[new] = field
        maps: dict[Path, MapNames] = {}
        for old, inner in self.maps.items():
            new = folded(old)
            if new in maps:
                maps[new].merge(inner)
            else:
                maps[new] = inner
        self.fields, self.maps = fields, maps
        self._fold_into_maps()
        self._structures.clear()
        self._index()
        self._evolved(before, [f"{displayed((*path, ANY))}: names are values"])

    def _fold_into_maps(self) -> None:
        """Fold the fields that are stable in neither of two maps that were merged."""
        for path, inner in list(self.maps.items()):
            loose = [
                member for member in self.fields
                if len(member) == len(path) + 1 and member[:-1] == path
                and member[-1][0] == "." and member[-1][1:] not in inner.stable
            ]  # fmt: skip
            for member in sorted(loose):
                inner.add({member[-1][1:]: self.fields[member].total})
                for below in [other for other in self.fields if other[: len(member)] == member]:
                    new = (*path, ANY, *below[len(member) :])
                    field = self.fields.pop(below)
                    if new in self.fields:
                        self.fields[new].merge(field)
                    else:
                        self.fields[new] = field

    def _index(self) -> None:
        self._pairs = {
            path_number(path) << KIND_BITS | kind: (path, kind)
            for path, field in self.fields.items()
            for kind, count in enumerate(field.counts)
            if count
        }

    def state(self) -> dict[str, Any]:
        """Return the state for `restored`, as JSON values."""
        return {
            "sampled": self.sampled,
            "sequence": self.sequence,
            "stabilized": self.stabilized,
            "structures": sorted(self._structures),
            "cache": [self.hits, self.misses],
            "times": [self.first_us, self.last_us],
            "fields": [[path, field.state()] for path, field in self.fields.items()],
            "maps": [[path, names.state()] for path, names in self.maps.items()],
        }

    @classmethod
    def restored(cls, options: SchemaSensing, state: Mapping[str, Any]) -> DocumentSchema:
        """Return the schema with a state that `state` returned."""
        schema = cls(options)
        schema.sampled = state["sampled"]
        schema.sequence = state["sequence"]
        schema.stabilized = state["stabilized"]
        schema._structures = set(state["structures"])
        schema.hits, schema.misses = state["cache"]
        schema.first_us, schema.last_us = state["times"]
        for path, field in state["fields"]:
            schema.fields[tuple(path)] = DocumentField.restored(options.tracking, field)
        for path, names in state["maps"]:
            schema.maps[tuple(path)] = MapNames.restored(options.high_cardinality, names)
        schema._index()
        return schema


def combined(
    options: SchemaSensing, columns: Mapping[str, DocumentSchema], rows: int
) -> DocumentSchema:
    """Combine the schemas of columns into the schema of rows, in which each column is a field.

    A column that had no document in some of the rows is optional. The result is only for display.

    Args:
        options: The pipeline's `schema_sensing`.
        columns: The schemas of the columns, at least one.
        rows: The number of inspected rows.
    """
    whole = DocumentSchema(options, around=1)
    whole.sampled = rows
    whole.fields[()] = DocumentField(FieldValues(options.tracking))
    whole.fields[()].counts[OBJECT] = rows
    for name, schema in columns.items():
        whole.fields |= {("." + name, *path): field for path, field in schema.fields.items()}
        whole.maps |= {("." + name, *path): names for path, names in schema.maps.items()}
    whole.sequence = sum(schema.sequence for schema in columns.values())
    whole.stabilized = all(schema.stabilized for schema in columns.values())
    whole.first_us = min(schema.first_us for schema in columns.values())
    whole.last_us = max(schema.last_us for schema in columns.values())
    return whole
