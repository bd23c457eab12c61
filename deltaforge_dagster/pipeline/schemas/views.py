"""Views of table versions: commands, the API and Dagster show the same JSON values.

A table is named in full: `schema.table`, or `db.table` where the source has no schemas. The
differences between two versions of a table have one line each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from deltaforge_dagster.errors import CorruptLog, NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableDetails, TableSchema

View = dict[str, Any]
Place = tuple[str, str | None, str]
"""Database, schema (None where the source has none) and name of a table."""


def tables(store: StateStore, pipeline: str) -> list[View]:
    """Return every captured table with its current version, by name."""
    return [
        _head(history, history.current) | {"pending": sorted(_pending(history))}
        for history in sorted(store.schemas.histories(pipeline), key=lambda history: history.name)
    ]


def table(
    store: StateStore,
    pipeline: str,
    name: str,
    *,
    version: int | None = None,
    sequence: int | None = None,
    position: str | None = None,
) -> View:
    """Return one version of a table with its columns: the current or the requested one.

    Args:
        store: The state store.
        pipeline: The pipeline.
        name: Full name of the table.
        version: Number of the version.
        sequence: Selects the newest version registered up to this sequence number of the pipeline.
        position: Selects the version in force at this position of the log, JSON text.

    Raises:
        NotAllowed: There is no such table or version, or the position is invalid.
    """
    history = store.schemas.history(pipeline, name)
    selected = find(history, version=version, sequence=sequence, position=position)
    changes = changes_of(history, selected)
    return _head(history, selected) | {
        "sequence": selected.stamp.sequence,
        "registered_at": selected.registered_at,
        "loaded_at": selected.registered_at,
        "position": orjson.loads(selected.position),
        "pending": selected.stamp.sequence in history.pending,
        "versions": len(history.versions),
        "columns": columns(selected.table),
        "changes": [str(change) for change in changes],
    }


def detailed(view: View, details: TableDetails | None) -> View:
    """Add the catalog's current details to a view of a table version; null where they are unknown.

    `nullable` is taken from the catalog if that knows the column, otherwise from the version.
    """
    catalog = {} if details is None else details.columns
    columns = []
    for column in view["columns"]:
        catalog_column = catalog.get(column["name"])
        columns.append(
            column
            | {
                "nullable": column["nullable"]
                if catalog_column is None
                else catalog_column.nullable,
                # Releases of DeltaForge have used both names.
                **dict.fromkeys(
                    ("default", "default_value"), catalog_column and catalog_column.default
                ),
                "extra": catalog_column and catalog_column.extra,
            }
        )
    return view | {
        "columns": columns,
        "engine": details and details.engine,
        "charset": details and details.charset,
        "collation": details and details.collation,
    }


def place(database: str | None, name: str) -> Place:
    """Return database, schema and name of a table.

    Args:
        database: The database of all tables of the source; None if full names begin with the
            database.
        name: Full name of the table.
    """
    first, _, rest = name.partition(".")
    return (first, None, rest) if database is None else (database, first, rest)


def captured(store: StateStore, pipeline: str) -> list[Place]:
    """Return every table that was captured."""
    schemas = (history.current.table for history in store.schemas.histories(pipeline))
    return [(schema.db, schema.schema, schema.table) for schema in schemas]


def named(places: Iterable[Place], pipeline: str, database: str, table: str) -> str:
    """Return the full name of the table that a database and a table name denote.

    `table` may also be the full name, and `database` the schema, as long as only one table matches.

    Raises:
        NotAllowed: There is no such table, or there are several.
    """
    names = sorted(
        {
            f"{schema or db}.{name}"
            for db, schema, name in places
            if (db == database and table in {name, f"{schema or db}.{name}"})
            or (schema == database and name == table)
        }
    )
    if not names:
        raise NotAllowed(f"pipeline {pipeline!r} captures no table {table!r} of {database!r}")
    if len(names) > 1:
        raise NotAllowed(
            f"{table!r} of {database!r} may be {' or '.join(names)}: say which, schema.table"
        )
    return names[0]


def versions(store: StateStore, pipeline: str, name: str) -> list[View]:
    """Return every version of a table, the oldest first.

    Raises:
        NotAllowed: There is no such table.
    """
    history = store.schemas.history(pipeline, name)
    return [
        {
            "version": version.stamp.version,
            "sequence": version.stamp.sequence,
            "fingerprint": version.stamp.fingerprint,
            "column_count": len(version.table.columns),
            "registered_at": version.registered_at,
            "position": orjson.loads(version.position),
            "pending": version.stamp.sequence in history.pending,
            "changes": [str(change) for change in changes_of(history, version)],
        }
        for version in history.versions
    ]


def difference(
    store: StateStore, pipeline: str, name: str, before: int | None, after: int | None
) -> tuple[int, int, list[SchemaDifference]]:
    """Return the numbers of two versions of a table, and their differences.

    By default, these are the previous version and the current one.

    Raises:
        NotAllowed: There is no such table or version.
    """
    history = store.schemas.history(pipeline, name)
    new = find(history, version=after)
    old = history.before(new) or new if before is None else find(history, version=before)
    return old.stamp.version, new.stamp.version, differences(old.table, new.table)


def find(
    history: TableHistory,
    *,
    version: int | None = None,
    sequence: int | None = None,
    position: str | None = None,
) -> SchemaVersion:
    """Return the requested version, by default the current one.

    Raises:
        NotAllowed: There is none, or the position is no position of this source.
    """
    if version is not None:
        selected, asked = history.version(version), f"version {version}"
    elif sequence is not None:
        selected, asked = history.at_sequence(sequence), f"version at sequence {sequence}"
    elif position is not None:
        selected, asked = _at(history, position), "version at that position"
    else:
        return history.current
    if selected is None:
        raise NotAllowed(f"table {history.name!r} has no {asked}")
    return selected


def columns(schema: TableSchema) -> list[View]:
    """Return the columns of a version in its order."""
    return [_column(schema, column) for column in schema.columns]


def waiting_tables(store: StateStore, pipeline: str) -> list[str]:
    """Return the full names of tables that have a version that waits for approval."""
    on_hold = [
        hold.subject
        for hold in store.holds.read(pipeline)
        if hold.kind == SCHEMA and hold.state == "held"
    ]
    pending = [history.name for history in store.schemas.histories(pipeline) if history.pending]
    return sorted({*on_hold, *pending})


def approve_everything(store: StateStore, pipeline: str) -> None:
    """Approve all waiting versions of all tables."""
    for table in waiting_tables(store, pipeline):
        store.holds.approve_table(pipeline, table)


@dataclass(frozen=True, slots=True)
class SchemaDifference:
    """A difference of one column or of the key.

    `before` and `after` describe the column or key; None where it does not exist.
    """

    kind: Literal["added", "dropped", "changed", "moved", "key"]
    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        match self.kind:
            case "added":
                return f"+ {self.name} {self.after}"
            case "dropped":
                return f"- {self.name} {self.before}"
            case "moved":
                return f"~ {self.name}: column {self.before} -> {self.after}"
            case "changed":
                return f"~ {self.name}: {self.before} -> {self.after}"
        return f"~ key: {self.before} -> {self.after}"


def differences(
    before: TableSchema, after: TableSchema, others: Collection[str] = ()
) -> list[SchemaDifference]:
    """Return the differences between two versions of a table.

    Dropped columns come first, then other columns in the order of `after`, then the key.

    Args:
        before: The earlier version.
        after: The later version.
        others: Names that stand for different columns in the two versions.
    """
    old = {column.name: column for column in before.columns}
    new = {column.name: column for column in after.columns}
    deltas = [
        SchemaDifference("dropped", name, _described(column), None)
        for name, column in old.items()
        if name not in new or name in others
    ]
    for name, column in new.items():
        former = None if name in others else old.get(name)
        if former is None:
            deltas.append(SchemaDifference("added", name, None, _described(column)))
        elif _described(former) != _described(column) or former.type_oid != column.type_oid:
            deltas.append(SchemaDifference("changed", name, _described(former), _described(column)))
    old_order = [name for name in old if name in new]
    new_order = [name for name in new if name in old]
    for name in old_order:
        if old_order.index(name) != new_order.index(name):
            ordinals = (str(columns[name].ordinal_position) for columns in (old, new))
            deltas.append(SchemaDifference("moved", name, *ordinals))
    if before.primary_key != after.primary_key:
        deltas.append(SchemaDifference("key", "", _key(before), _key(after)))
    return deltas


def changes_of(history: TableHistory, version: SchemaVersion) -> list[SchemaDifference]:
    """Return the differences between a version and the previous one; none for the first."""
    before = history.before(version)
    if before is None:
        return []
    identities = version.columns.identities
    others = {
        name
        for name, identity in before.columns.identities.items()
        if identities.get(name, identity) != identity
    }
    return differences(before.table, version.table, others)


def _at(history: TableHistory, text: str) -> SchemaVersion | None:
    begin: Position = parse_position(history.versions[0].position)
    try:
        position: Position = parse_position(text)
    except CorruptLog as error:
        raise NotAllowed(f"not a position: {error}") from error
    if type(position) is not type(begin):
        raise NotAllowed(f"not a position of this source, which writes them as {begin.to_json()}")
    return history.at_position(position)


def _head(history: TableHistory, version: SchemaVersion) -> View:
    schema = version.table
    return {
        "database": schema.db,
        "schema": schema.schema,
        "table": schema.table,
        "name": history.name,
        "column_count": len(schema.columns),
        "primary_key": list(schema.primary_key),
        "fingerprint": version.stamp.fingerprint,
        "registry_version": version.stamp.version,
    }


def _pending(history: TableHistory) -> Iterable[int]:
    return (
        version.stamp.version
        for version in history.versions
        if version.stamp.sequence in history.pending
    )


def _column(schema: TableSchema, column: Column) -> View:
    return {
        "name": column.name,
        # Releases of DeltaForge have used each of these names.
        **dict.fromkeys(("type", "column_type", "data_type"), column.data_type),
        "type_oid": column.type_oid,
        "nullable": column.nullable,
        "ordinal_position": column.ordinal_position,
        "is_primary_key": column.name in schema.primary_key,
    }


def _described(column: Column) -> str:
    return column.data_type + ("" if column.nullable else " not null")


def _key(table: TableSchema) -> str:
    return ", ".join(table.primary_key) or "none"
