"""The registry of table versions: with which schema rows were decoded, and from which position on.

Each pipeline has a log with the namespace `schemas/{pipeline}` and the keys
`{tenant}/{db}/{schema.table}`. An entry is the JSON object `{hash, version, sequence, schema,
registered_at, checkpoint}`; `version` counts from 1 per table, `sequence` from 1 over all tables of the
pipeline, and `checkpoint` is the position at which the version was first seen. Entries never change, so
stamps remain valid across restarts. A table that returns to an earlier form gets the stamp of that form
again.

A marker of a table is a value in the key-value namespace of the same name, under the table's key: the JSON
object `{in_force: [[position, sequence], ...], pending: [sequence, ...], renamed: {sequence: {name: former name}}}`.
`in_force` lists the positions of the source's log from which each version applies, so that the version at a position is
also known for a table that returned to an earlier form; `pending` are the versions that wait for approval; `renamed` are
the columns that had another name in the version before, as was known when a version was registered (left out if empty).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import orjson
from sqlalchemy import Connection, select

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.primitives import (
    LogEntry,
    append_to_log,
    get_value,
    last_log_entry,
    log_entries,
    put_value,
)
from deltaforge_dagster.state.database.tables import kv
from deltaforge_dagster.tables import Column, SchemaStamp, TableSchema

_SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A registered version of a table.

    Attributes:
        table: The table with its columns and key.
        stamp: Fingerprint, version and sequence.
        registered_at: When it was registered, by the store's clock.
        position: Position at which it was first seen, JSON text; it applies from there on.
    """

    table: TableSchema
    stamp: SchemaStamp
    registered_at: float
    position: str


