"""The fields of documents: how often each occurred, as what, and what its values are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deltaforge_dagster.config.sensing import Tracking
from deltaforge_dagster.sensing.paths import ELEMENT, Path
from deltaforge_dagster.sensing.scan import OBJECT, TYPES
from deltaforge_dagster.sensing.values import Values


@dataclass(slots=True)
class Field:
    """A path of documents.

    Attributes:
        values: Its strings and numbers.
        counts: How often it was of each type, in the order of `TYPES`; the schema has those above 0.
    """

    values: Values
    counts: list[int] = field(default_factory=lambda: [0] * len(TYPES))

    @property
    def total(self) -> int:
        """How often it occurred."""
        return sum(self.counts)

    @property
    def types(self) -> list[str]:
        """The types that it had, by name, in the order of `TYPES`."""
        return [name for name, count in zip(TYPES, self.counts, strict=True) if count]

    def merge(self, other: Field) -> None:
        """Add another field to this one."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.values.merge(other.values)

    def state(self) -> dict[str, Any]:
        """Return what `restored` reads, as JSON values."""
        return {"counts": self.counts, "values": self.values.state()}

    @classmethod
    def restored(cls, tracking: Tracking, state: Mapping[str, Any]) -> Field:
        """Return the field that `state` is of."""
        return cls(Values.restored(tracking, state["values"]), list(state["counts"]))


Fields = dict[Path, Field]
"""The fields of a schema by their paths; that of the document itself is the empty path."""


def children(fields: Fields, path: Path) -> Iterator[Path]:
    """Yield the paths right inside a path."""
    for one in fields:
        if len(one) == len(path) + 1 and one[: len(path)] == path:
            yield one


def optional(fields: Fields, path: Path) -> bool:
    """Say whether objects were seen without this field."""
    return fields[path].total < fields[path[:-1]].counts[OBJECT]


def displayed(path: Path) -> str:
    """Return a path as text, such as `$.items[].price`; `<*>` is any name of a map."""
    return "$" + "".join(f".{step}" if step[0] == "<" else step for step in path)


def dotted(path: Path) -> str:
    """Return a path as API clients know it, such as `items[].price`; empty for the document itself."""
    return displayed(path).removeprefix("$").removeprefix(".")


def name_of(path: Path) -> str:
    """Return the last step of a path as the name of a field."""
    step = path[-1]
    return step if step == ELEMENT or step[0] == "<" else step[1:]
