"""What ALTER TABLE does to the columns of a table."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sources.mysql.schema.definitions import column_changes
from deltaforge_dagster.tables import ColumnChanges


def altered(*statements: str) -> ColumnChanges:
    """What statements together do to the columns of a table."""
    found = ColumnChanges()
    for statement in statements:
        answer = column_changes(f"ALTER TABLE orders {statement}", "shop", fold=False)
        assert answer is not None
        name, changes = answer
        assert name == ("shop", "orders")
        found = found.then(changes)
    return found


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["RENAME COLUMN a TO b"], {"b": "a"}),
        (["CHANGE a b int NOT NULL AFTER c, CHANGE COLUMN `x``y` z int"], {"b": "a", "z": "x`y"}),
        (["CHANGE a a bigint, MODIFY c int", "ADD COLUMN d int"], {}),
        (["RENAME COLUMN a TO b, RENAME COLUMN b TO a"], {"b": "a", "a": "b"}),
        (["RENAME COLUMN a TO b", "RENAME COLUMN B TO c"], {"c": "a"}),
        (["RENAME COLUMN a TO b", "CHANGE b b bigint"], {"b": "a"}),
        (["RENAME COLUMN a TO b", "RENAME COLUMN b TO a"], {"a": "a"}),
        (["RENAME COLUMN a TO b", "DROP b, ADD COLUMN b int"], {}),
        (["RENAME COLUMN a TO b", "DROP INDEX b, DROP PRIMARY KEY, RENAME INDEX x TO y"], {"b": "a"}),
        (["RENAME COLUMN a TO b", "DROP COLUMN IF EXISTS c, RENAME COLUMN d TO c"], {"b": "a", "c": "d"}),
        (["RENAME COLUMN a TO b, RENAME TO orders"], {"b": "a"}),
        (["ADD x int", "RENAME COLUMN x TO y"], {}),
    ],
)  # fmt: skip
def test_renamed_columns(statements: list[str], expected: dict[str, str]) -> None:
    """Names are those before the first statement and after the last one."""
    assert altered(*statements).renamed == expected


@pytest.mark.parametrize(
    ("statements", "added", "dropped"),
    [
        (["DROP a, ADD a int"], {"a"}, {"a"}),
        (["DROP COLUMN a", "ADD COLUMN a int"], {"a"}, {"a"}),
        (["ADD a int", "DROP a"], set(), set()),
        (["ADD (a int, KEY k (a), `b c` text)"], {"a", "b c"}, set()),
        (["ADD INDEX (a), ADD UNIQUE KEY u (b), ADD CHECK (c > 0)"], set(), set()),
        (["RENAME COLUMN a TO b", "DROP B"], set(), {"a"}),
        (["DROP a", "RENAME COLUMN b TO a"], set(), {"a"}),
        (["ADD x int", "RENAME COLUMN x TO y"], {"y"}, set()),
        (["ADD COLUMN IF NOT EXISTS a int"], set(), set()),
        (["DROP a", "ADD COLUMN IF NOT EXISTS a int"], {"a"}, {"a"}),
    ],
)
def test_added_and_dropped_columns(
    statements: list[str], added: set[str], dropped: set[str]
) -> None:
    """A column that is added under the name of a dropped one is another column."""
    changes = altered(*statements)
    assert changes.added == added
    assert changes.dropped == dropped
    assert ColumnChanges.from_json(changes.to_json()) == changes


@pytest.mark.parametrize(
    ("definition", "fill"),
    [
        ("int", "null"),
        ("int DEFAULT NULL", "null"),
        ("int DEFAULT -7", "-7"),
        ("int unsigned NOT NULL DEFAULT '0042' COMMENT 'DEFAULT 3' AFTER b", "42"),
        ("tinyint(1) NOT NULL DEFAULT TRUE FIRST", "1"),
        ("bigint NOT NULL", "0"),
        ("decimal(10,3) NOT NULL", '"0.000"'),
        ("decimal(10,3) DEFAULT 1.5", '"1.500"'),
        ("decimal(10,1) DEFAULT 1.55", '"1.6"'),
        (
            "varchar(10) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT 'it''s'",
            '"it\'s"',
        ),
        ("char(10) DEFAULT 'x  '", '"x"'),
        ("varchar(10) NOT NULL", '""'),
        ("varchar(10) DEFAULT 'ü'", None),
        ("double NOT NULL DEFAULT 3", "3.0"),
        ("double DEFAULT 0.5", None),
        ("date DEFAULT '2026-01-02'", '"2026-01-02"'),
        ("datetime NOT NULL DEFAULT '2026-01-02 03:04:05'", '"2026-01-02 03:04:05.000000"'),
        ("datetime DEFAULT '2026-01-02 03:04:05.6'", None),
        ("timestamp NULL DEFAULT '2026-01-02 03:04:05'", None),
        ("year DEFAULT 2026", "2026"),
        ("year DEFAULT 26", None),
        ("enum('a','b') NOT NULL", '"a"'),
        ("set('a','b') DEFAULT 'b,a'", '"a,b"'),
        ("varchar(10) DEFAULT (concat('a'))", None),
        ("int DEFAULT (1 + 1)", None),
        ("int AS (a + 1)", None),
        ("int GENERATED ALWAYS AS (a + 1) STORED", None),
        ("int AUTO_INCREMENT UNIQUE", None),
        ("serial", None),
        ("timestamp", None),
        ("timestamp NULL", "null"),
        ("datetime DEFAULT CURRENT_TIMESTAMP", None),
        ("int DEFAULT 0x41", None),
        ("double DEFAULT 1e3", None),
        ("enum('a','b') DEFAULT 'b'", '"b"'),
        ("enum('a','b') DEFAULT 'B'", None),
    ],
)
def test_what_older_rows_have_in_an_added_column(definition: str, fill: str | None) -> None:
    """What the statement says exactly, or nothing."""
    assert altered(f"ADD COLUMN c {definition}, ADD d int").fills.get("c") == fill


@pytest.mark.parametrize("statement", ["RENAME COLUMN a", "DROP COLUMN 'a'", "ADD COLUMN"])
def test_what_is_not_understood(statement: str) -> None:
    """Then it is not certain which columns are which."""
    assert not altered("ADD x int", statement).certain


@pytest.mark.parametrize(
    "statement",
    ["DROP TABLE orders", "RENAME TABLE orders TO other", "CREATE TABLE orders (a int)", "ALTER VIEW v"],
)  # fmt: skip
def test_other_statements(statement: str) -> None:
    """They do nothing to the columns of a table that stays."""
    assert column_changes(statement, "shop", fold=False) is None
