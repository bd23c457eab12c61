"""Defaults of columns, from the catalog and from statements; what real servers log is in `test_left_out_columns`."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sources.mysql.events.table_map import ColumnDefault
from deltaforge_dagster.sources.mysql.schema.columns import (
    NULL,
    catalog_default,
    default_json,
    described_type,
    implicit_default,
    labels,
)
from deltaforge_dagster.sources.mysql.schema.definitions import (
    Definitions,
    apply,
    parse_definition,
    text_of,
)
from deltaforge_dagster.sources.mysql.values.types import LABEL_FORMS, ValueForms

NUMBERS = ValueForms(enum_index=True, set_bits=True, timestamp_micros=True)
NAME = ("shop", "t")


def json_of(text: str | None, type_: str, forms: ValueForms = LABEL_FORMS) -> str | None:
    """Return a default as JSON."""
    charset = "utf8mb4" if type_.startswith(("char", "varchar", "text")) else None
    return default_json(
        ColumnDefault(text), described_type(type_, charset, labels(type_), forms), labels(type_)
    )


@pytest.mark.parametrize(
    ("value", "extra", "on_mysql", "on_mariadb"),
    [
        (None, "", "", ""),
        ("NULL", "", "NULL", None),
        ("'x''y\\\\z'", "", "'x''y\\\\z'", "x'y\\z"),
        ("7", "", "7", "7"),
        ("-1.5", "", "-1.5", "-1.5"),
        ("current_timestamp()", "", "current_timestamp()", False),
        ("uuid()", "DEFAULT_GENERATED", False, False),
        (None, "VIRTUAL GENERATED", False, False),
        (None, "auto_increment", False, False),
    ],
)
def test_in_the_catalog(
    value: str | None, extra: str, on_mysql: str | bool, on_mariadb: str | bool | None
) -> None:
    """MySQL shows constants as they are, MariaDB as expressions; False stands for what is no constant."""
    for is_mariadb, text in ((False, on_mysql), (True, on_mariadb)):
        found = catalog_default(
            value, type_="varchar(9)", nullable=False, extra=extra, is_mariadb=is_mariadb
        )
        assert found == (None if isinstance(text, bool) else ColumnDefault(text))


@pytest.mark.parametrize(
    ("text", "type_", "form", "number"),
    [
        (None, "int", "null", "null"),
        ("-7", "int", "-7", "-7"),
        ("1.5", "decimal(8,3)", '"1.500"', '"1.500"'),
        (f"{'9' * 35}.5", "decimal(65,30)", f'"{"9" * 35}.5{"0" * 29}"', f'"{"9" * 35}.5{"0" * 29}"'),
        ("b'101'", "bit(3)", "5", "5"),
        ("q", "enum('p','q')", '"q"', "2"),
        ("b,a", "set('a','b','c')", '"a,b"', "3"),
        ("", "set('a','b','c')", '""', "0"),
        ("a ", "char(5)", '"a"', '"a"'),
        ("a ", "varchar(5)", '"a "', '"a "'),
        ("2020-01-02 03:04:05.6", "datetime(1)", '"2020-01-02 03:04:05.600000"', '"2020-01-02 03:04:05.600000"'),
        ("0000-00-00 00:00:00", "timestamp", '"0000-00-00T00:00:00.000000Z"', "0"),
    ],
)  # fmt: skip
def test_as_json(text: str | None, type_: str, form: str, number: str) -> None:
    """The forms that the pipeline file asks for are those of the log's values."""
    assert (json_of(text, type_), json_of(text, type_, NUMBERS)) == (form, number)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("2020-01-02 03:04:05", "timestamp"),
        ("2020-1-2", "date"),
        ("0x61", "binary(3)"),
        ("r", "enum('p','q')"),
        ("1e3", "int"),
        ("x", "json"),
    ],
)
def test_what_is_not_certain(text: str, type_: str) -> None:
    """It has no JSON, so that no row gets a wrong value."""
    assert json_of(text, type_) is None
    assert implicit_default("binary(3)") is None


def test_in_statements() -> None:
    """Plain constants are known, and all else is not; what is stored is read again."""
    tables: Definitions = {}
    apply(
        tables,
        "CREATE TABLE t (id int, none_ int, whole_ int NOT NULL DEFAULT 7, minus_ int DEFAULT -7,"
        " part_ decimal(3,1) DEFAULT 1.5, word varchar(9) DEFAULT 'it''s', slash varchar(9) DEFAULT 'a\\\\b',"
        " sum_ int DEFAULT (1 + 1), now_ datetime DEFAULT CURRENT_TIMESTAMP, stamp timestamp,"
        " pick enum('p','q') NOT NULL COMMENT 'DEFAULT 5', v int AS (1) VIRTUAL, PRIMARY KEY (id))",
        "shop",
    )
    for statement in (
        "ALTER TABLE t ALTER whole_ SET DEFAULT 8",
        "ALTER TABLE t RENAME COLUMN word TO w",
    ):
        apply(tables, statement, "shop")

    text = text_of(tables, NAME)
    assert text is not None
    for table in (tables[NAME], parse_definition(text)):
        assert table is not None
        assert {one.name: one.default for one in table.columns} == {
            "id": None,
            "none_": NULL,
            "whole_": None,
            "minus_": ColumnDefault("-7"),
            "part_": ColumnDefault("1.5"),
            "w": ColumnDefault("it's"),
            "slash": None,
            "sum_": None,
            "now_": None,
            "stamp": None,
            "pick": ColumnDefault("p"),
            "v": None,
        }


def test_definitions_of_older_releases() -> None:
    """They have no defaults, which are then unknown."""
    table = parse_definition('{"columns": [["id", "int", ""]], "primary_key": ["id"]}')
    assert table is not None
    assert [one.default for one in table.columns] == [None]
