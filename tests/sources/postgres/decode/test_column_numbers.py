"""Which columns of the catalog those of the log are, when the catalog is ahead of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deltaforge_dagster.sources.postgres.decode.column_numbers import (
    CatalogColumns,
    ColumnNumbers,
    NumberedColumn,
)
from deltaforge_dagster.sources.postgres.decode.pgoutput import Relation, RelationColumn
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.testing.sources import Versions

INT, TEXT = 23, 25


def relation(**types: int) -> Relation:
    """The description of a table with these columns."""
    columns = tuple(RelationColumn(name, type_, -1, False) for name, type_ in types.items())
    return Relation(7, "public", "orders", "d", columns)


def now(**names: str) -> CatalogColumns:
    """What the catalog has: by number `name@xid`, `@xid` for a dropped column, `name@xid text` for one that is no number."""
    columns: dict[int, NumberedColumn] = {}
    for number, text in enumerate(names.values(), 1):
        place, _, type_ = text.partition(" ")
        name, _, xid = place.partition("@")
        oid = (TEXT if type_ else INT) if name else 0
        columns[number] = NumberedColumn(name or None, oid, int(xid))
    return CatalogColumns(columns, 7)


BEFORE = now(a="id@10", b="v@10")


@pytest.mark.parametrize(
    ("after", "names", "expected"),
    [
        # The transaction of the log is 50.
        (now(a="id@10", b="v@10"), {"id": INT, "v": INT}, [1, 2]),
        (now(a="id@10", b="@40", c="v@40"), {"id": INT, "v": INT}, [1, 3]),
        (now(a="id@10", b="@60", c="v@60"), {"id": INT, "v": INT}, [1, 2]),
        (now(a="id@10", b="w@40"), {"id": INT, "w": INT}, [1, 2]),
        (now(a="id@10", b="x@60"), {"id": INT, "w": INT}, [1, 2]),
        (now(a="v@40", b="id@40"), {"v": INT, "id": INT}, [1, 2]),
        (now(a="id@10", b="@60", c="x@60"), {"id": INT, "w": INT}, [1, 2]),
        (now(a="id@10", b="v@10", c="w@60"), {"id": INT, "v": INT}, [1, 2]),
        (now(a="id@10", b="x@60", c="y@40"), {"id": INT, "v": INT, "y": INT}, [1, 2, 3]),
        (now(a="id@10", b="x@60 text"), {"id": INT, "w": INT}, None),
        (now(a="id@10", b="x@40", c="y@40"), {"id": INT, "w": INT}, None),
        # It has changed columns itself, before its rows or after them.
        (now(a="id@10", b="@50"), {"id": INT, "v": INT}, [1, 2]),
        (now(a="id@10", b="@50", c="v@50"), {"id": INT, "v": INT}, None),
        (now(a="id@10", b="@50", c="v@50 text"), {"id": INT, "v": INT}, [1, 2]),
        (now(a="id@10", b="@50", c="v@50 text"), {"id": INT, "v": TEXT}, [1, 3]),
        (now(a="id@10", b="@50", c="@50", d="v@50 text"), {"id": INT, "v": TEXT}, None),
        (now(a="id@10", b="@50", c="w@50"), {"id": INT, "w": INT}, [1, 3]),
        (now(a="id@10", b="v@10", c="@50", d="n@60"), {"id": INT, "v": INT, "x": TEXT}, [1, 2, 3]),
        (now(a="id@10", b="v@10", c="@50", d="n@60"), {"id": INT, "v": INT, "x": INT}, None),
        (now(a="id@10", b="v@10", c="@50", d="@50"), {"id": INT, "v": INT, "x": INT}, None),
        (CatalogColumns(), {"id": INT, "v": INT}, [1, 2]),
        (CatalogColumns(), {"id": INT, "w": INT}, None),
    ],
)
def test_numbers(
    after: CatalogColumns, names: Mapping[str, int], expected: list[int] | None
) -> None:
    """They are those of the time of the transaction, or unknown."""
    answers = [BEFORE, after]
    numbers = ColumnNumbers(lambda _oid: answers.pop(0), Versions(), LsnPosition(1))
    first = relation(id=INT, v=INT)
    known = numbers.of(first, LsnPosition(2, 20))
    assert known.numbers == [1, 2]
    numbers.note(first, known, LsnPosition(2, 20))
    assert numbers.of(relation(**names), LsnPosition(3, 50)).numbers == expected


@pytest.mark.parametrize(
    ("catalog", "file"),
    [
        (BEFORE, 7),
        (now(a="id@10", b="v@10", c="w@60"), None),
        (now(a="id@10", b="v@10", c="@60"), 7),
    ],
    ids=["as described", "a column was added since", "a column is gone"],
)
def test_the_file_of_its_rows(catalog: CatalogColumns, file: int | None) -> None:
    """It is not known if the catalog is ahead: with the column, the table may have got another one."""
    numbers = ColumnNumbers(lambda _oid: catalog, Versions(), LsnPosition(1))
    first = relation(id=INT, v=INT)
    for _ in range(2):
        described = numbers.of(first, LsnPosition(2, 50))
        assert (described.numbers, described.file) == ([1, 2], file)
        numbers.note(first, described, LsnPosition(2, 50))


@pytest.mark.parametrize(
    ("after", "names", "expected"),
    [
        (now(a="id@10", b="v@10", c="@60", d="w@60"), {"id": INT, "v": INT, "w": INT}, [1, 2, 3]),
        (now(a="id@10", b="v@10", c="@40", d="w@40"), {"id": INT, "v": INT, "w": INT}, [1, 2, 4]),
        # One was added and two swapped their names since.
        (now(a="id@10", b="@40", c="v@60", d="w@60"), {"id": INT, "w": INT}, [1, 3]),
        (now(a="id@10", b="@40", c="v@60", d="w@60 text"), {"id": INT, "w": INT}, [1, 3]),
        (now(a="id@10", b="@40", c="v@60 text", d="w@60"), {"id": INT, "w": INT}, None),
        # The publication's column list leaves out `v`.
        (now(a="id@10", b="v@10", c="w@60"), {"id": INT, "w": INT}, [1, 3]),
        (now(a="id@10", b="v@60", c="w@10"), {"id": INT, "w": INT}, [1, 3]),
    ],
)
def test_a_first_description(
    after: CatalogColumns, names: Mapping[str, int], expected: list[int] | None
) -> None:
    """Nothing is known of the table yet: a column is not taken for a later one that has its name now."""
    numbers = ColumnNumbers(lambda _oid: after, Versions(), LsnPosition(1))
    assert numbers.of(relation(**names), LsnPosition(3, 50)).numbers == expected


def test_xids_that_begin_again() -> None:
    """They are compared modulo 2^32, as the server does."""
    dropped = NumberedColumn(None, 0, 3)
    assert not dropped.is_dropped((1 << 32) - 5)
    assert dropped.is_dropped(4)


def test_another_table_of_the_name() -> None:
    """A table that was made again has numbers of its own."""
    numbers = ColumnNumbers(lambda _oid: BEFORE, Versions(), LsnPosition(1))
    first = relation(id=INT, v=INT)
    numbers.note(first, numbers.of(first, LsnPosition(2, 20)), LsnPosition(2, 20))
    assert numbers.known(Relation(8, "public", "orders", "d", first.columns)) is None
