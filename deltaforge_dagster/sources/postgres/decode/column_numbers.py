"""The numbers of a table's columns (`pg_attribute.attnum`).

A column keeps its number when it is renamed, and no other column of the table ever gets it. The log
has names only. So the catalog is queried whenever the log describes a table, and the numbers are
stored with the position, because they cannot be queried later. The catalog may be ahead of the log:
columns may have been dropped, renamed and added since. It keeps the numbers of dropped columns, and
the transaction that dropped each, which tells the columns that existed in a transaction of the log;
the log has them in the order of their numbers. If the result is uncertain, numbers remain unknown.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SourceNotes
from deltaforge_dagster.sources.postgres.decode.pgoutput import Relation
from deltaforge_dagster.sources.postgres.position import LsnPosition

_XIDS = 1 << 32  # the log has transaction ids without their epoch
_MOST_DROPPED = 8
"""If a transaction dropped more columns than this, the subsets that its rows may have had are too
many to try."""


@dataclass(frozen=True, slots=True)
class NumberedColumn:
    """What the catalog has under a column's number.

    Attributes:
        name: Its name; None if it was dropped.
        type_oid: OID of its type; 0 if it was dropped.
        xid: The transaction that last changed the catalog's row of the column; for a dropped
            column, the one that dropped it.
        generated: Whether its values are generated, so that the log may leave it out.
    """

    name: str | None
    type_oid: int
    xid: int
    generated: bool = False

    def is_dropped(self, xid: int | None) -> bool:
        """Return whether it was dropped before or in a transaction; None means up to now."""
        return self.name is None and (xid is None or not _precedes(xid, self.xid))

    def is_dropped_in(self, xid: int | None) -> bool:
        """Return whether this transaction dropped it."""
        return self.name is None and self.xid == xid

    def is_new(self, xid: int | None) -> bool:
        """Return whether it may have been added in a transaction, or after it."""
        return xid is not None and (self.xid == xid or _precedes(xid, self.xid))


@dataclass(frozen=True, slots=True)
class CatalogColumns:
    """What the catalog now contains about a table.

    Attributes:
        columns: Its columns by number, dropped ones included; none if there is no such table.
        file: Number of the file with its rows, which changes when they are rewritten; None if it
            has none.
    """

    columns: Mapping[int, NumberedColumn] = field(default_factory=dict)
    file: int | None = None


AskColumns = Callable[[int], CatalogColumns]
"""Returns what the catalog now contains about the table with an OID."""


@dataclass(frozen=True, slots=True)
class LoggedColumns:
    """The columns of a table as the log has described them.

    Attributes:
        oid: OID of the table.
        names: Their names.
        numbers: Their numbers, which increase; None if they are not known.
        file: See `CatalogColumns`; None if the catalog was ahead of the log, which may have had
            another one.
        whole: Whether the log had all columns of the table, except generated ones: no column list
            of the publication leaves out any.
        types: OIDs of their types; empty if they are not known.
    """

    oid: int
    names: list[str]
    numbers: list[int] | None
    file: int | None = None
    whole: bool = False
    types: list[int] = field(default_factory=list)

    def number(self, index: int) -> int | None:
        """Return the number of the column with this index in `names`; None if it is not known."""
        return None if self.numbers is None else self.numbers[index]


class ColumnNumbers:
    """Finds the numbers of columns, for one reader of the log.

    Args:
        ask: Queries the catalog.
        notes: Where numbers are stored.
        start: Where the reader begins.
    """

    def __init__(self, ask: AskColumns, notes: SourceNotes, start: Position) -> None:
        self._query_columns = ask
        self._notes = notes
        self._last_described = {
            table: LoggedColumns(**json.loads(text)) for table, text in notes.defined(start).items()
        }

    def known(self, relation: Relation) -> LoggedColumns | None:
        """Return the columns of a table as it was last described.

        None if it was not described yet, or if its name belonged to another table then.
        """
        logged = self._last_described.get(relation.full_name)
        return logged if logged is not None and logged.oid == relation.oid else None

    def of(self, relation: Relation, position: LsnPosition) -> LoggedColumns:
        """Return the columns of a table that a transaction of the log describes.

        Raises:
            DeltaforgeError: The catalog cannot be read.
        """
        names = [column.name for column in relation.columns]
        types = [column.type_oid for column in relation.columns]
        previous = self.known(relation)
        current = self._query_columns(relation.oid)
        xid = position.tx_id
        if previous is not None and previous.numbers is not None and previous.names == names:
            dropped = any(
                number in current.columns and current.columns[number].is_dropped(xid)
                for number in previous.numbers
            )
            if not dropped:
                whole, file = (
                    _is_whole(previous.numbers, current, xid),
                    _file_number(previous.numbers, current),
                )
                return LoggedColumns(previous.oid, names, previous.numbers, file, whole, types)
        numbers = _by_name(relation, previous, current.columns, xid)
        if numbers is None:
            numbers = _by_order(relation, current.columns, xid)
        whole = numbers is not None and _is_whole(numbers, current, xid)
        file = None if numbers is None else _file_number(numbers, current)
        return LoggedColumns(relation.oid, names, numbers, file, whole, types)

    def note(self, relation: Relation, columns: LoggedColumns, position: Position) -> None:
        """Store the columns that a table has from a position on; durable when this returns."""
        if self._last_described.get(relation.full_name) != columns:
            self._notes.define({relation.full_name: json.dumps(asdict(columns))}, position)
            self._last_described[relation.full_name] = columns


def _precedes(xid: int, other: int) -> bool:
    """Return whether a transaction id is before another one, modulo 2^32 as on the server."""
    return 0 < (other - xid) % _XIDS < _XIDS // 2


def _is_whole(numbers: list[int], catalog: CatalogColumns, xid: int | None) -> bool:
    """Return whether the catalog knows no other columns of the table in a transaction."""
    return not any(
        number not in numbers
        and not column.generated
        and not column.is_dropped(xid)
        and (xid is None or not _precedes(xid, column.xid))
        for number, column in catalog.columns.items()
    )


def _file_number(numbers: list[int], catalog: CatalogColumns) -> int | None:
    """Return the number of the table's file with these columns; None if others were added since."""
    is_ahead = any(
        number not in numbers and column.name is not None and not column.generated
        for number, column in catalog.columns.items()
    )
    return None if is_ahead else catalog.file


