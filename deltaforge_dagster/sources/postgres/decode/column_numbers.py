"""The numbers of a table's columns (`pg_attribute.attnum`), which columns keep under other names and no other column gets.

The log has names only. So the numbers are asked for whenever the log describes a table, and stored with the position, because
they cannot be asked for later. The catalog may be ahead of the log: columns may have been dropped, renamed and added since. The
catalog keeps the numbers of dropped columns, and which transaction has dropped each, so it can be told which columns there were
in a transaction of the log; the log has them in the order of their numbers. Where the answer is not certain, numbers remain
unknown.
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

_XIDS = 1 << 32
_MOST_DROPPED = 8
"""More columns that one transaction drops are too many to try which of them a row had."""


@dataclass(frozen=True, slots=True)
class NumberedColumn:
    """What the catalog has under a column's number.

    Attributes:
        name: Its name; None if it was dropped.
        type_oid: OID of its type; 0 if it was dropped.
        xid: The transaction that has changed this last; of a dropped column the one that has dropped it.
        generated: Whether its values are generated, so that the log may leave it out.
    """

    name: str | None
    type_oid: int
    xid: int
    generated: bool = False

    def is_dropped(self, xid: int | None) -> bool:
        """Return whether it was dropped before a transaction, or in it (None: now)."""
        return self.name is None and (xid is None or not _precedes(xid, self.xid))

    def is_dropped_in(self, xid: int | None) -> bool:
        """Return whether a transaction has dropped it."""
        return self.name is None and self.xid == xid

    def is_new(self, xid: int | None) -> bool:
        """Return whether it may have been added in a transaction, or after it."""
        return xid is not None and (self.xid == xid or _precedes(xid, self.xid))


@dataclass(frozen=True, slots=True)
class CatalogColumns:
    """What the catalog has now of a table.

    Attributes:
        columns: Its columns by number, dropped ones included; none if there is no such table.
        file: Number of the file with its rows, which changes when they are rewritten; None if it has none.
    """

    columns: Mapping[int, NumberedColumn] = field(default_factory=dict)
    file: int | None = None


AskColumns = Callable[[int], CatalogColumns]
"""Returns what the catalog has now of the table with an OID."""


@dataclass(frozen=True, slots=True)
class LoggedColumns:
    """The columns of a table as the log has described them.

    Attributes:
        oid: OID of the table.
        names: Their names.
        numbers: Their numbers, which increase; None if they are not known.
        file: See `CatalogColumns`; None if the catalog was ahead of the log, which may have had another one.
        whole: Whether the log had all columns of the table, except generated ones: no column list of the publication leaves
            out any.
        types: OIDs of their types; none if they are not known.
    """

    oid: int
    names: list[str]
    numbers: list[int] | None
    file: int | None = None
    whole: bool = False
    types: list[int] = field(default_factory=list)

    def number(self, place: int) -> int | None:
        """Return the number of a column by its place; None if it is not known."""
        return None if self.numbers is None else self.numbers[place]


class ColumnNumbers:
    """Finds the numbers of columns, for one reader of the log.

    Args:
        ask: Asks the catalog.
        notes: Where numbers are stored.
        start: Where the reader begins.
    """

    def __init__(self, ask: AskColumns, notes: SourceNotes, start: Position) -> None:
        self._ask = ask
        self._notes = notes
        self._known = {
            table: LoggedColumns(**json.loads(text)) for table, text in notes.defined(start).items()
        }

    def known(self, relation: Relation) -> LoggedColumns | None:
        """Return the columns that a table had when it was described last; None if it was another table, or none."""
        known = self._known.get(relation.full_name)
        return known if known is not None and known.oid == relation.oid else None

    def of(self, relation: Relation, position: LsnPosition) -> LoggedColumns:
        """Return the columns of a table that a transaction of the log describes.

        Raises:
            DeltaforgeError: The catalog cannot be read.
        """
        names = [column.name for column in relation.columns]
        types = [column.type_oid for column in relation.columns]
        known = self.known(relation)
        now = self._ask(relation.oid)
        xid = position.tx_id
        if known is not None and known.numbers is not None and known.names == names:
            dropped = any(
                number in now.columns and now.columns[number].is_dropped(xid)
                for number in known.numbers
            )
            if not dropped:
                whole, file = _is_whole(known.numbers, now, xid), _file_then(known.numbers, now)
                return LoggedColumns(known.oid, names, known.numbers, file, whole, types)
        numbers = _by_name(relation, known, now.columns, xid)
        if numbers is None:
            numbers = _by_place(relation, now.columns, xid)
        whole = numbers is not None and _is_whole(numbers, now, xid)
        file = None if numbers is None else _file_then(numbers, now)
        return LoggedColumns(relation.oid, names, numbers, file, whole, types)

    def note(self, relation: Relation, columns: LoggedColumns, position: Position) -> None:
        """Remember the columns that a table has from a position on; they are durable when this returns."""
        if self._known.get(relation.full_name) != columns:
            self._notes.define({relation.full_name: json.dumps(asdict(columns))}, position)
            self._known[relation.full_name] = columns


def _precedes(xid: int, other: int) -> bool:
    """Return whether a transaction id is before another one, as the server compares them: modulo 2^32."""
    return 0 < (other - xid) % _XIDS < _XIDS // 2


def _is_whole(numbers: list[int], catalog: CatalogColumns, xid: int | None) -> bool:
    """Return whether the table had no other columns in a transaction, as far as the catalog knows."""
    return not any(
        number not in numbers
        and not column.generated
        and not column.is_dropped(xid)
        and (xid is None or not _precedes(xid, column.xid))
        for number, column in catalog.columns.items()
    )


def _file_then(numbers: list[int], catalog: CatalogColumns) -> int | None:
    """Return the number of the file that the table had with these columns; None if others were added since."""
    is_ahead = any(
        number not in numbers and column.name is not None and not column.generated
        for number, column in catalog.columns.items()
    )
    return None if is_ahead else catalog.file


def _by_name(
    relation: Relation,
    known: LoggedColumns | None,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> list[int] | None:
    """Return the columns' numbers if the catalog has all of these names in this order, and does not contradict what is known."""
    numbers_of = {column.name: number for number, column in catalog.items()}
    numbers = {
        column.name: numbers_of[column.name]
        for column in relation.columns
        if column.name in numbers_of
    }
    if len(numbers) != len(relation.columns) or not _increase(numbers.values()):
        return None
    if known is not None and known.numbers is not None:
        for name, old in zip(known.names, known.numbers, strict=True):
            if numbers.get(name, old) == old or old not in catalog:
                continue
            # A column with another number has the name now. If the one that had it was there in the transaction and is called
            # nothing that the log names, the catalog is ahead.
            if not catalog[old].is_dropped(xid) and catalog[old].name not in numbers:
                return None
    if _misses_older(numbers, known, catalog, xid):
        return None
    replaced = _replaced_within(relation, numbers, known, catalog, xid)
    if replaced is None:
        return None
    of_its_time = [*{**numbers, **replaced}.values()]
    return of_its_time if _increase(of_its_time) else None