@dataclass(frozen=True, slots=True)
class TableHistory:
    """All versions of one table.

    Attributes:
        versions: Its versions, oldest first.
        in_force: Pairs of a position (JSON text) and the sequence of the version that is in force from
            there on, in the order of the log.
        pending: Sequences of the versions that wait for approval.
        renamed: By sequence of a version, the columns that had another name in the version before, with that name.
    """

    versions: tuple[SchemaVersion, ...]
    in_force: tuple[tuple[str, int], ...]
    pending: frozenset[int]
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Full name of the table."""
        return self.versions[0].table.full_name

    @property
    def newest(self) -> SchemaVersion:
        """The version that was registered most recently."""
        return self.versions[-1]

    @property
    def current(self) -> SchemaVersion:
        """The version that came into force most recently."""
        return self.at_sequence(self.in_force[-1][1]) or self.newest

    def version(self, number: int) -> SchemaVersion | None:
        """Return the version with this number, or None."""
        return next((one for one in self.versions if one.stamp.version == number), None)

    def at_sequence(self, sequence: int) -> SchemaVersion | None:
        """Return the newest version with a sequence of at most `sequence`, or None."""
        return max(
            (one for one in self.versions if one.stamp.sequence <= sequence),
            key=lambda one: one.stamp.sequence,
            default=None,
        )

    def at_position(self, position: Position) -> SchemaVersion | None:
        """Return the version in force at a position of the log, or None before the first one."""
        sequence = None
        for begin, one in self.in_force:
            begins: Position = parse_position(begin)
            if begins <= position:
                sequence = one
        return next((one for one in self.versions if one.stamp.sequence == sequence), None)

    def until(self, version: SchemaVersion) -> Sequence[SchemaVersion]:
        """Return all versions that the table has had up to the last time that a version was in force."""
        passed = [sequence for _, sequence in self.in_force]
        own = version.stamp.sequence
        if own in passed:
            passed = passed[: len(passed) - passed[::-1].index(own)]
        return [
            one
            for one in self.versions
            if one.stamp.sequence <= own or one.stamp.sequence in passed
        ]

    def identities(self) -> Mapping[int, Mapping[str, str]]:
        """Return by sequence of a version what identifies each of its columns, by name.

        It stays the same when a column is renamed. A column that is dropped and added again under its name between two
        versions counts as the same one. The text is always the same, in whatever process.
        """
        versions = {one.stamp.sequence: one for one in self.versions}
        found: dict[int, Mapping[str, str]] = {}
        before: Mapping[str, str] = {}
        for sequence in (*(one for _, one in self.in_force), *sorted(versions)):
            if sequence in versions and sequence not in found:
                renamed = self.renamed.get(sequence, {})
                found[sequence] = _identified(versions[sequence], before, renamed)
            before = found.get(sequence, before)
        return found

    def before(self, version: SchemaVersion) -> SchemaVersion | None:
        """Return the version before `version`, or None for the first one."""
        return self.version(version.stamp.version - 1)


@dataclass(frozen=True, slots=True)
class Marker:
    """Where each version of a table was in force, and which versions wait for approval."""

    in_force: tuple[tuple[str, int], ...] = ()
    pending: frozenset[int] = frozenset()
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def reached(self, position: str, sequence: int) -> Marker:
        """Return the marker with a version in force from a position (JSON text) on.

        Entries for later positions are dropped, because the log is being read again from an earlier
        one. Adding the same entry again, after a run died, has no other effect.
        """
        at: Position = parse_position(position)
        notes = [one for one in self.in_force if not at < parse_position(one[0])]
        again = (position, sequence)
        if again in notes:
            del notes[notes.index(again) + 1 :]
        elif not notes or notes[-1][1] != sequence:
            notes.append(again)
        return replace(self, in_force=tuple(notes))

    def with_renamed(self, sequence: int, renamed: Mapping[str, str]) -> Marker:
        """Return the marker with the columns of a new version that had another name before, with that name."""
        return replace(
            self, renamed={**self.renamed, sequence: renamed} if renamed else self.renamed
        )

    def waiting_for(self, sequence: int) -> Marker:
        """Return the marker with another version that waits for approval."""
        return replace(self, pending=self.pending | {sequence})

    def approved(self) -> Marker:
        """Return the marker with no version waiting."""
        return replace(self, pending=frozenset())


class SchemaRepository:
    """The table versions of all pipelines: `StateStore.schemas`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def stamp(self, name: str, tenant: str, table: TableSchema) -> SchemaStamp | None:
        """Return the stamp of a table version, or None if it was never registered."""
        wanted = fingerprint(table)
        with self._database.read() as connection:
            entries = log_entries(connection, registry(name), table_key(tenant, table))
        stamps = (_version(entry).stamp for entry in entries)
        return next((stamp for stamp in stamps if stamp.fingerprint == wanted), None)

    def versions(self, name: str) -> list[list[TableSchema]]:
        """Return every version of every table that the pipeline has captured, oldest first."""
        histories = self.histories(name)
        return [[version.table for version in history.versions] for history in histories]

    def histories(self, name: str) -> list[TableHistory]:
        """Return all tables that the pipeline has captured, with their versions.

        They are ordered by the sequence of the first version.
        """
        with self._database.read() as connection:
            return _histories(connection, name)

    def history(self, name: str, table: str) -> TableHistory:
        """Return the version history of one table, given by its full name.

        Raises:
            NotAllowed: The pipeline has never captured this table.
        """
        for history in self.histories(name):
            if history.name == table:
                return history
        raise NotAllowed(f"pipeline {name!r} has captured no table {table!r}")

    def unpublished(self, name: str) -> list[tuple[TableHistory, SchemaVersion]]:
        """Return the versions that are not published in Dagster yet, by sequence, with histories."""
        with self._database.read() as connection:
            shown = int(get_value(connection, _shown(name), _SEQUENCE) or b"0")
            last = last_log_entry(connection, registry(name))
            if last is None or _version(last).stamp.sequence <= shown:
                return []
            found = [
                (history, version)
                for history in _histories(connection, name)
                for version in history.versions
                if version.stamp.sequence > shown
            ]
            return sorted(found, key=lambda one: one[1].stamp.sequence)

    def mark_published(self, name: str, version: SchemaVersion) -> None:
        """Record that a version, and every one before it, is published in Dagster."""
        sequence = str(version.stamp.sequence).encode()
        with self._database.write() as connection:
            put_value(connection, _shown(name), _SEQUENCE, sequence)