def _by_name(
    relation: Relation,
    previous: LoggedColumns | None,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> list[int] | None:
    """Return the columns' numbers if the catalog has all of their names, in the same order.

    None if it does not, or if it contradicts `previous`, what the log described before.
    """
    numbers_of = {column.name: number for number, column in catalog.items()}
    numbers = {
        column.name: numbers_of[column.name]
        for column in relation.columns
        if column.name in numbers_of
    }
    if len(numbers) != len(relation.columns) or not _increase(numbers.values()):
        return None
    if previous is not None and previous.numbers is not None:
        for name, old in zip(previous.names, previous.numbers, strict=True):
            if numbers.get(name, old) == old or old not in catalog:
                continue
            # The name belongs to a column with another number now. If the column that had it still
            # existed in the transaction, and its present name is not in the log's description, then
            # the catalog is ahead of the log.
            if not catalog[old].is_dropped(xid) and catalog[old].name not in numbers:
                return None
    if _misses_older(numbers, previous, catalog, xid):
        return None
    replaced = _replaced_within(relation, numbers, previous, catalog, xid)
    if replaced is None:
        return None
    of_its_time = [*{**numbers, **replaced}.values()]
    return of_its_time if _increase(of_its_time) else None


def _misses_older(
    numbers: Mapping[str, int],
    previous: LoggedColumns | None,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> bool:
    """Return whether the log's description lacks an older column, so that names may mislead.

    A column whose row in the catalog changed since the transaction began may have got its name only
    later. Numbers increase: if that column existed in the transaction, so did those with lower
    numbers. One of these that the log does not name had another name then, or the publication's
    column list leaves it out. If its row in the catalog changed since, too, the catalog does not
    tell which.
    """
    confirmed = (
        set(zip(previous.names, previous.numbers or [], strict=False)) if previous else set()
    )
    newest = max(
        (
            number
            for name, number in numbers.items()
            if catalog[number].is_new(xid) and (name, number) not in confirmed
        ),
        default=0,
    )
    return any(
        number < newest and number not in numbers.values() and column.is_new(xid)
        for number, column in catalog.items()
        if column.name is not None and not column.generated
    )


def _replaced_within(
    relation: Relation,
    numbers: Mapping[str, int],
    previous: LoggedColumns | None,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> Mapping[str, int] | None:
    """Return the numbers, by name, of columns whose names others got only after the logged rows.

    None if that is not known. Since the transaction began, a column may have been dropped and
    another of the same name added, by the transaction itself before or after its rows, or later.
    The type in the log tells which of both the rows have, if their types differ.
    """
    new = {name for name, number in numbers.items() if catalog[number].is_new(xid)}
    dropped = [
        number
        for number, column in catalog.items()
        if column.name is None and (column.is_dropped_in(xid) or not column.is_dropped(xid))
    ]
    if not new or not dropped:
        return {}
    if previous is None or previous.numbers is None or not previous.types:
        return None
    previous_columns = dict(
        zip(previous.numbers, zip(previous.names, previous.types, strict=True), strict=True)
    )
    types = {column.name: column.type_oid for column in relation.columns}
    replaced: dict[str, int] = {}
    for number in dropped:
        if number not in previous_columns:
            return None
        name, type_ = previous_columns[number]
        if name in new:
            current_type = catalog[numbers[name]].type_oid
            if type_ == current_type or types[name] not in {type_, current_type}:
                return None
            if types[name] == type_:
                replaced[name] = number
    return replaced


def _increase(numbers: Iterable[int]) -> bool:
    return all(number < following for number, following in itertools.pairwise(numbers))


def _by_order(
    relation: Relation, catalog: Mapping[int, NumberedColumn], xid: int | None
) -> list[int] | None:
    """Return the columns' numbers by their order; None if the table can have had others.

    In the transaction, it had as many columns as the log describes. Columns that the log leaves
    out, such as generated ones, would be counted wrongly; so the types must be those of the
    catalog, too. It is not known whether a column that the transaction itself dropped still existed
    for its rows, so both are tried.
    """
    present = [number for number in sorted(catalog) if not catalog[number].is_dropped(xid)]
    dropped = [number for number in catalog if catalog[number].is_dropped_in(xid)]
    if len(dropped) > _MOST_DROPPED:
        return None
    possible = {
        tuple(numbers)
        for count in range(len(dropped) + 1)
        for subset in itertools.combinations(dropped, count)
        if (numbers := _leading(sorted([*present, *subset]), relation, catalog, xid)) is not None
    }
    return list(*possible) if len(possible) == 1 else None


def _leading(
    present: list[int],
    relation: Relation,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> list[int] | None:
    """Return as many of these columns as the log describes, without the last ones.

    Those may have been added later. None if the catalog says that they were not, or that types
    differ.
    """
    columns = relation.columns
    while len(present) > len(columns) and xid is not None:
        if not catalog[present[-1]].is_new(xid):
            return None
        present = present[:-1]  # it was added later, or changed, and then the types may tell
    if len(present) != len(columns):
        return None
    for number, column in zip(present, columns, strict=True):
        if catalog[number].name is not None and catalog[number].type_oid != column.type_oid:
            return None
    return present
