"""Which columns of a table were renamed: the catalog numbers columns, and a column keeps its number under another name.

The log has names only. So the numbers are asked for when the log describes a table with other names than before, and
stored with the position, because they cannot be asked for later. The catalog may be ahead of the log. Then it has other
names. As long as no column has been dropped since the numbers were known, the numbers are those from before and then those
that were given next, because the log has columns by number, too. Otherwise they remain unknown, and no column counts as
renamed. That the catalog has the same names again, but for other columns, is not noticed: for that, columns would have to be
renamed, dropped and added in a circle within the lag of the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SourceNotes
from deltaforge_dagster.sources.postgres.decode.pgoutput import Relation


@dataclass(frozen=True, slots=True)
class CatalogNumber:
    """What the catalog has under a column's number: name and OID of the type; None if the column was dropped."""

    name: str | None
    type_oid: int


ColumnNumbers = Callable[[int], Mapping[int, CatalogNumber]]
"""Returns what the catalog has now of a table, which is given by its OID, by number of a column (`attnum`)."""


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
        catalog = self._numbers(relation.oid)
        numbers = _by_name(names, catalog)
        if numbers is None and known is not None and known.oid == relation.oid:
            numbers = _by_place(relation, known, catalog)
        now = NumberedColumns(relation.oid, names, numbers)
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


def _by_name(names: list[str], catalog: Mapping[int, CatalogNumber]) -> list[int] | None:
    """Return the columns' numbers; None unless the catalog has all of these names, in the same order."""
    found = {one.name: number for number, one in catalog.items()}
    numbers = [found[name] for name in names if name in found]
    return numbers if len(numbers) == len(names) and numbers == sorted(numbers) else None


def _by_place(
    relation: Relation, known: NumberedColumns, catalog: Mapping[int, CatalogNumber]
) -> list[int] | None:
    """Return the numbers of columns by those that were known before, if no column has been dropped since.

    What the log leaves out, such as generated columns, could be counted, so the types must be those of the catalog; and a
    column that comes or goes amid others would give the others each other's names, so none may have the name of another.
    """
    before = known.numbers or []
    last = max(before, default=0)
    later = sorted(number for number in catalog if number > last)
    columns = relation.columns
    numbers = before + later[: max(0, len(columns) - len(before))]
    if (
        not before
        or len(numbers) != len(columns)
        or any(number not in catalog for number in before)
        or any(catalog[number].name is None for number in (*before, *later))
    ):
        return None
    for place, (column, number) in enumerate(zip(columns, numbers, strict=True)):
        same = place < len(before) and known.names[place] == column.name
        if catalog[number].type_oid != column.type_oid or (column.name in known.names and not same):
            return None
    return numbers
