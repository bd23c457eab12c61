"""The fields of documents: how often each occurred, with which types and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deltaforge_dagster.config.sensing import Tracking
from deltaforge_dagster.sensing.scan import ELEMENT, OBJECT, TYPES, Path
from deltaforge_dagster.sensing.values import FieldValues


@dataclass(slots=True)
class DocumentField:
    """What is known about the values at one path of documents.

    Attributes:
        values: Its strings and numbers.
        counts: How often each type occurred, in the order of `TYPES`; the schema has the types
            above 0.
    """

    values: FieldValues
    counts: list[int] = field(default_factory=lambda: [0] * len(TYPES))

    @property
    def total(self) -> int:
        """How often it occurred."""
        return sum(self.counts)

    @property
    def types(self) -> list[str]:
        """The names of the types that occurred, in the order of `TYPES`."""
        return [name for name, count in zip(TYPES, self.counts, strict=True) if count]

    def merge(self, other: DocumentField) -> None:
        """Add another field to this one."""
        self.counts = [own + added for own, added in zip(self.counts, other.counts, strict=True)]
        self.values.merge(other.values)

    def state(self) -> dict[str, Any]:
        """Return the state for `restored`, as JSON values."""
        return {"counts": self.counts, "values": self.values.state()}

    @classmethod
    def restored(cls, tracking: Tracking, state: Mapping[str, Any]) -> DocumentField:
        """Return the field with a state that `state` returned."""
        return cls(FieldValues.restored(tracking, state["values"]), list(state["counts"]))


Fields = dict[Path, DocumentField]
"""The fields of a schema by path; the document itself has the empty path."""


def children(fields: Fields, path: Path) -> Iterator[Path]:
    """Yield the paths directly below a path."""
    for candidate in fields:
        if len(candidate) == len(path) + 1 and candidate[: len(path)] == path:
            yield candidate


def optional(fields: Fields, path: Path) -> bool:
    """Return whether some objects did not have this field."""
    return fields[path].total < fields[path[:-1]].counts[OBJECT]


def displayed(path: Path) -> str:
    """Return a path as text, such as `$.items[].price`; `<*>` stands for any name in a map."""
    return "$" + "".join(f".{step}" if step[0] == "<" else step for step in path)


def dotted(path: Path) -> str:
    """Return a path in the API's notation, such as `items[].price`; empty for the document."""
    return without_root(displayed(path))


def without_root(text: str) -> str:
    """Replace the path of `displayed` at the beginning of a text by the same path of `dotted`."""
    return text.removeprefix("$").removeprefix(".")


def name_of(path: Path) -> str:
    """Return the last step of a path as the name of a field."""
    step = path[-1]
    return step if step == ELEMENT or step[0] == "<" else step[1:]
