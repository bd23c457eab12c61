"""Numbers of positions, which destinations order rows by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.source_type import MYSQL
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.source_type import POSTGRES
from deltaforge_dagster.sources.registry import SourceType
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.source_type import TURSO

LSNS = st.integers(0, (1 << 63) - 1).map(LsnPosition)
BINLOGS = st.builds(
    lambda file, pos: BinlogPosition(f"bin.{file:06d}", pos),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, (1 << 40) - 1),
)
CHANGES = st.integers(0, 1 << 62).map(lambda number: TursoPosition("native", number))
TABLES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(
    lambda at: TursoPosition("polling", None, (("a", at[0]), ("b", at[1])))
)


@pytest.mark.parametrize(
    ("kind", "positions"),
    [(POSTGRES, LSNS), (MYSQL, BINLOGS), (TURSO, CHANGES), (TURSO, TABLES)],
    ids=["postgres", "mysql", "turso", "turso-polling"],
)
@given(data=st.data())
def test_later_positions_have_greater_numbers(
    kind: SourceType[Any], positions: st.SearchStrategy[Position], data: st.DataObject
) -> None:
    """And they fit into 64 bits."""
    one, other = data.draw(positions), data.draw(positions)
    numbers = [kind.position_number(position) for position in (one, other)]
    assert all(number is not None and 0 <= number < 1 << 64 for number in numbers)
    if one < other:
        assert numbers[0] < numbers[1]  # type: ignore[operator] # they are numbers


@pytest.mark.parametrize("position", [BinlogPosition("bin.16777216", 4), BinlogPosition("bin.000001", 1 << 40)])  # fmt: skip
def test_positions_that_are_too_large(position: BinlogPosition) -> None:
    """They have no number, instead of one of another position."""
    assert MYSQL.position_number(position) is None
