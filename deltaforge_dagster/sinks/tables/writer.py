"""The interface of writers, which apply staged changes to a sink's tables exactly once.

A commit may be repeated: because the destination's answer was lost, or by the successor of a run
that was killed, perhaps while the destination still executes statements of the dead run. So a
table, or its database, records which commits it has atomically with their rows, and a writer
applies no commit twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.tables.config import full_name
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.state.lake_commits import TableFigures

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
