"""What MySQL and MariaDB have: types at their boundaries, and statements that change tables."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tests.oracle.columns import Columns, ColumnType
from tests.oracle.definitions import Definition, Editor, usual
from tests.oracle.scenario import OTHER, Plain

_JSON = (
    "'null'", "'{}'", '\'{"_unchanged": true}\'', "'[null]'", "'1.10'", '\'"x"\'', "'[]'", "'false'", "'1e300'",
    '\'{"a": {"_unchanged": true}, "b": null}\'', "CONCAT('{\"t\": \"', REPEAT('j', 9000), '\"}')",
)  # fmt: skip

TYPES = (
    ColumnType("tinyint", ("0", "-128", "127", "-1"), ("smallint", "int")),
    ColumnType("tinyint unsigned", ("0", "255", "128"), ("smallint unsigned",)),
    ColumnType("smallint", ("0", "-32768", "32767"), ("int",)),
    ColumnType("smallint unsigned", ("0", "65535"), ("int unsigned",)),
    ColumnType("mediumint", ("0", "-8388608", "8388607"), ("int",)),
    ColumnType("mediumint unsigned", ("0", "16777215")),
    ColumnType("int", ("0", "-1", "-2147483648", "2147483647"), ("bigint",)),
    ColumnType("int unsigned", ("0", "4294967295")),
    ColumnType("bigint", ("0", "-1", "-9223372036854775808", "9223372036854775807")),
    ColumnType("bigint unsigned", ("0", "18446744073709551615")),
    ColumnType("int unsigned zerofill", ("0", "4294967295")),
    ColumnType("bool", ("true", "false")),
    ColumnType("year", ("0", "1901", "2026", "2155")),
    ColumnType("bit(1)", ("b'0'", "b'1'")),
    ColumnType("bit(9)", ("b'0'", "b'111111111'")),
    ColumnType("bit(64)", ("b'0'", f"b'{'1' * 64}'")),
    ColumnType("decimal(10,2)", ("0", "-99999999.99", "1.5", "0.01"), ("decimal(20,2)",)),
    ColumnType("decimal(38,10)", ("0", "-9999999999999999999999999999.9999999999")),
    ColumnType("decimal(65,30)", ("0", "-0.000000000000000000000000000001", "1.5")),
    ColumnType("decimal(10,2) unsigned", ("0", "99999999.99")),
    ColumnType("float", ("0.1", "-0.0", "3.40282e38", "1e-38"), ("double",)),
    ColumnType("double", ("0.1e0", "-0.0e0", "1.7976931348623157e308", "2.2250738585072014e-308")),
    ColumnType("date", ("'1970-01-01'", "'1969-12-31'", "'2024-02-29'"), far=("'1000-01-01'", "'9999-12-31'")),
    ColumnType("time", ("'00:00:00'", "'23:59:59'")),
    ColumnType("time(6)", ("'00:00:00'", "'23:59:59.999999'", "'12:34:56.7'")),
    ColumnType(
        "datetime", ("'1970-01-01'", "'2024-02-29 12:00:00'"), ("datetime(6)",), far=("'1000-01-01'", "'9999-12-31 23:59:59'")
    ),
    ColumnType("datetime(6)", ("'1969-12-31 23:59:59.999999'", "'2024-02-29 12:00:00.5'"), far=("'9999-12-31 23:59:59.999999'",)),
    ColumnType("timestamp(6) NULL", ("'1970-01-01 00:00:01'", "'2024-06-30 12:00:00.000001'", "'2038-01-19 03:14:07.999999'")),
    ColumnType("timestamp NULL", ("'1970-01-01 00:00:01'", "'2024-06-30 12:00:00'")),
    ColumnType("char(5)", ("''", "'a'", "'äöüßx'"), ("char(7)",)),
    ColumnType("char(5) CHARACTER SET latin1", ("''", "'ä'")),
    ColumnType("varchar(20) CHARACTER SET utf8mb4", ("''", "'x '", "'😀'", "'{\"_unchanged\":true}'"), ("varchar(300) CHARACTER SET utf8mb4",)),
    ColumnType("varchar(20) CHARACTER SET latin1", ("''", "'ä'", "'null'")),
    ColumnType("varchar(20) CHARACTER SET utf16", ("''", "'ä😀'")),
    ColumnType("varchar(20) CHARACTER SET cp1251", ("''", "'Ж'")),
    ColumnType("text CHARACTER SET utf8mb4", ("''", "'ä\\n\\t\"'", "'NULL'", "REPEAT('x', 9000)")),
    ColumnType("longtext CHARACTER SET sjis", ("''", "'日本'")),
    ColumnType("tinytext CHARACTER SET utf8mb4", ("''", "'ü'")),
    ColumnType("binary(4)", ("x''", "x'00'", "x'ff000000'")),
    ColumnType("varbinary(20)", ("x''", "x'00ff'")),
    ColumnType("blob", ("x''", "x'00ff'", "REPEAT(x'00ff', 5000)")),
    ColumnType("enum('a','b','ä ','c''d') CHARACTER SET utf8mb4", ("'a'", "'b'", "'ä '", "'c''d'")),
    ColumnType("enum('x','ж') CHARACTER SET cp1251", ("'x'", "'ж'")),
    ColumnType("set('a','b','ü') CHARACTER SET utf8mb4", ("''", "'a,ü'", "'b'")),
    ColumnType("json", _JSON),
    ColumnType("point", ("ST_GeomFromText('POINT(1 2)')",)),
    ColumnType("geometry", ("ST_GeomFromText('LINESTRING(0 0,1 1e300)')",)),
)  # fmt: skip
"""Every type that is tried."""

_MARIADB_TYPES = (
    ColumnType("uuid", ("'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",)),
    ColumnType("inet6", ("'::1'",)),
    ColumnType("inet4", ("'10.0.0.1'",)),
)

KEYS = (
    ColumnType("bigint", ("0", "1", "-1", "9223372036854775807", "-9223372036854775808", "7")),
    ColumnType("bigint unsigned", ("0", "18446744073709551615", "9")),
    ColumnType("decimal(10,2)", ("10.0", "0", "-0.01", "7")),
    ColumnType("varchar(20) CHARACTER SET utf8mb4", ("'a'", "'A'", "'a '", "''", "'ä'", "'z'")),
    ColumnType("varchar(20) CHARACTER SET latin1", ("'a'", "'A'", "'ä'", "'z'")),
    ColumnType("char(5) CHARACTER SET utf8mb4", ("'a'", "'A'", "'b'")),
    ColumnType("varbinary(9)", ("x''", "x'00'", "x'ff'")),
    ColumnType("datetime(6)", ("'2024-01-01'", "'2024-01-01 00:00:00.000001'", "'1969-12-31'")),
    ColumnType("date", ("'1970-01-01'", "'2024-02-29'")),
    ColumnType("double", ("0e0", "-0e0", "0.1e0", "1e300")),
    ColumnType("year", ("2026", "1901")),
    ColumnType("enum('a','b','c')", ("'a'", "'b'", "'c'")),
    ColumnType("bit(9)", ("b'0'", "b'111111111'")),
    ColumnType("timestamp(6)", ("'2024-01-01'", "'2024-01-01 00:00:00.000001'")),
)  # fmt: skip
"""Types of keys; the collations of texts ignore case."""


INT = next(one for one in TYPES if one.sql == "int")
_OTHERS = (
    "CREATE TABLE {other}.d{number} LIKE {other}.table",
    "CREATE TABLE {other}.d{number} LIKE {other}.select",
    "CREATE TABLE {other}.order (id int PRIMARY KEY)",
    "DROP TABLE IF EXISTS {other}.order",
)
"""Statements about tables that are not captured, whose names are reserved words."""

_MARKS = ("/*!50000", "/*M!", "/*M!100500", "/*!99999", "/*!80000")


class MysqlDialect:
    """Statements of MySQL and MariaDB."""

    def types(self, version: str) -> Sequence[ColumnType]:
        """Return the types that a server has."""
        if version in {"mariadb", "mariadb 11.8", "mariadb 10.11"}:
            return (*TYPES, *_MARIADB_TYPES)
        return TYPES

    def keys(self, version: str) -> Sequence[ColumnType]:
        """Return types of keys."""
        return KEYS

    def settings(self, chance: random.Random, version: str) -> Mapping[str, str]:
        """Return what decides how much is in the log."""
        row_image = chance.choice(("FULL", "FULL", "MINIMAL", "NOBLOB"))
        if version == "5.7":
            return {"binlog_row_image": row_image}
        least = "NO_LOG" if version.startswith("mariadb") else "MINIMAL"
        return {
            "binlog_row_metadata": chance.choice(("FULL", least)),
            "binlog_row_image": row_image,
        }

    def options(self, chance: random.Random, version: str) -> str:
        """Return what stands behind the columns of a table."""
        return chance.choice(
            (
                "",
                "",
                " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COMMENT='x, y int'",
                " ENGINE InnoDB ROW_FORMAT DYNAMIC COMMENT 'a'",
            )
        )

    def setup(self, chance: random.Random, table: str) -> Sequence[Plain]:
        """Return nothing."""
        return []

    def session(self, chance: random.Random, version: str) -> tuple[str, ...]:
        """Return settings that clients have."""
        return chance.choice(((), (), (), ("SET time_zone = '+05:30'",), ("SET sql_mode = ''",)))

    def truncate(self, table: str) -> Plain:
        """Return what empties a table."""
        return Plain(f"TRUNCATE TABLE {table}")

    def definition(self, chance: random.Random, columns: Columns, version: str) -> Definition:
        """Return a change of the table's columns, and apply it; the server commits each statement."""
        own = chance.random()
        if own < 0.3 and columns.types:
            return chance.choice((_moved, _executed, _moved_in_comment, _quoted, _backslash))(
                chance, columns
            )
        return Definition(usual(Editor(chance, columns, version, self)), together=False)

    def noise(self, chance: random.Random, columns: Columns, version: str) -> Definition:
        """Return statements that change no column."""
        table, number = columns.table, chance.randrange(10**6)
        statement = chance.choice(
            (
                f"ALTER TABLE {table} ORDER BY rev, {columns.key[0]}",
                f"CREATE INDEX i{number} ON {table} (rev)",
                f"ALTER TABLE {table} ADD INDEX i{number} ((rev + 1))",
                f"ALTER TABLE {table} COMMENT 'x' ENGINE InnoDB ROW_FORMAT DYNAMIC",
                f"ALTER TABLE {table} FORCE",
                f"/*!50000 ALTER TABLE {table} COMMENT 'y' */",
                f"ALTER TABLE {table} /*!99999 DROP COLUMN rev, */ COMMENT 'z'",
                f"CREATE TABLE IF NOT EXISTS u{number} (id int PRIMARY KEY, `order` int)",
                f"CREATE TABLE IF NOT EXISTS {table} (id int PRIMARY KEY)",
                f"CREATE TABLE {OTHER}.d{number} LIKE {table}",
                chance.choice(_OTHERS).format(other=OTHER, number=number),
                f"CREATE VIEW v{number} AS SELECT rev FROM {table}",
                f"ANALYZE TABLE {table}",
                f"CREATE PROCEDURE p{number}() ALTER TABLE {table} DROP COLUMN rev",
                f"CREATE TRIGGER g{number} BEFORE DELETE ON {table} FOR EACH ROW SET @x = 1",
            )
        )
        return Definition((Plain(statement),), together=False)

    def default(self, chance: random.Random, literal: str) -> str:
        """Return what gives a new column a value in older rows."""
        return chance.choice((f" DEFAULT {literal}", f" NOT NULL DEFAULT {literal}", " NOT NULL"))

    def place(self, chance: random.Random, columns: Columns, name: str) -> str:
        """Return where a new column stands."""
        return _place(chance, columns, name)

    def renamed(
        self, chance: random.Random, version: str, names: tuple[str, str], type_: str
    ) -> str:
        """Return the action that gives a column another name."""
        if version != "5.7" and chance.random() < 0.5:
            return f"RENAME COLUMN {names[0]} TO {names[1]}"
        return f"CHANGE {names[0]} {names[1]} {type_}"

    def swapped(
        self, chance: random.Random, version: str, first: tuple[str, str], second: tuple[str, str]
    ) -> Sequence[Sequence[str]]:
        """Return the actions, of one statement, that swap the names of two columns."""
        one, other = first[0], second[0]
        if version != "5.7" and chance.random() < 0.5:
            return [[f"RENAME COLUMN {one} TO {other}", f"RENAME COLUMN {other} TO {one}"]]
        return [[f"CHANGE {one} {other} {first[1]}", f"CHANGE {other} {one} {second[1]}"]]

    def retyped(self, name: str, type_: str) -> str:
        """Return the action that gives a column another type."""
        return f"MODIFY {name} {type_}"


