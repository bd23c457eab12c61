"""Finds the columns of a table to rename before a commit, because the source renamed columns.

A table remembers what identifies its columns (`state.identities`). A column whose name another
column has now is renamed to `dropped_name`, and keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.state.identities import dropped_name, is_certain


def uncertain_column(label: str, name: str, resync_command: str) -> TableRejected:
    """Return the error for a table if it is uncertain whether a column existed before."""
    return TableRejected(
        f"{label}: the columns of the source's table have changed, and whether its column {name} "
        "is one that was there before is not known; have the table loaded again",
        remedy=resync_command,
    )


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns that a table has.

    Attributes:
        names: Their names, by the name as it is compared.
        identities: What identifies columns of the source, by the name as it is compared, as far as
            known.
        fold: Returns a name as it is compared.
    """

    names: Mapping[str, str]
    identities: Mapping[str, str]
    fold: Callable[[str], str] = str

    def moves(self, table: StagedTable, label: str, resync_command: str) -> list[tuple[str, str]]:
        """Return old and new names of columns to rename, in an order in which new names are free.

        Args:
            table: The changes.
            label: What messages call the table.
            resync_command: The command that has the table loaded again.

        Raises:
            TableRejected: It is not certain which column is which, or the table has another column
                with a new name.
        """
        wanted = {self.fold(name): (name, identity) for name, identity in table.identities.items()}
        self._check_certain(wanted, label, resync_command)
        new_names = self._new_names(wanted)
        moves: list[tuple[str, str]] = []
        taken = set(self.names)
        while new_names:
            free = [old for old, new in new_names.items() if self.fold(new) not in taken]
            if free:
                old = free[0]
                new = new_names.pop(old)
            else:
                old, new = next(iter(new_names.items()))
                if not all(
                    self.fold(new_name) in map(self.fold, new_names)
                    for new_name in new_names.values()
                ):
                    raise TableRejected(
                        f"{label}: the source has renamed column {old} to {new}, and the table "
                        f"has another column {new}; have the table loaded again",
                        remedy=resync_command,
                    )
                # The columns have each other's names: one of them gets a temporary name meanwhile.
                new = dropped_name(self._identity(old))
                new_names[new] = new_names.pop(old)
            taken = taken - {self.fold(old)} | {self.fold(new)}
            moves.append((old, new))
        return moves

    def _identity(self, name: str) -> str:
        return self.identities[self.fold(name)]

    def _check_certain(
        self, wanted: Mapping[str, tuple[str, str]], label: str, resync_command: str
    ) -> None:
        for name, identity in wanted.values():
            if not is_certain(identity) and identity not in self.identities.values():
                raise uncertain_column(label, name, resync_command)

    def _new_names(self, wanted: Mapping[str, tuple[str, str]]) -> dict[str, str]:
        """Return the new names of the columns to rename, by their present names."""
        present_names = {
            identity: self.names[name]
            for name, identity in self.identities.items()
            if name in self.names
        }
        for _, identity in wanted.values():
            temporary = self.fold(dropped_name(identity))
            if (
                identity not in present_names
                and temporary in self.names
                and temporary not in self.identities
            ):
                # A run renamed it, and ended before it stored its identity.
                present_names[identity] = self.names[temporary]
        new_names = {
            present_names[identity]: name
            for name, identity in wanted.values()
            if identity in present_names and self.fold(present_names[identity]) != self.fold(name)
        }
        wanted_ids = {identity for _, identity in wanted.values()}
        for identity, name in present_names.items():
            folded = self.fold(name)
            if folded in wanted and wanted[folded][1] != identity and identity not in wanted_ids:
                new_names[name] = dropped_name(identity)
        return new_names
