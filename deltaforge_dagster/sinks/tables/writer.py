"""The interface of writers, which apply staged changes to a sink's tables exactly once.

A commit may be repeated: because the destination's answer was lost, or by the successor of a run
that was killed, perhaps while the destination still executes statements of the dead run. So a
table, or its database, records which commits it has atomically with their rows, and a writer
applies no commit twice.

A table also remembers what identifies its columns (`state.identities`), because the source may
rename columns (`TableColumns`). A column whose name another column has now is renamed to
`dropped_name`, and keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.tables.config import full_name
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.state.identities import dropped_name, is_certain
from deltaforge_dagster.state.table_commits import TableFigures

FoldTime = Literal["before", "after", "later"]
"""When pending changes are folded: before a commit to the table, after one was added, or later."""

PREFIX = "df_"
"""Prefix of the names of the columns that DeltaForge adds."""


@dataclass(frozen=True, slots=True)
class TableOwner:
    """The identity of whoever writes tables.

    Attributes:
        uid: Uid of the pipeline; it changes when the pipeline's journal starts over.
        pipeline: Name of the pipeline.
        sink_id: Id of the sink.
        log: Identity of the server from which the source is read (`Source.identity`); empty if not
            known.
    """

    uid: str
    pipeline: str
    sink_id: str
    log: str = ""

    @property
    def name(self) -> str:
        """The writer's name in stamps of commits."""
        return f"{self.uid}/{self.sink_id}"

    def resync_command(self, table: StagedTable) -> str:
        """Return the command that has a table loaded again."""
        name = full_name(*table.source)
        return f"deltaforge resync {self.pipeline} --sink {self.sink_id} --tables {name}"


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A table after a commit.

    Attributes:
        columns: Name and type of each column.
        figures: The table's figures; None if the commit has not changed the table, because it had
            the commit already or the commit went beside it, or if the figures are not known.
        int64_timestamps: Whether none of its files has timestamps as INT96.
    """

    columns: Sequence[tuple[str, str]]
    figures: TableFigures | None = None
    int64_timestamps: bool = True


class CommitWriter(Protocol):
    """Writes staged changes; used by one thread. Methods raise subclasses of `DeltaforgeError`."""

    def commit(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
    ) -> WrittenTable:
        """Apply the changes of a table, unless it has them already; return once they are durable.

        Args:
            table: The changes.
            through: Number of the commit's last segment. A commit that is repeated has the same
                changes; later commits have larger numbers.
            guard: Called before anything is changed; raises if the run must stop writing.
            exists: Whether the table has everything before these changes. Then it is not made again
                if it is gone, because the earlier changes would be missing without notice.

        Returns:
            The table as it is afterwards.

        Raises:
            TableRejected: The table cannot take the changes; other tables are not affected.
            SinkUnavailable: The destination cannot be reached.
        """
        ...

    def close(self) -> None:
        """Disconnect; may be called twice, and from any thread."""
        ...


class TableWriter(CommitWriter, Protocol):
    """Applies staged changes to the tables of a sink."""

    def recreate(self, table: StagedTable, guard: SendGuard) -> Sequence[tuple[str, str]]:
        """Replace a table by one without rows, as it would be made today; make it if there is none.

        Args:
            table: The table, without changes.
            guard: See `commit`.

        Returns:
            See `WrittenTable.columns`.

        Raises:
            TableRejected: The table is not this sink's, or cannot be made.
            SinkUnavailable: See `commit`.
        """
        ...


class PendingWriter(TableWriter, Protocol):
    """A writer for sinks that can keep changes beside a table, and fold them into it later."""

    def commit(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
        required: bool = False,
    ) -> WrittenTable:
        """Fold pending changes, and apply the changes of a table; see `CommitWriter.commit`.

        `required` is whether there are pending changes, so that the table that holds them must
        exist.
        """
        ...

    def append(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
        required: bool = False,
    ) -> WrittenTable:
        """Add changes to the pending ones of a table, unless they are there already; see `commit`.

        The steps of `table` are all of kind `rows`.
        """
        ...

    def fold(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        time: FoldTime,
        *,
        required: bool = False,
    ) -> WrittenTable:
        """Fold the pending changes of a table up to segment `through` into it.

        Returns and raises the same as `commit`.

        Args:
            table: The table; its changes do not matter.
            through: The segment.
            guard: See `commit`.
            time: When the changes are folded.
            required: See `commit`.
        """
        ...


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


def uncertain_column(label: str, name: str, resync_command: str) -> TableRejected:
    """Return the error for a table if it is uncertain whether a column existed before."""
    return TableRejected(
        f"{label}: the columns of the source's table have changed, and whether its column {name} "
        "is one that was there before is not known; have the table loaded again",
        remedy=resync_command,
    )


def table_gone(label: str, command: str) -> TableRejected:
    """Return the error for a table that is gone and must not be made again (`CommitWriter.commit`).

    Args:
        label: What messages call the table.
        command: See `TableOwner.resync_command`.
    """
    return TableRejected(
        f"{label} is gone, with everything that it had; bring it back, or have it loaded again",
        remedy=command,
    )


def other_source(label: str, current: str, source: str) -> TableRejected:
    """Return the error for a table that has the rows of another table of the source.

    Args:
        label: What messages call the table.
        current: Name of the source's table whose rows it has.
        source: Name of the source's table whose rows it was to get.
    """
    return TableRejected(
        f"{label} has the rows of {current}, so those of {source} cannot be written to it; "
        "change the sink's `table`, so that each table of the source has a table of its own"
    )


def column_gone(label: str, column: str, command: str) -> TableRejected:
    """Return the error for a column that the table has lost; see `table_gone`."""
    return TableRejected(
        f"{label}: its column {column} is gone, with what rows had in it, though neither the "
        "source nor the sink has dropped it; have the table loaded again",
        remedy=command,
    )


def column_changed(label: str, column: str, types: tuple[str, str], command: str) -> TableRejected:
    """Return the error for a column whose type was changed at the sink.

    `types` are the types after and before the change, by which values may have become others.
    """
    after, before = types
    return TableRejected(
        f"{label}: its column {column} had the type {before} and has {after}, which may not hold "
        "what rows had in it; have the table loaded again",
        remedy=command,
    )


def check_names(
    names: Iterable[str], table: str, reserved: Callable[[str], str | None] = lambda _name: None
) -> None:
    """Check that a table can have columns of these names besides DeltaForge's own.

    Names are compared without case, as Spark does.

    Args:
        names: The names.
        table: What the error calls the table.
        reserved: Returns why the destination cannot have a column of a name; None if it can.

    Raises:
        TableRejected: It cannot have a column.
    """
    seen: dict[str, str] = {}
    for name in names:
        folded = name.lower()
        problem = reserved(name)
        if folded.startswith(PREFIX):
            problem = f"names that begin with {PREFIX} are those of DeltaForge's own columns"
        elif not name:
            problem = "its name is empty"
        elif folded in seen:
            problem = f"it differs from {seen[folded]} in case only"
        if problem is not None:
            raise TableRejected(
                f"{table} cannot have the column {name!r}: {problem}; exclude the column with a "
                "column rule, or rename it in a processor or the source"
            )
        seen[folded] = name
