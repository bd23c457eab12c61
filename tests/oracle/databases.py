"""The sources: what runs a scenario's statements, and the plain client that says what the tables have."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg
import pymysql

from deltaforge_lab.servers import mysql
from tests.oracle.kinds import Kind, Value, from_text, in_key
from tests.oracle.postgres_dialect import PREPARATION
from tests.oracle.scenario import OTHER, Statement, Transaction

Row = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class TableState:
    """What a table of the source has.

    Attributes:
        kinds: The kind of each column, in order.
        key: The names of the key's columns.
        rows: Its rows.
    """

    kinds: Mapping[str, Kind]
    key: tuple[str, ...]
    rows: Sequence[Row]

    def key_of(self, row: Row) -> tuple[Value, ...]:
        """Return the key of a row."""
        return tuple(in_key(row[name]) for name in self.key)


@dataclass(slots=True)
class Refusals:
    """What the server refused, for those who look into a scenario."""

    statements: list[tuple[str, str]] = field(default_factory=list)


class Database(Protocol):
    """A database with the tables of a scenario.

    Attributes:
        refused: What the server refused.
    """

    refused: Refusals

    def prepare(self, statements: Sequence[Statement]) -> None:
        """Run statements, each in its own transaction."""
        ...

    def run(self, transaction: Transaction) -> None:
        """Run a transaction; what the server refuses is as if it had never been there."""
        ...

    def touch(self, table: str, rev: int) -> None:
        """Change one row of a table, if it has any: a log says nothing of a definition before the next row."""
        ...

    def state(self, table: str) -> TableState | None:
        """Return what a table has, None if there is no such table."""
        ...

    def source(self) -> str:
        """Return the source of a pipeline file, as YAML in braces, up to the options of its snapshot."""
        ...

    def schema(self) -> str:
        """Return the name of the schema (PostgreSQL) or database (MySQL) that has the tables."""
        ...

    def close(self) -> None:
        """End what is open, and let the server forget the pipeline."""
        ...


class PostgresTables:
    """A database of PostgreSQL."""

    def __init__(self, dsn: str) -> None:
        self.refused = Refusals()
        self._dsn = dsn
        self._slot = f"oracle_{uuid.uuid4().hex[:12]}"
        self._client = psycopg.connect(dsn, autocommit=True)
        for setting in (
            "TimeZone = UTC",
            "DateStyle = ISO",
            "lc_monetary = 'C'",
            "extra_float_digits = 3",
        ):
            self._client.execute(f"SET {setting}")
        for statement in (*PREPARATION, "CREATE SCHEMA other"):
            self._client.execute(statement)

    def prepare(self, statements: Sequence[Statement]) -> None:
        """Run statements, each in its own transaction."""
        for statement in statements:
            self._run([statement.sql], (), "COMMIT")

    def run(self, transaction: Transaction) -> None:
        """Run a transaction; what the server refuses is as if it had never been there."""
        texts = [one.sql for one in transaction.statements]
        self._run(texts, transaction.session, transaction.ends)

    def _run(self, texts: Sequence[str], session: Sequence[str], ends: str) -> None:
        text = ""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = on")
            try:
                for text in session:
                    connection.execute(text)
                if len(texts) > 1 or ends == "ROLLBACK":
                    texts = ["BEGIN", *texts, ends]
                for text in texts:
                    connection.execute(text.replace(OTHER, "other"))
            except psycopg.Error as error:
                self.refused.statements.append((text, str(error)))

    def touch(self, table: str, rev: int) -> None:
        """Change one row of a table, if it has any."""
        first = f"(SELECT ctid FROM {table} LIMIT 1)"
        self._run([f"UPDATE {table} SET rev = {rev} WHERE ctid = {first}"], (), "COMMIT")

    def state(self, table: str) -> TableState | None:
        """Return what a table has."""
        columns = self._client.execute(
            "SELECT attname, format_type(atttypid, atttypmod), attnum = ANY(conkey) FROM pg_attribute"
            " LEFT JOIN pg_constraint ON conrelid = attrelid AND contype = 'p'"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [table],
        ).fetchall()
        if not columns:
            return None
        kinds = {name: postgres_kind(type_) for name, type_, _ in columns}
        texts = [printed(name, is_list=kind.name == "list") for name, kind in kinds.items()]
        found = self._client.execute(f"SELECT {', '.join(texts)} FROM {table}")
        rows = [
            {name: from_text(kinds[name], one) for name, one in zip(kinds, row, strict=True)}
            for row in found.fetchall()
        ]
        return TableState(kinds, tuple(name for name, _, is_key in columns if is_key), rows)

    def source(self) -> str:
        """Return the source of a pipeline file."""
        return (
            f'{{type: postgres, config: {{id: oracle-source, dsn: "{self._dsn}", slot: {self._slot}, '
            f'publication: {self._slot}, tables: ["public.t*"]'
        )

    def schema(self) -> str:
        """Return the name of the schema that has the tables."""
        return "public"

    def close(self) -> None:
        """Drop the slot."""
        with contextlib.closing(self._client):
            self._client.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE database = current_database() AND active"
            )
            self._client.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = current_database() AND NOT active"
            )


def printed(name: str, *, is_list: bool) -> str:
    """Return the expression for what PostgreSQL prints of a column, which a cast to text is not for every type."""
    return (
        f'"{name}"::text[]'
        if is_list
        else f"""CASE WHEN "{name}" IS NOT NULL THEN format('%s', "{name}") END"""
    )


_SIMPLE = {
    "smallint": Kind("integer"), "integer": Kind("integer"), "bigint": Kind("integer"), "oid": Kind("integer"),
    "boolean": Kind("boolean"), "real": Kind("float32"), "double precision": Kind("float64"), "json": Kind("json"),
    "jsonb": Kind("json"), "bytea": Kind("binary"), "uuid": Kind("uuid"), "date": Kind("date"),
    "time without time zone": Kind("time"), "timestamp without time zone": Kind("timestamp"),
    "timestamp with time zone": Kind("timestamptz"),
}  # fmt: skip


def postgres_kind(type_: str) -> Kind:
    """Return the kind of a type, as `format_type` names it."""
    if type_.endswith("[]"):
        return Kind("list", postgres_kind(type_.removesuffix("[]")))
    numeric = re.fullmatch(r"numeric\((\d+),(\d+)\)", type_)
    if numeric and int(numeric[1]) <= 38:
        return Kind("decimal")
    return _SIMPLE.get(re.sub(r"\(\d+\)", "", type_), Kind("text"))


class MysqlTables:
    """A database of MySQL or MariaDB, on a server whose global variables are the scenario's."""

    def __init__(self, dsn: str, settings: Mapping[str, str]) -> None:
        self.refused = Refusals()
        self._dsn = dsn
        self._database = urlsplit(dsn).path.strip("/")
        self._other = f"{self._database}_o"
        self._client = mysql.connect(dsn)
        made = [f"SET GLOBAL {name} = {value}" for name, value in settings.items()]
        made += [f"CREATE DATABASE {self._other}"]
        made += [
            f"CREATE TABLE {self._other}.`{name}` (id int PRIMARY KEY)"
            for name in ("table", "select")
        ]
        made += ["SET time_zone = '+00:00'", "SET NAMES utf8mb4"]
        with self._client.cursor() as cursor:
            for statement in made:
                cursor.execute(statement)

    def prepare(self, statements: Sequence[Statement]) -> None:
        """Run statements, each in its own transaction."""
        for statement in statements:
            self._run([statement.sql], (), "COMMIT")

    def run(self, transaction: Transaction) -> None:
        """Run a transaction; what the server refuses is as if it had never been there."""
        texts = [one.sql for one in transaction.statements]
        self._run(texts, transaction.session, transaction.ends)

    def _run(self, texts: Sequence[str], session: Sequence[str], ends: str) -> None:
        text = ""
        with mysql.connect(self._dsn) as connection, connection.cursor() as cursor:
            try:
                for text in ("SET time_zone = '+00:00'", *session):
                    cursor.execute(text)
                if len(texts) > 1 or ends == "ROLLBACK":
                    texts = ["BEGIN", *texts, ends]
                for text in texts:
                    cursor.execute(text.replace(OTHER, self._other))
            except pymysql.Error as error:
                self.refused.statements.append((text, str(error)))

    def touch(self, table: str, rev: int) -> None:
        """Change one row of a table, if it has any."""
        ((version,),) = self._query("SELECT version()")
        # MariaDB's JSON is text with a check, which older rows do not pass after `ADD COLUMN ... json NOT NULL`.
        session = ["SET check_constraint_checks = 0"] if "MariaDB" in str(version) else []
        self._run([f"UPDATE {table} SET rev = {rev} LIMIT 1"], session, "COMMIT")

    def state(self, table: str) -> TableState | None:
        """Return what a table has."""
        columns = self._query(
            "SELECT column_name, column_type, column_key FROM information_schema.columns"
            f" WHERE table_schema = '{self._database}' AND table_name = '{table}' ORDER BY ordinal_position"
        )
        if not columns:
            return None
        kinds = {name: mysql_kind(type_) for name, type_, _ in columns}
        shown = [_shown(f"`{name}`", kinds[name], type_) for name, type_, _ in columns]
        rows = [
            {
                name: _read(kinds[name], type_, value)
                for (name, type_, _), value in zip(columns, row, strict=True)
            }
            for row in self._query(f"SELECT {', '.join(shown)} FROM `{table}`")
        ]
        return TableState(kinds, tuple(name for name, _, key in columns if key == "PRI"), rows)

    def source(self) -> str:
        """Return the source of a pipeline file."""
        return f'{{type: mysql, config: {{id: oracle-source, dsn: "{self._dsn}", tables: ["{self._database}.t*"]'

    def schema(self) -> str:
        """Return the name of the database that has the tables."""
        return self._database

    def close(self) -> None:
        """Close the connection."""
        with self._client.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {self._other}")
        self._client.close()

    def _query(self, query: str) -> list[tuple[Any, ...]]:
        with self._client.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