class SchemaWrites:
    """Registers the table versions that a lease holder meets: `FencedWriter.schemas`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def register(
        self,
        tenant: str,
        table: TableSchema,
        position_json: str,
        *,
        streamed: bool = True,
        pause: bool = False,
    ) -> SchemaStamp:
        """Return the stamp of `table`; register it if no earlier version has its fingerprint.

        Args:
            tenant: The pipeline's tenant.
            table: The table version.
            position_json: Position from which the version applies, JSON text.
            streamed: Whether rows of the log have this version from there on. False for a snapshot, whose
                rows may be older than the log that has been read.
            pause: Whether a new version must wait for approval if the table already has others.
        """
        namespace, key = registry(self._pipeline), table_key(tenant, table)
        known = [_version(entry) for entry in log_entries(self._connection, namespace, key)]
        wanted = fingerprint(table)
        stamp = next((one.stamp for one in known if one.stamp.fingerprint == wanted), None)
        is_new = stamp is None
        if stamp is None:
            last = last_log_entry(self._connection, namespace)
            sequence = 1 if last is None else _version(last).stamp.sequence + 1
            stamp = SchemaStamp(wanted, len(known) + 1, sequence)
            entry = _entry(table, stamp, position_json) | {
                "registered_at": self._connection.execute(select(clock())).scalar_one()
            }
            append_to_log(self._connection, namespace, key, orjson.dumps(entry))
        marker = _marker(self._connection, namespace, key) or _first_marker(known)
        changed = marker
        if streamed or not marker.in_force:
            changed = changed.reached(position_json, stamp.sequence)
        if is_new:
            renamed = {one.name: one.former for one in table.columns if one.former is not None}
            changed = changed.with_renamed(stamp.sequence, renamed)
        if pause and is_new and known:
            changed = changed.waiting_for(stamp.sequence)
        if changed != marker or is_new:
            _write_marker(self._connection, namespace, key, changed)
        return stamp


def fingerprint(table: TableSchema) -> str:
    """Return `sha256:` and the hexadecimal SHA-256 of the table's columns and primary key.

    The hash is computed over the compact JSON object `{"columns": [{name, data_type, type_oid,
    nullable, ordinal_position}, ...], "primary_key": [...]}` with this order of fields, without
    `type_oid` if the source has none. The names of database, schema and table are not included.
    """
    return "sha256:" + hashlib.sha256(_definition(table)).hexdigest()


def registry(pipeline: str) -> str:
    """Return the log namespace that holds the table versions of `pipeline`."""
    return f"schemas/{pipeline}"


def table_key(tenant: str, table: TableSchema) -> str:
    """Return the log key of a table, which is unique.

    Characters are percent-encoded as in URLs, including `/`, `%` and, in the names of schema and table,
    `.` (`%2E`).
    """
    name = ".".join(
        _escaped(part).replace(".", "%2E") for part in (table.schema, table.table) if part
    )
    return f"{_escaped(tenant)}/{_escaped(table.db)}/{name}"


def approve(connection: Connection, pipeline: str, table: str) -> int:
    """Approve all pending versions of a table, given by its full name; return how many there were."""
    count = 0
    namespace = registry(pipeline)
    kept = _markers(connection, namespace)
    for key, marker in kept.items():
        if marker.pending and _name_of(connection, namespace, key) == table:
            count += len(marker.pending)
            _write_marker(connection, namespace, key, marker.approved())
    return count


def is_pending(connection: Connection, pipeline: str, table: str) -> bool:
    """Return whether a version of a table, given by its full name, waits for approval."""
    namespace = registry(pipeline)
    return any(
        marker.pending and _name_of(connection, namespace, key) == table
        for key, marker in _markers(connection, namespace).items()
    )


def _identified(
    version: SchemaVersion, before: Mapping[str, str], renamed: Mapping[str, str]
) -> Mapping[str, str]:
    """Return what identifies the columns of a version, by name.

    Args:
        version: The version.
        before: What identified those of the version before.
        renamed: The columns that had another name then, with that name.
    """
    folded = {name.lower(): identity for name, identity in before.items()}
    found: dict[str, str] = {}
    for column in version.table.columns:
        former = renamed.get(column.name)
        if former is not None:  # MySQL's statements may write it in another case
            same = before.get(former) or folded.get(former.lower())
            if same is not None:
                found[column.name] = same
    taken = set(found.values())
    for column in version.table.columns:
        if column.name not in found:
            same = before.get(column.name)
            new = f"{column.name}@{version.stamp.sequence}"
            found[column.name] = new if same is None or same in taken else same
    return found


def _histories(connection: Connection, pipeline: str) -> list[TableHistory]:
    namespace = registry(pipeline)
    found: dict[str, list[SchemaVersion]] = {}
    for entry in log_entries(connection, namespace):
        found.setdefault(entry.key, []).append(_version(entry))
    kept = _markers(connection, namespace)
    return [
        TableHistory(tuple(versions), marker.in_force, marker.pending, marker.renamed)
        for key, versions in found.items()
        for marker in [kept.get(key) or _first_marker(versions)]
    ]


def _shown(pipeline: str) -> str:
    """Return the namespace that holds the sequence up to which versions are published."""
    return f"schemas-shown/{pipeline}"


def _name_of(connection: Connection, namespace: str, key: str) -> str:
    return _version(log_entries(connection, namespace, key)[0]).table.full_name


def _first_marker(known: Sequence[SchemaVersion]) -> Marker:
    """Return the marker of a table without a stored one: each version replaced the previous one."""
    marker = Marker()
    for one in known:
        marker = marker.reached(one.position, one.stamp.sequence)
    return marker


def _entry(table: TableSchema, stamp: SchemaStamp, position: str) -> dict[str, Any]:
    names = {"db": table.db, "schema": table.schema, "table": table.table}
    return {
        "hash": stamp.fingerprint,
        "version": stamp.version,
        "sequence": stamp.sequence,
        "schema": names | orjson.loads(_definition(table)),
        "checkpoint": orjson.loads(position),
    }


def _version(entry: LogEntry) -> SchemaVersion:
    fields = orjson.loads(entry.value)
    of = fields["schema"]
    columns = tuple(
        Column(
            one["name"],
            one["data_type"],
            one.get("type_oid"),
            one["nullable"],
            one["ordinal_position"],
        )
        for one in of["columns"]
    )
    return SchemaVersion(
        TableSchema(of["db"], of["schema"], of["table"], columns, tuple(of["primary_key"])),
        SchemaStamp(fields["hash"], fields["version"], fields["sequence"]),
        fields["registered_at"],
        json.dumps(fields["checkpoint"]),
    )


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


def _marker(connection: Connection, namespace: str, key: str) -> Marker | None:
    value = get_value(connection, namespace, key)
    return None if value is None else _parse_marker(value)


def _markers(connection: Connection, namespace: str) -> dict[str, Marker]:
    query = select(kv.c.key, kv.c.val).where(kv.c.ns == namespace)
    return {key: _parse_marker(value) for key, value in connection.execute(query)}


def _write_marker(connection: Connection, namespace: str, key: str, marker: Marker) -> None:
    fields: dict[str, Any] = {"in_force": marker.in_force, "pending": sorted(marker.pending)}
    if marker.renamed:
        fields["renamed"] = {str(sequence): one for sequence, one in marker.renamed.items()}
    put_value(connection, namespace, key, orjson.dumps(fields))


def _parse_marker(value: bytes) -> Marker:
    fields = orjson.loads(value)
    notes = tuple((position, sequence) for position, sequence in fields["in_force"])
    renamed = {int(sequence): one for sequence, one in fields.get("renamed", {}).items()}
    return Marker(notes, frozenset(fields["pending"]), renamed)
