"""What PostgreSQL has: types at their boundaries, and statements that change tables."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tests.oracle.columns import Columns, ColumnType
from tests.oracle.definitions import Definition, Editor, usual
from tests.oracle.scenario import OTHER, Plain

_JSON = (
    "'null'", "'{}'", '\'{"_unchanged": true}\'', '\'{"_unchanged":true}\'', "'[null]'", "'1.10'", '\'"x"\'', "'[]'",
    '\'{"a": {"_unchanged": true}, "b": null}\'', '\'{"_base64": "AA=="}\'', '\'"null"\'', "'1e400'", "'false'",
    "('{\"t\": \"' || repeat('j', 9000) || '\"}')::json",
)  # fmt: skip
_LARGE = "repeat('x', 9000)"

TYPES = (
    ColumnType("smallint", ("0", "-32768", "32767"), ("integer", "bigint")),
    ColumnType("integer", ("0", "-1", "-2147483648", "2147483647"), ("bigint", "text")),
    ColumnType("bigint", ("0", "-1", "-9223372036854775808", "9223372036854775807")),
    ColumnType("numeric(10,2)", ("0", "-99999999.99", "1.5", "0.01"), ("numeric(20,2)",)),
    ColumnType(
        "numeric(38,10)", ("0", "-9999999999999999999999999999.9999999999", "0.0000000001")
    ),
    ColumnType("numeric", ("0", "10.0", "10.00", "'NaN'", "-0.000", "1e300", "1e-30")),
    ColumnType("numeric(50,5)", ("0", "1.5", "123456789012345678901234567890123456789012345.12345")),
    ColumnType("real", ("0.1", "'-0'", "'NaN'", "'Infinity'", "3.4028235e38", "1e-45"), ("double precision",)),
    ColumnType("double precision", ("0.1", "'-0'", "'NaN'", "'-Infinity'", "1.7976931348623157e308", "5e-324")),
    ColumnType("boolean", ("true", "false")),
    ColumnType("text", ("''", "'ä😀'", "E'a\\n\\t\"\\\\'", "'null'", "'NULL'", _LARGE)),
    ColumnType("varchar(20)", ("''", "'x '", "'ü'", "'{\"_unchanged\":true}'"), ("varchar(40)", "text")),
    ColumnType("char(5)", ("''", "'a'", "'äöüßx'")),
    ColumnType("bytea", ("'\\x'", "'\\x00ff'", "decode(repeat('00ff', 5000), 'hex')")),
    ColumnType("uuid", ("'00000000-0000-0000-0000-000000000000'", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'")),
    ColumnType("date", ("'1970-01-01'", "'1969-12-31'", "'2024-02-29'"), far=("'0001-01-01'", "'9999-12-31'")),
    ColumnType("time", ("'00:00'", "'23:59:59.999999'", "'12:34:56.7'")),
    ColumnType(
        "timestamp",
        ("'1970-01-01'", "'1969-12-31 23:59:59.999999'", "'2024-02-29 12:00:00.5'"),
        far=("'0001-01-01'", "'9999-12-31 23:59:59.999999'"),
    ),
    ColumnType(
        "timestamptz",
        ("'1970-01-01Z'", "'1969-12-31 23:59:59.999999Z'", "'2024-06-30 12:00:00.000001+05:30'"),
        far=("'0001-01-01Z'", "'9999-12-31 23:59:59.999999Z'", "'1677-01-01Z'"),
    ),
    ColumnType("timestamptz(0)", ("'2024-06-30 12:00:00Z'", "'1969-12-31 23:59:59Z'")),
    ColumnType("interval", ("'1 month'", "'30 days'", "'24:00'", "'1 day'", "'-1 year 2 days 03:04:05.000006'")),
    ColumnType("json", _JSON),
    ColumnType("jsonb", tuple(one.replace("::json", "::jsonb") for one in _JSON)),
    ColumnType("integer[]", ("'{}'", "'{1,NULL,-3}'", "'{2147483647}'")),
    ColumnType("text[]", ("'{}'", "'{\"\",NULL,\"null\",\"a\\\"b\"}'")),
    ColumnType("jsonb[]", ("ARRAY['null'::jsonb]", "ARRAY[NULL::jsonb, '{\"_unchanged\": true}']", "'{}'")),
    ColumnType("numeric(10,2)[]", ("'{1.5,NULL,0.01}'",)),
    ColumnType("timestamptz[]", ("'{\"2024-06-30 12:00:00.000001Z\",NULL}'",), far=("'{\"9999-12-31 00:00:00Z\"}'",)),
    ColumnType("bytea[]", ("ARRAY['\\x00ff'::bytea, NULL, '\\x']",)),
    ColumnType("boolean[]", ("'{t,f,NULL}'",)),
    ColumnType("double precision[]", ("'{0.1,NaN,-0,NULL}'",)),
    ColumnType("inet", ("'10.0.0.1/8'", "'::1'")),
    ColumnType("cidr", ("'10.0.0.0/8'",)),
    ColumnType("macaddr", ("'08:00:2b:01:02:03'",)),
    ColumnType("money", ("'-1234.56'", "'0'")),
    ColumnType("int4range", ("'[1,5)'", "'empty'", "'(,)'")),
    ColumnType("bit(3)", ("B'101'", "B'000'")),
    ColumnType("varbit", ("B''", "B'1'")),
    ColumnType("timetz", ("'12:34:56+02'", "'23:59:59.999999-12'")),
    ColumnType("point", ("'(1,2)'", "'(-0,1e300)'")),
    ColumnType("tsvector", ("'fat:2 cat:3'",)),
    ColumnType("oid", ("0", "4294967295")),
    ColumnType("mood", ("'ok'", "'sad \"x\"'")),
    ColumnType("whole", ("0", "42")),
    ColumnType('"char"', ("'x'",)),
)  # fmt: skip
"""Every type that is tried; `mood` is an enum, `whole` a domain."""

KEYS = (
    ColumnType("bigint", ("0", "1", "-1", "9223372036854775807", "-9223372036854775808", "7")),
    ColumnType("numeric", ("10.0", "10.00", "0", "-0.0", "1e30", "'NaN'")),
    ColumnType("numeric(10,2)", ("10.0", "0", "-0.01", "7")),
    ColumnType("double precision", ("'0'", "'-0'", "0.1", "'NaN'", "1e300")),
    ColumnType("interval", ("'1 month'", "'30 days'", "'1 day'", "'24:00'", "'2 days'")),
    ColumnType("text", ("'a'", "'A'", "'a '", "''", "'ä'")),
    ColumnType("char(5)", ("'a'", "'A'", "''")),
    ColumnType("timestamptz", ("'2024-01-01Z'", "'2024-01-01 01:00:00.000001+01'", "'1969-12-31Z'")),
    ColumnType("uuid", ("'00000000-0000-0000-0000-000000000000'", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'")),
    ColumnType("bytea", ("'\\x'", "'\\x00'", "'\\xff'")),
    ColumnType("date", ("'1970-01-01'", "'2024-02-29'")),
    ColumnType("boolean", ("true", "false")),
    ColumnType("timetz", ("'12:00+02'", "'10:00+00'", "'11:00+02'")),
    ColumnType("mood", ("'ok'", "'sad \"x\"'")),
    ColumnType("inet", ("'10.0.0.1'", "'::1'", "'10.0.0.1/8'")),
)  # fmt: skip
"""Types of keys."""

PREPARATION = ("CREATE TYPE mood AS ENUM ('ok', 'sad \"x\"')", "CREATE DOMAIN whole AS integer")


class PostgresDialect:
    """Statements of PostgreSQL."""

    def types(self, version: str) -> Sequence[ColumnType]:
        """Return the types that a server has."""
        return TYPES

    def keys(self, version: str) -> Sequence[ColumnType]:
        """Return types of keys."""
        return KEYS

    def settings(self, chance: random.Random, version: str) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def options(self, chance: random.Random, version: str) -> str:
        """Return what stands behind the columns of a table."""
        return chance.choice(("", "", " WITH (fillfactor = 50)"))

    def setup(self, chance: random.Random, table: str) -> Sequence[Plain]:
        """Return what decides which old values are in the log."""
        return (
            [Plain(f"ALTER TABLE {table} REPLICA IDENTITY FULL")] if chance.random() < 0.3 else []
        )

    def session(self, chance: random.Random, version: str) -> tuple[str, ...]:
        """Return settings that clients have."""
        return chance.choice(
            ((), (), (), ("SET TimeZone = 'Asia/Kolkata'", "SET DateStyle = 'German'"))
        )

    def truncate(self, table: str) -> Plain:
        """Return what empties a table."""
        return Plain(f"TRUNCATE {table}")

    def definition(self, chance: random.Random, columns: Columns, version: str) -> Definition:
        """Return a change of the table's columns, and apply it."""
        return Definition(usual(Editor(chance, columns, version, self)))

    def noise(self, chance: random.Random, columns: Columns, version: str) -> Definition:
        """Return statements that change no column."""
        table, number = columns.table, chance.randrange(10**6)
        statement, together = chance.choice(
            (
                (f"CREATE INDEX ON {table} ((rev + 1))", True),
                (f"VACUUM FULL {table}", False),
                (f"ALTER TABLE {table} SET (fillfactor = 70)", True),
                (f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT", True),
                (f"ALTER TABLE {table} REPLICA IDENTITY FULL", True),
                (f"CLUSTER {table} USING {table}_pkey", True),
                (f"ANALYZE {table}", True),
                (f"CREATE TABLE {OTHER}.u{number} (LIKE {table} INCLUDING ALL)", True),
                (f"CREATE VIEW v{number} AS SELECT rev FROM {table}", True),
                (f"COMMENT ON TABLE {table} IS 'DROP COLUMN'", True),
            )
        )
        return Definition((Plain(statement),), together=together)

    def default(self, chance: random.Random, literal: str) -> str:
        """Return what gives a new column a value in older rows."""
        return f" DEFAULT {literal}" + chance.choice(("", " NOT NULL"))

    def place(self, chance: random.Random, columns: Columns, name: str) -> str:
        """Return nothing: columns stand in the order in which they came."""
        return ""

    def renamed(
        self, chance: random.Random, version: str, names: tuple[str, str], type_: str
    ) -> str:
        """Return the action that gives a column another name."""
        return f"RENAME {names[0]} TO {names[1]}"

    def swapped(
        self, chance: random.Random, version: str, first: tuple[str, str], second: tuple[str, str]
    ) -> Sequence[Sequence[str]]:
        """Return the actions that swap the names of two columns."""
        one, other = first[0], second[0]
        return [
            [f"RENAME {one} TO passing"],
            [f"RENAME {other} TO {one}"],
            [f"RENAME passing TO {other}"],
        ]

    def retyped(self, name: str, type_: str) -> str:
        """Return the action that gives a column another type."""
        return f"ALTER COLUMN {name} TYPE {type_}"
