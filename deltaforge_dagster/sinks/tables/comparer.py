"""The interface with which a sink's table is compared with the rows of the source.

The sink compares, not we: the rows that the source has are applied to an empty table of its own
with the columns of the sink's table, as every commit is applied. Both tables then have the same
types, and what differs between them as text differs.

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

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from deltaforge_dagster.sinks.tables.staged import StagedTable

MOST_LISTED = 20
"""How many of the rows that differ are listed, at most; all are counted."""

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
        rows: Number of the source's rows that were compared.
        kinds: How many rows differ, by what is wrong.
        columns: In how many rows each column differs.
        listed: The first rows that differ.
    """

    rows: int = 0
    kinds: Mapping[DifferenceKind, int] = field(default_factory=dict)
    columns: Mapping[str, int] = field(default_factory=dict)
    listed: Sequence[RowDifference] = ()

    @classmethod
    def counted(cls, rows: int, differences: Sequence[RowDifference]) -> Self:
        """Return the result with these differences, which are all that there are."""
        kinds = Counter(difference.kind for difference in differences)
        columns = Counter(column for difference in differences for column in difference.columns)
        return cls(rows, kinds, columns, differences[:MOST_LISTED])

    @property
    def differs(self) -> bool:
        """Whether any row differs."""
        return any(self.kinds.values())


class ComparedView(Protocol):
    """A sink's table as it is at one moment."""

    @property
    def through(self) -> int:
        """The last segment that the table has."""
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

    def repair(self) -> bool:
        """Give the keys of the window the rows that they should have; the view is `locked`.

        Returns:
            Whether it was done; False if a commit came first, and the table is as it was.

        Raises:
            TableRejected: The table cannot be repaired, only loaded again.
        """
        ...

    def remove_extra_rows(self) -> bool:
        """Delete the rows that `extra_rows` returns; see `repair`."""
        ...

    def extra_rows(self) -> ComparedRows:
        """Return the rows whose keys no window had, and no change (`change`) has added."""
        ...


class TableComparer(Protocol):
    """Compares one table of a sink, over one connection; used by one thread.

    Methods raise subclasses of `DeltaforgeError`.
    """

    @property
    def window_rows(self) -> int:
        """How many rows a window should have."""
        ...

    @property
    def keeps_windows(self) -> bool:
        """Whether the files of all windows are needed until the search for extra rows."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a view has all commits up to its segment, and nothing of later ones.

        If not, what it finds counts only if no commit was under way.
        """
        ...

    def view(self, front: int, *, locked: bool = False) -> AbstractContextManager[ComparedView]:
        """Provide the table as it is at one moment.

        Args:
            front: A segment that the table has at least, as the state store says.
            locked: Whether the table may be changed. Commits wait until the view ends, or else a
                change is made only if no commit came before it.

        Raises:
            TableRejected: There is no such table.
            SinkUnavailable, SparkUnavailable: The windows are forgotten, as the destination or what
                reads it cannot be reached.
        """
        ...

    def close(self) -> None:
        """Disconnect, and forget the windows."""
        ...
