"""What only one pipeline may use: each kind of source and sink says which such things a `config` block names.

Two pipelines with one replication slot lose each other's changes, and two with one table overwrite each other's rows. Such a
thing is identified by the server that has it and by its name, without user and password, so that it is known from
files alone (`pipeline.control.owners` compares them).
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
        what: What it is, for people: `replication slot`.
        place: What has it: a server, a database, a folder.
        name: Its name there; with wildcards for all that have such a name.
        field: The path in the pipeline file of what names it.
    """

    what: str
    place: tuple[str, ...]
    name: str
    field: str

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> Self:
        """Return what `to_fields` has described."""
        what, name, field, *location = fields
        return cls(what, tuple(location), name, field)

    @classmethod
    def of_pipeline(cls, names: Mapping[str, str], server: str) -> list[Self]:
        """Return what a server has under the pipeline's name, such as positions: names by what each is."""
        return [cls(what, (server,), name, "metadata.name") for what, name in names.items()]

    def to_fields(self) -> list[str]:
        """Return texts for JSON."""
        return [self.what, self.name, self.field, *self.place]

    def is_same(self, other: OwnedResource) -> bool:
        """Return whether both are, or include, one and the same."""
        same = (self.what, self.place) == (other.what, other.place)
        return same and (self.name == other.name or overlap(self.name, other.name))


@dataclass(frozen=True, slots=True)
class CapturedTables:
    """The tables that a pipeline captures, as its file names them.

    Attributes:
        place: The database that has them, see `OwnedResource`.
        patterns: The variables of templates that each pattern determines, with its wildcards.
    """

    place: tuple[str, ...]
    patterns: Sequence[Mapping[str, str]]

    @property
    def names(self) -> Sequence[str]:
        """The patterns as text."""
        return [_name(variables).replace("%", "*") for variables in self.patterns] or ["*"]


def _name(variables: Mapping[str, str]) -> str:
    """Return the full name of tables; a pattern that names only the table means those of any database."""
    parts = list(variables.values())
    return ".".join(parts if len(parts) > 1 else ["*", *parts])


def server_place(host: str | None, port: int | str | None) -> str:
    """Return `host:port` of a server as a place; all names of this machine are one."""
    name = (host or "").strip("[]").lower()
    return f"{'localhost' if name in _LOOPBACK else name}:{port}"