_MYSQL_KINDS: Mapping[str, Kind] = {
    "tinyint": Kind("integer"), "smallint": Kind("integer"), "mediumint": Kind("integer"), "int": Kind("integer"),
    "bigint": Kind("integer"), "year": Kind("integer"), "bit": Kind("integer"), "float": Kind("float32"),
    "double": Kind("float64"), "date": Kind("date"), "time": Kind("time"), "datetime": Kind("timestamp"),
    "timestamp": Kind("timestamptz"), "json": Kind("json"), "binary": Kind("binary"), "varbinary": Kind("binary"),
    "blob": Kind("binary"), "longblob": Kind("binary"), "point": Kind("geometry"), "geometry": Kind("geometry"),
    "uuid": Kind("uuid"),
}  # fmt: skip


def mysql_kind(type_: str) -> Kind:
    """Return the kind of a type, as `information_schema` names it."""
    word = re.match(r"\w+", type_)
    assert word
    precision = re.match(r"decimal\((\d+)", type_)
    if precision:
        return Kind("decimal" if int(precision[1]) <= 38 else "text")
    return _MYSQL_KINDS.get(word[0], Kind("text"))


_SHOWN: Mapping[str, str] = {
    "integer": "CAST({} + 0 AS CHAR)",
    "float32": "{} * 1e0",
    "float64": "{} * 1e0",
    "binary": "HEX({})",
    "geometry": "HEX(ST_AsBinary({}))",
    "json": "HEX(CAST({} AS CHAR CHARACTER SET utf8mb4))",
    "text": "HEX(CONVERT({} USING utf8mb4))",
}
"""Expressions whose results say values exactly, whatever the client's character set is, and keep -0."""


def _shown(name: str, kind: Kind, type_: str) -> str:
    """Return the expression that shows a column."""
    if kind.name == "text" and type_.startswith(("inet", "decimal")):
        return _SHOWN["json"].format(name)
    return _SHOWN.get(kind.name, "CAST({} AS CHAR)").format(name)


def _read(kind: Kind, type_: str, value: Any) -> Value:
    if value is None:
        return None
    if kind.name in {"float32", "float64"}:
        return from_text(kind, repr(value))
    if kind.name in {"text", "json"}:
        return from_text(kind, bytes.fromhex(value).decode())
    if kind.name == "integer" and type_.startswith("bit"):
        return int(value)
    return from_text(kind, value.decode() if isinstance(value, bytes) else value)