def _place(chance: random.Random, columns: Columns, name: str) -> str:
    others = [*columns.key, *(one for one in columns.types if one != name)]
    return chance.choice(("", " FIRST", f" AFTER {chance.choice(others)}"))


def _alone(columns: Columns, actions: str, *changes: tuple[str, str], mode: str = "") -> Definition:
    """Return one statement, in a session with this `sql_mode`."""
    session = (f"SET sql_mode = '{mode}'",) if mode else ()
    return Definition(
        (Plain(f"ALTER TABLE {columns.table} {actions}", changes),), session, together=False
    )


def _moved(chance: random.Random, columns: Columns) -> Definition:
    """Give a column another place."""
    name = chance.choice(list(columns.types))
    return _alone(
        columns,
        f"MODIFY {name} {columns.types[name].sql}{_place(chance, columns, name)}",
        ("reorder", name),
    )


def _executed(chance: random.Random, columns: Columns) -> Definition:
    """Add columns in a comment that only some servers execute."""
    columns.types.setdefault("e2", INT)
    added = f"{chance.choice(_MARKS)} ADD COLUMN e1 int, */ ADD COLUMN e2 int"
    return _alone(columns, added, ("executed", "e1"), ("executed", "e2"))


def _moved_in_comment(chance: random.Random, columns: Columns) -> Definition:
    """Give a column another place in a comment that only some servers execute."""
    name = chance.choice(list(columns.types))
    moved = f"MODIFY {name} {columns.types[name].sql} {chance.choice(_MARKS)} FIRST */"
    return _alone(columns, moved, ("reorder", name))


def _quoted(chance: random.Random, columns: Columns) -> Definition:
    """Name a column as standard SQL does."""
    name = columns.new_name(chance)
    columns.types[name] = INT
    place = chance.choice((" FIRST", f' AFTER "{columns.key[0]}"', ""))
    added = f'ADD COLUMN "{name}" int DEFAULT 3 COMMENT \'the "x" int, y\'{place}'
    return _alone(columns, added, ("quotes", name), mode="ANSI_QUOTES")


def _backslash(chance: random.Random, columns: Columns) -> Definition:
    """Write a backslash that escapes nothing."""
    name = columns.new_name(chance)
    columns.types[name] = INT
    columns.types.setdefault("b1", INT)
    place = chance.choice((" FIRST", ""))
    added = f"ADD COLUMN {name} int COMMENT '\\', ADD COLUMN b1 int COMMENT 'x\\'{place}"
    return _alone(columns, added, ("escapes", name), ("escapes", "b1"), mode="NO_BACKSLASH_ESCAPES")