def _misses_older(
    numbers: Mapping[str, int],
    known: LoggedColumns | None,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> bool:
    """Return whether a column that may have got its name since would have been there without an older one.

    Numbers increase: if it was there, so were the columns before it. One of these that the log does not name had another name, or
    is left out by the publication's column list. If it was changed since, the catalog does not tell which.
    """
    confirmed = set(zip(known.names, known.numbers or [], strict=False)) if known else set()
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
    known: LoggedColumns | None,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> Mapping[str, int] | None:
    """Return the columns whose names others have got only after the rows; None if that is not known.

    Since the transaction began, a column may have been dropped and another one of its name added; by the transaction itself
    before its rows or after them. The types tell, if they differ.
    """
    new = {name for name, number in numbers.items() if catalog[number].is_new(xid)}
    dropped = [
        number
        for number, column in catalog.items()
        if column.name is None and (column.is_dropped_in(xid) or not column.is_dropped(xid))
    ]
    if not new or not dropped:
        return {}
    if known is None or known.numbers is None or not known.types:
        return None
    had = dict(zip(known.numbers, zip(known.names, known.types, strict=True), strict=True))
    types = {column.name: column.type_oid for column in relation.columns}
    replaced: dict[str, int] = {}
    for number in dropped:
        if number not in had:
            return None
        name, type_ = had[number]
        if name in new:
            now = catalog[numbers[name]].type_oid
            if type_ == now or types[name] not in {type_, now}:
                return None
            if types[name] == type_:
                replaced[name] = number
    return replaced


def _increase(numbers: Iterable[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(numbers))


def _by_place(
    relation: Relation, catalog: Mapping[int, NumberedColumn], xid: int | None
) -> list[int] | None:
    """Return the columns' numbers by their order, if the table can have had only these in a transaction.

    It had as many as the log describes. What the log leaves out, such as generated columns, would be counted; so the types must
    be those of the catalog. Whether the columns that the transaction has dropped were there in its rows is not known.
    """
    there = [number for number in sorted(catalog) if not catalog[number].is_dropped(xid)]
    dropped = [number for number in catalog if catalog[number].is_dropped_in(xid)]
    if len(dropped) > _MOST_DROPPED:
        return None
    possible = {
        tuple(numbers)
        for count in range(len(dropped) + 1)
        for some in itertools.combinations(dropped, count)
        if (numbers := _as_many(sorted([*there, *some]), relation, catalog, xid)) is not None
    }
    return list(*possible) if len(possible) == 1 else None


def _as_many(
    there: list[int],
    relation: Relation,
    catalog: Mapping[int, NumberedColumn],
    xid: int | None,
) -> list[int] | None:
    """Return as many of these columns as the log describes, without the last ones, which may have been added later.

    None if the catalog says that they were there, or that the types differ.
    """
    columns = relation.columns
    while len(there) > len(columns) and xid is not None:
        if not catalog[there[-1]].is_new(xid):
            return None
        there = there[:-1]  # it was added later, or changed, and then the types may tell
    if len(there) != len(columns):
        return None
    for number, column in zip(there, columns, strict=True):
        if catalog[number].name is not None and catalog[number].type_oid != column.type_oid:
            return None
    return there
