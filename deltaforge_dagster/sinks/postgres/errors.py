"""Translates errors of PostgreSQL into the errors of this package.

The SQLSTATE decides (manual: appendix "PostgreSQL Error Codes"). The server's text is repeated only
if it cannot contain a value of a row; the names of columns and constraints are fields of their own.
"""

from __future__ import annotations

import re

import psycopg

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    SinkRejected,
    SinkUnavailable,
    TableRejected,
)
from deltaforge_dagster.sinks.postgres.server import quoted
from deltaforge_dagster.sources.findings import one_line

NOT_PERMITTED = "42501"

_COMMITS = ("deltaforge", "commits")

_TRANSIENT: dict[str, str] = {
    "57014": "the statement was cancelled, or took longer than the server allows",
    "55P03": (
        "somebody else holds a lock on the table for too long; end what holds it (pg_locks), "
        "or wait"
    ),
    "25006": "the server takes no changes: it is a standby, or default_transaction_read_only is on",
}
_TRANSIENT_CLASSES = {"08", "40", "53", "57", "58", "XX"}
"""Classes of errors that may resolve by themselves."""

_CONSTRAINTS = {
    "23502": "its column {column} must not be null, and the source's rows have no value for it",
    "23503": (
        "its foreign key {constraint} refuses a change: tables are committed one after the other"
    ),
    "23505": (
        "its unique index {constraint} refuses a row that the source has; drop the index, "
        "or make it a constraint that is DEFERRABLE INITIALLY DEFERRED"
    ),
}
_CONSTRAINT_REMEDIES = {
    "23502": "ALTER TABLE {table} ALTER COLUMN {column} DROP NOT NULL",
    "23503": "ALTER TABLE {table} DROP CONSTRAINT {constraint}",
}
_VALUES = {
    "22001": "a value is longer than its column allows",
    "22003": "a number is out of range",
    "22007": "a text is no date or time",
    "22008": "a date or time is out of range",
    "22021": "a text has a character that the server cannot store",
    "22P02": "a text is no value of its column's type",
    "22P05": (
        "a text has a character that the database's encoding lacks (use a database with the "
        "encoding UTF8), or a document has \\u0000, which jsonb cannot have"
    ),
}
"""What is wrong with a value; the server's own text would quote it."""


def connection_error(error: psycopg.Error, where: str, user: str) -> DeltaforgeError:
    """Return the error for a connection that could not be opened; libpq has only a text about it.

    Args:
        error: The error.
        where: The server's address.
        user: The role as which we log in.
    """
    reason = one_line(str(error))
    fatal = reason.partition("FATAL:")[2].strip()
    if "password authentication failed" in reason or "no password supplied" in reason:
        return AuthFailed(
            f"{where}: wrong password for role {user!r}, or there is no such role; correct the "
            "sink's dsn"
        )
    if re.match(r'role ".*" does not exist|.*pg_hba\.conf', fatal):
        return AuthFailed(
            f"{where}: login of role {user!r} refused: {fatal}; correct the sink's dsn"
        )
    if re.match(r'database ".*" does not exist', fatal):
        return SinkRejected(f"{where}: the database does not exist; create it, or correct the dsn")
    if any(word in reason for word in ("SSL", "TLS", "certificate")):
        return SinkRejected(f"{where}: {reason}; see sslmode and sslrootcert of the dsn")
    return SinkUnavailable(f"{where}: {reason}")


def translated(
    error: psycopg.Error, where: str, user: str, label: str, name: tuple[str, str]
) -> DeltaforgeError:
    """Return our error for an error of the server about a table.

    Args:
        error: The error.
        where: The server's address.
        user: The role as which we log in.
        label: What messages call the table.
        name: Schema and name of the table.
    """
    state = error.sqlstate
    if not state:
        return SinkUnavailable(f"{where}: connection lost ({one_line(str(error))})")
    code = f" (SQLSTATE {state})"
    if state in _TRANSIENT or state[:2] in _TRANSIENT_CLASSES:
        why = _TRANSIENT.get(state) or one_line(str(error))
        return SinkUnavailable(f"{where}, {label}: {why}{code}")
    return TableRejected(
        f"{label}: {_reason(error, state)}{code}", remedy=_remedy(error, state, user, name)
    )


def _remedy(error: psycopg.Error, state: str, user: str, name: tuple[str, str]) -> str | None:
    table = quoted(*name)
    if state == NOT_PERMITTED:
        return _grant(one_line(str(error)), quoted(user), name)
    if state not in _CONSTRAINT_REMEDIES:
        return None
    diagnosis = error.diag
    column, constraint = (
        quoted(diagnosis.column_name or ""),
        quoted(diagnosis.constraint_name or ""),
    )
    return _CONSTRAINT_REMEDIES[state].format(table=table, column=column, constraint=constraint)


def _grant(text: str, role: str, name: tuple[str, str]) -> str | None:
    """Return the statement that gives a role the right that it lacks.

    Return None for a right on something else.
    """
    schema, _ = name
    for table in (name, _COMMITS):
        if text == f"permission denied for table {table[1]}":
            return f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {quoted(*table)} TO {role}"
        if text == f"must be owner of table {table[1]}":
            return f"ALTER TABLE {quoted(*table)} OWNER TO {role}"
    for its_schema in (schema, _COMMITS[0]):
        if text == f"permission denied for schema {its_schema}":
            return f"GRANT USAGE, CREATE ON SCHEMA {quoted(its_schema)} TO {role}"
    return None


def _reason(error: psycopg.Error, state: str) -> str:
    diagnosis = error.diag
    if state == NOT_PERMITTED:
        return (
            f"{one_line(str(error))}; let the dsn's role own the table, or grant it SELECT, "
            "INSERT, UPDATE, DELETE and TRUNCATE on it, and USAGE on its schema"
        )
    if state in _CONSTRAINTS:
        named = {"column": diagnosis.column_name, "constraint": diagnosis.constraint_name}
        return _CONSTRAINTS[state].format(**named)
    if state.startswith("22"):
        problem = _VALUES.get(state, "the server refuses a value")
        return (
            f"{problem}, and the server's log says which; declare the column as text under `types`"
        )
    if state.startswith("23"):
        return (
            f"its constraint {diagnosis.constraint_name} refuses a row that the source has; drop it"
        )
    if state.startswith("P0"):
        return "a trigger or function of the table refuses the change"
    # Texts of the other classes name objects, not values.
    return one_line(str(error))
