"""Table versions in the log `schemas`: what rows were decoded with, and from which position on.

One registry per pipeline: namespace `schemas/{pipeline}`, key `{tenant}/{db}/{schema.table}`. An
entry is the JSON object `{hash, version, sequence, schema, registered_at, checkpoint}`; `version`
counts from 1 per table, `sequence` from 1 over all tables of the pipeline, `checkpoint` is the
position at which the version was first seen. Entries are never changed, so stamps survive any
restart. A table that returns to an earlier form gets that form's stamp again.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

import orjson
from sqlalchemy import Connection, select

from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.primitives import LogEntry, append_to_log, last_log_entry, log_entries
from deltaforge_dagster.tables import Column, SchemaStamp, TableSchema


def fingerprint(table: TableSchema) -> str:
    """Return `sha256:` and the hexadecimal SHA-256 of the table's columns and primary key.

    Hashed is the compact JSON object `{"columns": [{name, data_type, type_oid, nullable,
    ordinal_position}, ...], "primary_key": [...]}` in this order of fields, `type_oid` left out
    where the source has none. The names of database, schema and table do not count.
    """
    return "sha256:" + hashlib.sha256(_definition(table)).hexdigest()


def registry(pipeline: str) -> str:
    """Return the log namespace that holds the table versions of `pipeline`."""
    return f"schemas/{pipeline}"


def table_key(tenant: str, table: TableSchema) -> str:
    """Return the log key of a table, different for any two tables.

    `%`, `/` and, inside the names of schema and table, `.` are written as in URLs (`%2E`).
    """
    name = ".".join(
        _escaped(part).replace(".", "%2E") for part in (table.schema, table.table) if part
    )
    return f"{_escaped(tenant)}/{_escaped(table.db)}/{name}"


def register(
    connection: Connection, pipeline: str, tenant: str, table: TableSchema, position: str
) -> SchemaStamp:
    """Return the stamp of `table`, registering it when no earlier version has its fingerprint.

    The caller's transaction holds the pipeline's lease, so nobody else numbers versions.
    `position` is the JSON text of the position from which on the version holds.
    """
    namespace, key = registry(pipeline), table_key(tenant, table)
    versions = [_stamp(entry) for entry in log_entries(connection, namespace, key)]
    wanted = fingerprint(table)
    for stamp in versions:
        if stamp.fingerprint == wanted:
            return stamp
    last = last_log_entry(connection, namespace)
    sequence = 1 if last is None else _stamp(last).sequence + 1
    stamp = SchemaStamp(wanted, len(versions) + 1, sequence)
    entry = {
        "hash": stamp.fingerprint,
        "version": stamp.version,
        "sequence": stamp.sequence,
        "schema": {"db": table.db, "schema": table.schema, "table": table.table}
        | orjson.loads(_definition(table)),
        "registered_at": connection.execute(select(clock())).scalar_one(),
        "checkpoint": orjson.loads(position),
    }
    append_to_log(connection, namespace, key, orjson.dumps(entry))
    return stamp


def find(
    connection: Connection, pipeline: str, tenant: str, table: TableSchema
) -> SchemaStamp | None:
    """Return the stamp of `table` if it was ever registered."""
    wanted = fingerprint(table)
    entries = log_entries(connection, registry(pipeline), table_key(tenant, table))
    return next((stamp for stamp in map(_stamp, entries) if stamp.fingerprint == wanted), None)


def versions(connection: Connection, pipeline: str) -> list[list[TableSchema]]:
    """Return every version of every table that was registered, the oldest first."""
    found: dict[str, list[TableSchema]] = {}
    for entry in log_entries(connection, registry(pipeline)):
        fields = orjson.loads(entry.value)["schema"]
        columns = tuple(
            Column(
                one["name"],
                one["data_type"],
                one.get("type_oid"),
                one["nullable"],
                one["ordinal_position"],
            )
            for one in fields["columns"]
        )
        table = TableSchema(
            fields["db"], fields["schema"], fields["table"], columns, tuple(fields["primary_key"])
        )
        found.setdefault(entry.key, []).append(table)
    return list(found.values())


def _stamp(entry: LogEntry) -> SchemaStamp:
    fields = orjson.loads(entry.value)
    return SchemaStamp(fields["hash"], fields["version"], fields["sequence"])


def _definition(table: TableSchema) -> bytes:
    return orjson.dumps(
        {
            "columns": [_column(column) for column in table.columns],
            "primary_key": list(table.primary_key),
        }
    )


def _column(column: Column) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": column.name, "data_type": column.data_type}
    if column.type_oid is not None:
        fields["type_oid"] = column.type_oid
    return fields | {"nullable": column.nullable, "ordinal_position": column.ordinal_position}


def _escaped(name: str) -> str:
    return quote(name, safe="")
