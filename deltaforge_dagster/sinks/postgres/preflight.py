"""Inspects the database of a sink: can the role create and write the tables? Nothing is changed.

Errors that would stop a run are raised by the same functions that the run calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.postgres import commits
from deltaforge_dagster.sinks.postgres.commits import CommitsRow
from deltaforge_dagster.sinks.postgres.server import TargetServer, quoted
from deltaforge_dagster.sinks.postgres.sink_type import DEFAULT_SCHEMA
from deltaforge_dagster.sinks.registry import not_known
from deltaforge_dagster.sources.findings import Finding, listed

_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
_RECORD_RIGHTS = ("SELECT", "INSERT", "UPDATE")


def findings(
    connection: psycopg.Connection,
    server: TargetServer,
    pipeline: str,
    destinations: Sequence[str],
) -> Iterator[Finding]:
    """Yield the findings about a sink, in the order in which problems have to be fixed.

    Args:
        connection: A connection to its database.
        server: The server, for messages.
        pipeline: Name of the pipeline.
        destinations: Its tables; a template if they depend on changes.
    """
    subject = f"sink {server.sink_id}"
    version = connection.info.parameter_status("server_version") or "unknown"
    yield Finding(subject, "ok", f"{server.address}, version {version}")
    yield from _database(connection, server, subject)
    fixed = [name for name in destinations if not compile_template(name).variables]
    rows: dict[str, CommitsRow] = {}
    record = commits.relation(connection, commits.NAME)
    if record is not None and not _lacking(connection, record[0], _RECORD_RIGHTS):
        rows = {name: commits.read(connection, _split(name)) for name in fixed}
    missing: list[str] = []
    for name in fixed:
        relation = commits.relation(connection, _split(name))
        if relation is None:
            missing.append(name)
        else:
            row = rows.get(name, CommitsRow())
            yield _table(connection, server, name, relation[0], row, pipeline=pipeline)
    yield from _new_tables(connection, server, subject, missing)
    if len(fixed) < len(destinations):
        unknown = set(destinations) - set(fixed)
        yield not_known(subject, "tables", unknown, "exist and may be written")


def _database(
    connection: psycopg.Connection, server: TargetServer, subject: str
) -> Iterator[Finding]:
    if _scalar(connection, "SELECT pg_is_in_recovery()"):
        yield Finding(subject, "error", "this is a standby; name the primary in the sink's dsn")
        return
    if _scalar(connection, "SELECT current_setting('server_encoding')") != "UTF8":
        yield Finding(
            subject, "warning",
            "the database's encoding is not UTF8: a table with a character that it lacks is held",
        )  # fmt: skip
    if not _is_true(connection, "has_database_privilege(current_database(), 'TEMPORARY')"):
        yield Finding(
            subject, "error",
            f"role {server.user!r} may not make temporary tables, "
            "through which changes are applied",
            f"GRANT TEMPORARY ON DATABASE {quoted(server.database)} TO {quoted(server.user)}",
        )  # fmt: skip
    record = commits.relation(connection, commits.NAME)
    if record is not None:
        lacking = _lacking(connection, record[0], _RECORD_RIGHTS)
        if lacking:
            yield Finding(
                subject, "error",
                f"role {server.user!r} may not {' and '.join(lacking)} in {commits.COMMITS}",
                f"GRANT {', '.join(lacking)} ON {commits.COMMITS} TO {quoted(server.user)}",
            )  # fmt: skip
    elif not _may_create(connection, commits.SCHEMA):
        yield Finding(
            subject, "error",
            f"role {server.user!r} may not make the table {commits.COMMITS}, "
            "which says which commits tables have",
            f"CREATE SCHEMA {commits.SCHEMA} AUTHORIZATION {quoted(server.user)}",
        )  # fmt: skip


def _table(
    connection: psycopg.Connection,
    server: TargetServer,
    name: str,
    oid: int,
    row: CommitsRow,
    *,
    pipeline: str,
) -> Finding:
    """Return the finding on a table that exists."""
    subject, table, schema = f"table {name}", quoted(*_split(name)), quoted(_split(name)[0])
    if not _is_true(connection, "has_schema_privilege(to_regnamespace(%s)::oid, 'USAGE')", schema):
        return Finding(
            subject, "error", f"role {server.user!r} may not use its schema",
            f"GRANT USAGE ON SCHEMA {schema} TO {quoted(server.user)}",
        )  # fmt: skip
    lacking = _lacking(connection, oid, _RIGHTS)
    if lacking:
        return Finding(
            subject, "error", f"role {server.user!r} may not {' and '.join(lacking)}",
            f"GRANT {', '.join(lacking)} ON {table} TO {quoted(server.user)}",
        )  # fmt: skip
    if row.pipeline and (row.pipeline, row.sink) != (pipeline, server.sink_id):
        return Finding(
            subject, "error",
            f"it belongs to sink {row.sink} of pipeline {row.pipeline}; "
            "if that one will never write to it again",
            commits.claim(_split(name)),
        )  # fmt: skip
    if row.pipeline is None and _scalar(connection, f"SELECT EXISTS (SELECT FROM {table})"):
        return Finding(
            subject, "error",
            "it exists, with rows that are not from DeltaForge; empty it, "
            "or, if the rows are this sink's after all",
            commits.claim(_split(name)),
        )  # fmt: skip
    owns = _is_true(
        connection,
        "pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = %s",
        oid,
    )
    if not owns:
        return Finding(
            subject, "warning",
            f"role {server.user!r} does not own it, "
            "so the table is held if the source gets other columns",
            f"ALTER TABLE {table} OWNER TO {quoted(server.user)}",
        )  # fmt: skip
    return Finding(subject, "ok", "it exists and may be written")


def _new_tables(
    connection: psycopg.Connection, server: TargetServer, subject: str, missing: Sequence[str]
) -> Iterator[Finding]:
    """Yield the findings on tables that a run will create."""
    schemas = {_split(name)[0] for name in missing}
    closed = sorted(schema for schema in schemas if not _may_create(connection, schema))
    for schema in closed:
        oid = _scalar(connection, "SELECT to_regnamespace(%s)::oid::bigint", quoted(schema))
        user = quoted(server.user)
        remedy = f"CREATE SCHEMA {quoted(schema)} AUTHORIZATION {user}"
        if oid is not None:
            remedy = f"GRANT USAGE, CREATE ON SCHEMA {quoted(schema)} TO {user}"
        yield Finding(
            subject, "error", f"role {server.user!r} may not make tables in schema {schema}", remedy
        )
    allowed = [name for name in missing if _split(name)[0] not in closed]
    if allowed:
        yield Finding(subject, "ok", f"will make {listed(allowed)}")


def _may_create(connection: psycopg.Connection, schema: str) -> bool:
    """Return whether the role may create tables in a schema, and the schema if there is none."""
    if _scalar(connection, "SELECT to_regnamespace(%s)::oid::bigint", quoted(schema)) is None:
        return _is_true(connection, "has_database_privilege(current_database(), 'CREATE')")
    return _is_true(
        connection,
        "has_schema_privilege(to_regnamespace(%s)::oid, 'CREATE')"
        " AND has_schema_privilege(to_regnamespace(%s)::oid, 'USAGE')",
        quoted(schema),
        quoted(schema),
    )


def _lacking(connection: psycopg.Connection, oid: int, rights: Sequence[str]) -> list[str]:
    """Return those of the rights that the role does not have on a table."""
    return [
        right
        for right in rights
        if not _is_true(connection, "has_table_privilege(%s::oid, %s)", oid, right)
    ]


def _is_true(connection: psycopg.Connection, question: str, *parameters: object) -> bool:
    return bool(_scalar(connection, f"SELECT {question}", *parameters))


def _scalar(connection: psycopg.Connection, query: str, *parameters: object) -> object:
    """Return the value that a query finds, None if there is no row."""
    row = connection.execute(query, parameters or None).fetchone()
    return None if row is None else row[0]


def _split(name: str) -> tuple[str, str]:
    schema, dot, table = name.partition(".")
    return (schema, table) if dot else (DEFAULT_SCHEMA, name)
