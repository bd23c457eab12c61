"""Resources that only one pipeline may use, such as a replication slot or a target table.

Two pipelines with one replication slot lose each other's changes, and two with one table overwrite
each other's rows. Each kind of source and sink lists the resources that a `config` block names. A
resource is identified by its server and its name, without user and password, so that it can be
derived from files alone (`pipeline.control.owners` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from deltaforge_dagster.config.globs import overlap

_LOOPBACK = {"localhost", "127.0.0.1", "::1", ""}


@dataclass(frozen=True, slots=True)
class OwnedResource:
    """Something outside the installation that belongs to one pipeline.

    Attributes:
        what: The kind of resource in messages: `replication slot`.
        place: Where it is: a server, a database, a folder.
        name: Its name in that place; wildcards stand for all resources with matching names.
        field: The path, in the pipeline file, of the field that names it.
    """

    what: str
    place: tuple[str, ...]
    name: str
    field: str

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> Self:
        """Return the resource that `to_fields` has described."""
        what, name, field, *location = fields
        return cls(what, tuple(location), name, field)

    @classmethod
    def of_pipeline(cls, names: Mapping[str, str], server: str) -> list[Self]:
        """Return the resources that a server keeps under the pipeline's name, such as positions.

        Args:
            names: Their names by kind of resource.
            server: The server, as a place.
        """
        return [cls(what, (server,), name, "metadata.name") for what, name in names.items()]

    def to_fields(self) -> list[str]:
        """Return the resource as texts, for JSON."""
        return [self.what, self.name, self.field, *self.place]

    def is_same(self, other: OwnedResource) -> bool:
        """Return whether both are the same resource, or have a resource in common."""
        same = (self.what, self.place) == (other.what, other.place)
        return same and (self.name == other.name or overlap(self.name, other.name))


@dataclass(frozen=True, slots=True)
class CapturedTables:
    """The tables that a pipeline captures, as its file names them.

    Attributes:
        place: The database that has them, see `OwnedResource`.
        patterns: For each table pattern, the template variables that it determines, with its
            wildcards.
    """

    place: tuple[str, ...]
    patterns: Sequence[Mapping[str, str]]

    @property
    def names(self) -> Sequence[str]:
        """The patterns as text."""
        return [_name(variables).replace("%", "*") for variables in self.patterns] or ["*"]


def _name(variables: Mapping[str, str]) -> str:
    """Return a table pattern as text; without a database, it means tables of any database."""
    parts = list(variables.values())
    return ".".join(parts if len(parts) > 1 else ["*", *parts])


def server_place(host: str | None, port: int | str | None) -> str:
    """Return `host:port` of a server as a place; all names of this machine become `localhost`."""
    name = (host or "").strip("[]").lower()
    return f"{'localhost' if name in _LOOPBACK else name}:{port}"
