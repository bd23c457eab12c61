"""Which columns the statements of the log have renamed."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.definitions import apply
from deltaforge_dagster.sources.mysql.schema.renames import StatementRenames
from deltaforge_dagster.testing.sources import Versions

ORDERS = ("shop", "orders")


def at(number: int) -> BinlogPosition:
    """A position of the log."""
    return BinlogPosition("binlog.000001", number)


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["RENAME COLUMN a TO b"], {"b": "a"}),
        (["CHANGE a b int NOT NULL AFTER c, CHANGE COLUMN `x``y` z int"], {"b": "a", "z": "x`y"}),
        (["CHANGE a a bigint, MODIFY c int", "ADD COLUMN d int"], {}),
        (["RENAME COLUMN a TO b, RENAME COLUMN b TO a"], {"b": "a", "a": "b"}),
        (["RENAME COLUMN a TO b", "RENAME COLUMN B TO c"], {"c": "a"}),
        (["RENAME COLUMN a TO b", "CHANGE b b bigint"], {"b": "a"}),
        (["RENAME COLUMN a TO b", "RENAME COLUMN b TO a"], {}),
        (["RENAME COLUMN a TO b", "DROP b, ADD COLUMN b int"], {}),
        (["RENAME COLUMN a TO b", "DROP INDEX b, DROP PRIMARY KEY, RENAME INDEX x TO y"], {"b": "a"}),
        (["RENAME COLUMN a TO b", "DROP COLUMN IF EXISTS c, RENAME COLUMN d TO c"], {"b": "a", "c": "d"}),
        (["RENAME COLUMN a TO b, RENAME TO orders"], {}),
        (["RENAME COLUMN a"], {}),
    ],
)  # fmt: skip
def test_statements(statements: list[str], expected: dict[str, str]) -> None:
    """Names are those of the time when the log described the table; what is not certain is no rename."""
    found = StatementRenames(Versions(), {})
    for number, statement in enumerate(statements, 1):
        sql = f"ALTER TABLE orders {statement}"
        touched = apply({}, sql, "shop") | {ORDERS}
        found.statement("shop", sql, at(number), touched, fold=False)
    assert found.former(ORDERS) == expected


@pytest.mark.parametrize(
    "statement",
    ["DROP TABLE orders", "RENAME TABLE orders TO other", "CREATE TABLE orders (a int)"],
)
def test_another_table(statement: str) -> None:
    """A table that gets or loses this name has other columns."""
    found = StatementRenames(Versions(), {})
    sql = "ALTER TABLE orders RENAME COLUMN a TO b"
    found.statement("shop", sql, at(1), {ORDERS}, fold=False)
    found.statement("shop", statement, at(2), apply({}, statement, "shop"), fold=False)
    assert found.former(ORDERS) == {}


def test_a_run_that_begins_between_statement_and_rows() -> None:
    """It knows what was renamed, until the version is registered that has the new name."""
    notes = Versions()
    found = StatementRenames(notes, {})
    found.statement("shop", "ALTER TABLE orders RENAME COLUMN a TO b", at(5), {ORDERS}, fold=True)
    assert StatementRenames(notes, notes.defined(at(4))).former(ORDERS) == {}
    assert StatementRenames(notes, notes.defined(at(5))).former(ORDERS) == {"b": "a"}
    found.described(ORDERS, at(7))
    assert StatementRenames(notes, notes.defined(at(6))).former(ORDERS) == {"b": "a"}
    assert (
        found.former(ORDERS) == StatementRenames(notes, notes.defined(at(7))).former(ORDERS) == {}
    )
