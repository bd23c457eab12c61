"""The interface with which a sink's table is compared with the rows of the source.

The sink compares, not we: the rows that the source has are applied to an empty table of its own
with the columns of the sink's table, by the same statements as every commit. Both tables then have
the same types, and what differs between them as text differs.

A table is compared window by window (`TableComparer.view`), each in one snapshot of the
destination:

1. `ComparedView.load` applies the rows that a read of the source saw: the *window*.
2. `ComparedView.change` applies the changes that the read did not see, up to what the table has.
3. `ComparedView.differences` compares the rows with the window's keys.

After the last window, `ComparedView.extra_rows` returns the rows that no window had.

A repair does the same while the table is locked for commits, and then makes it what it should be
(`ComparedView.repair`, `remove_extra_rows`): commits that come later find it as if it had always
been so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deltaforge_dagster.sinks.tables.staged import StagedTable

DifferenceKind = Literal["missing", "extra", "different", "duplicate"]
"""What is wrong with the row of a key: only the source has it, only the sink has it, columns
differ, or the sink has it several times."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that differs between source and sink.

    The values are the sink's texts of them. They are as the sink may have them: after column rules.

    Attributes:
        kind: What is wrong.
        key: The values of the key's columns, by name.
        columns: Names of the columns that differ; empty unless `kind` is `different`.
        source: The values of these columns at the source, by name.
        sink: Their values at the sink.
    """

    kind: DifferenceKind
    key: Mapping[str, str | None]
    columns: Sequence[str] = ()
    source: Mapping[str, str | None] = field(default_factory=dict)
    sink: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """The result of comparing the rows of a window.

    Attributes:
        rows: Number of keys that were compared; of extra rows, how many there are.
        differences: The rows that differ.
    """

    rows: int
    differences: Sequence[RowDifference]


class ComparedView(Protocol):
    """A sink's table as it is at one moment."""

    @property
    def through(self) -> int | None:
        """The last segment that the table says it has; None if it does not say."""
        ...

    def load(self, rows: StagedTable) -> None:
        """Apply the rows of a window; call before `change`.

        Raises:
            TableRejected: The table cannot have such rows.
        """
        ...

    def change(self, changes: StagedTable) -> None:
        """Apply changes after the window was read.

        Raises:
            TableRejected: The table cannot have such rows.
        """
        ...

    def differences(self) -> ComparedRows:
        """Compare the rows with the keys of the window, and remember these keys."""
        ...

    def repair(self) -> None:
        """Give the keys of the window the rows that they should have; the view is `locked`.

        Raises:
            TableRejected: The table cannot be repaired, only loaded again.
        """
        ...

    def remove_extra_rows(self) -> None:
        """Delete the rows that `extra_rows` returns; the view is `locked`.

        Raises:
            TableRejected: The table cannot be repaired, only loaded again.
        """
        ...

    def extra_rows(self) -> ComparedRows:
        """Return the rows whose keys no window had, and no change (`change`) has added.

        All are counted, the first ones are listed.
        """
        ...


class TableComparer(Protocol):
    """Compares one table of a sink, over one connection; used by one thread.

    Methods raise subclasses of `DeltaforgeError`.
    """

    def view(self, *, locked: bool = False) -> AbstractContextManager[ComparedView]:
        """Provide the table as it is at one moment.

        Args:
            locked: Whether commits wait until the view ends, so that the table may be changed;
                what was changed is undone if the block raises.

        Raises:
            TableRejected: There is no such table.
            SinkUnavailable: The destination cannot be reached.
        """
        ...

    def close(self) -> None:
        """Disconnect, and forget the windows."""
        ...
