"""Which columns of a table were renamed: the catalog numbers columns, and a column keeps its number under another name.

The log has names only. So the numbers are asked for when the log describes a table with other names than before, and
stored with the position, because they cannot be asked for later. The catalog may be ahead of the log. Then it has other
names, the numbers remain unknown, and no column counts as renamed. That it has the same names again, but for other
columns, is not noticed: for that, columns would have to be renamed, dropped and added in a circle within the lag of the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SourceNotes
from deltaforge_dagster.sources.postgres.decode.pgoutput import Relation

ColumnNumbers = Callable[[int], Mapping[str, int]]
"""Returns the numbers (`attnum`) of the columns that a table has now, by name; the table is given by its OID."""


@dataclass(frozen=True, slots=True)
class NumberedColumns:
    """The columns of a table as the log has described them.

    Attributes:
        oid: OID of the table.
        names: Their names.
        numbers: Their numbers, which increase; None if they are not known.
    """

    oid: int
    names: list[str]
    numbers: list[int] | None


class CatalogRenames:
    """Finds renamed columns, for one reader of the log.

    Args:
        numbers: Asks the catalog.
        notes: Where numbers are stored.
        start: Where the reader begins.
    """

    def __init__(self, numbers: ColumnNumbers, notes: SourceNotes, start: Position) -> None:
        self._numbers = numbers
        self._notes = notes
        self._known = {
            table: NumberedColumns(**json.loads(text))
            for table, text in notes.defined(start).items()
        }

    def compare(self, relation: Relation) -> tuple[NumberedColumns, Mapping[str, str]]:
        """Return the columns of a table, and those that had another name before, with that name.

        Raises:
            DeltaforgeError: The catalog cannot be read.
        """
        names = [column.name for column in relation.columns]
        known = self._known.get(relation.full_name)
        if known is not None and (known.oid, known.names) == (relation.oid, names):
            return known, {}
        found = self._numbers(relation.oid)
        numbers = [found[name] for name in names if name in found]
        certain = len(numbers) == len(names) and numbers == sorted(numbers)
        now = NumberedColumns(relation.oid, names, numbers if certain else None)
        if known is None or known.oid != now.oid or not (known.numbers and now.numbers):
            return now, {}
        before = dict(zip(known.numbers, known.names, strict=True))
        renamed = {
            name: before[number]
            for name, number in zip(names, now.numbers, strict=True)
            if before.get(number, name) != name
        }
        return now, renamed

    def note(self, relation: Relation, columns: NumberedColumns, position: Position) -> None:
        """Remember the columns that a table has from a position on; they are durable when this returns."""
        if self._known.get(relation.full_name) != columns:
            self._notes.define({relation.full_name: json.dumps(asdict(columns))}, position)
            self._known[relation.full_name] = columns
