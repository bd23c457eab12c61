"""The registry of table versions: with which schema rows were decoded, and from which position on.

Each pipeline has a log with the namespace `schemas/{pipeline}` and the keys
`{tenant}/{db}/{schema.table}`. An entry is the JSON object `{hash, version, sequence, schema,
registered_at, checkpoint, columns}`; `version` counts from 1 per table, `sequence` from 1 over all
tables of the pipeline, and `checkpoint` is the position at which the version was first seen.
`columns` says which column each name stands for (`state.identities`). Entries never change, so
stamps remain valid across restarts. A table that returns to an earlier form, with the same columns,
gets the stamp of that form again.

A marker of a table is a value in the key-value namespace of the same name, under the table's key:
the JSON object `{in_force: [[position, sequence], ...], pending: [sequence, ...], altered:
[[position, changes], ...]}`. `in_force` lists the positions of the source's log from which each
version applies, so that the version at a position is also known for a table that returned to an
earlier form; `pending` are the versions that wait for approval; `altered` is what statements in the
log have done to the columns (`ColumnChanges`; left out if empty). A marker of an earlier version of
this software may have `renamed: {sequence: {name: former name}}` instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
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
from deltaforge_dagster.state.identities import KnownColumns, VersionColumns, known_columns
from deltaforge_dagster.tables import Column, ColumnChanges, SchemaStamp, TableSchema

_SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A registered version of a table.

    Attributes:
        table: The table with its columns and key.
        stamp: Fingerprint, version and sequence.
        registered_at: When it was registered, by the store's clock.
        position: Position at which it was first seen, JSON text; it applies from there on.
        columns: Which columns its names stand for.
    """

    table: TableSchema
    stamp: SchemaStamp
    registered_at: float
    position: str
    columns: VersionColumns


@dataclass(frozen=True, slots=True)
class TableHistory:
    """All versions of one table.

    Attributes:
        versions: Its versions, oldest first.
        in_force: Pairs of a position (JSON text) and the sequence of the version that is in force
            from there on, in the order of the log.
        pending: Sequences of the versions that wait for approval.
    """

    versions: tuple[SchemaVersion, ...]
    in_force: tuple[tuple[str, int], ...]
    pending: frozenset[int]

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
        return next((version for version in self.versions if version.stamp.version == number), None)

    def at_sequence(self, sequence: int) -> SchemaVersion | None:
        """Return the newest version with a sequence of at most `sequence`, or None."""
        return max(
            (version for version in self.versions if version.stamp.sequence <= sequence),
            key=lambda version: version.stamp.sequence,
            default=None,
        )

    def at_position(self, position: Position) -> SchemaVersion | None:
        """Return the version in force at a position of the log, or None before the first one."""
        sequence = None
        for begin, candidate in self.in_force:
            begins: Position = parse_position(begin)
            if begins <= position:
                sequence = candidate
        return next(
            (version for version in self.versions if version.stamp.sequence == sequence), None
        )

    def names_now(self, identities: Collection[str]) -> list[str]:
        """Return the current names of the columns with these identities; without dropped ones."""
        passed = {sequence for _, sequence in self.in_force}
        # A version that came into force before can do so again. Of one that never did, a snapshot
        # has read rows.
        version = self.current if self.newest.stamp.sequence in passed else self.newest
        current = version.columns.identities
        return [name for name, identity in current.items() if identity in identities]

    def until(self, version: SchemaVersion) -> Sequence[SchemaVersion]:
        """Return all versions that the table has had until `version` was last in force."""
        passed = [sequence for _, sequence in self.in_force]
        own = version.stamp.sequence
        if own in passed:
            passed = passed[: len(passed) - passed[::-1].index(own)]
        return [
            candidate
            for candidate in self.versions
            if candidate.stamp.sequence <= own or candidate.stamp.sequence in passed
        ]

    def passed(self, version: SchemaVersion) -> Sequence[SchemaVersion]:
        """Return the versions of `until` in the order in which they came into force.

        A version that came into force several times is repeated; `version` is last.
        """
        return [passed for _, passed in self.passage(version)]

    def passage(self, version: SchemaVersion) -> Sequence[tuple[str | None, SchemaVersion]]:
        """Return the versions of `passed`, each with the position at which it came into force.

        The position is JSON text; None if only a snapshot has read rows of the version.
        """
        by_sequence = {candidate.stamp.sequence: candidate for candidate in self.until(version)}
        own = version.stamp.sequence
        order: list[tuple[str | None, int]] = [
            (begin, sequence) for begin, sequence in self.in_force if sequence in by_sequence
        ]
        sequences = [sequence for _, sequence in order]
        if own in sequences:
            order = order[: len(order) - sequences[::-1].index(own)]
        else:
            order = [*(pair for pair in order if pair[1] < own), (None, own)]
        in_order = {sequence for _, sequence in order}
        return [
            *(
                (None, candidate)
                for sequence, candidate in by_sequence.items()
                if sequence not in in_order
            ),
            *((begin, by_sequence[sequence]) for begin, sequence in order),
        ]

    def before(self, version: SchemaVersion) -> SchemaVersion | None:
        """Return the version before `version`, or None for the first one."""
        return self.version(version.stamp.version - 1)


@dataclass(frozen=True, slots=True)
class Marker:
    """What is stored about a table besides its versions; see the module's docstring.

    Attributes:
        in_force: Position (JSON text) and sequence of each version that came into force, in log
            order.
        pending: Sequences of the versions that wait for approval.
        altered: Position (JSON text) and `ColumnChanges` (JSON text) of each statement that altered
            columns.
        renamed: By sequence, the former name of each renamed column, as earlier releases stored it.
    """

    in_force: tuple[tuple[str, int], ...] = ()
    pending: frozenset[int] = frozenset()
    altered: tuple[tuple[str, str], ...] = ()
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def reached(self, position: str, sequence: int) -> Marker:
        """Return the marker with a version in force from a position (JSON text) on.

        Entries for later positions are dropped, because the log is being read again from an earlier
        one. Adding the same entry again, after a run died, has no other effect.
        """
        at: Position = parse_position(position)
        notes = [note for note in self.in_force if not at < parse_position(note[0])]
        again = (position, sequence)
        if again in notes:
            del notes[notes.index(again) + 1 :]
        elif not notes or notes[-1][1] != sequence:
            notes.append(again)
        return replace(self, in_force=tuple(notes))

    def with_altered(self, position: str, changes: ColumnChanges) -> Marker:
        """Return the marker with what a statement at a position has done to the columns.

        Statements at this position or later are dropped, because the log is being read again.
        """
        at: Position = parse_position(position)
        kept = [alteration for alteration in self.altered if parse_position(alteration[0]) < at]
        return replace(self, altered=(*kept, (position, changes.to_json())))

    def changes_until(self, position: str) -> ColumnChanges:
        """Return the column changes between the start of the version in force and a position."""
        until: Position = parse_position(position)
        begins = [parse_position(begin) for begin, _ in self.in_force]
        changes = ColumnChanges()
        for altered_at, text in self.altered:
            at = parse_position(altered_at)
            if at <= until and not any(at <= begin <= until for begin in begins):
                changes = changes.then(ColumnChanges.from_json(text))
        return changes

    def in_force_until(self, position: str) -> list[int]:
        """Return, in order, the sequences of the versions that came into force up to a position."""
        until: Position = parse_position(position)
        return [sequence for begin, sequence in self.in_force if parse_position(begin) <= until]

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

    def stamp(
        self, name: str, tenant: str, table: TableSchema, position: Position
    ) -> SchemaStamp | None:
        """Return the stamp of a table version at a position, or None if it was never registered."""
        namespace, key = registry(name), table_key(tenant, table)
        with self._database.read() as connection:
            history = _history(connection, namespace, key)
        if history is None:
            return None
        in_force = history.at_position(position)
        same = [version for version in history.versions if version.table == table]
        return in_force.stamp if in_force in same else same[0].stamp if same else None

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
        """Return the versions not yet published in Dagster, by sequence, with histories."""
        with self._database.read() as connection:
            shown = int(get_value(connection, _shown(name), _SEQUENCE) or b"0")
            last = last_log_entry(connection, registry(name))
            if last is None or _sequence(last) <= shown:
                return []
            unpublished = [
                (history, version)
                for history in _histories(connection, name)
                for version in history.versions
                if version.stamp.sequence > shown
            ]
            return sorted(unpublished, key=lambda pair: pair[1].stamp.sequence)

    def mark_published(self, name: str, version: SchemaVersion) -> None:
        """Record that a version, and every one before it, is published in Dagster."""
        sequence = str(version.stamp.sequence).encode()
        with self._database.write() as connection:
            put_value(connection, _shown(name), _SEQUENCE, sequence)


class SchemaWrites:
    """Registers the table versions that a lease holder reads: `FencedWriter.schemas`."""

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
            streamed: Whether rows of the log have this version from there on. False for a snapshot,
                whose rows may be older than the log that has been read.
            pause: Whether a new version must wait for approval if the table already has others.
        """
        namespace, key = registry(self._pipeline), table_key(tenant, table)
        history = _history(self._connection, namespace, key)
        versions = () if history is None else history.versions
        marker = _marker(self._connection, namespace, key) or _first_marker(versions)
        columns, had = self._columns(table, versions, marker, position_json)
        same = [version for version in versions if version.table == table]
        stamp = next((version.stamp for version in same if columns.are(version.columns, had)), None)
        is_new = stamp is None
        if stamp is None:
            last = last_log_entry(self._connection, namespace)
            sequence = 1 if last is None else _sequence(last) + 1
            registered = columns.registered(table, sequence)
            # Versions that look alike but stand for other columns need different fingerprints.
            salt = registered.identities if same else None
            stamp = SchemaStamp(fingerprint(table, salt), len(versions) + 1, sequence)
            record = _entry(table, stamp, position_json) | {
                "registered_at": self._connection.execute(select(clock())).scalar_one(),
                "columns": registered.to_fields(),
            }
            append_to_log(self._connection, namespace, key, orjson.dumps(record))
        changed = marker
        if streamed or not marker.in_force:
            changed = changed.reached(position_json, stamp.sequence)
        if pause and is_new and versions:
            changed = changed.waiting_for(stamp.sequence)
        if changed != marker or is_new:
            _write_marker(self._connection, namespace, key, changed)
        return stamp

    def alter(
        self, tenant: str, table: TableSchema, changes: ColumnChanges, position_json: str
    ) -> None:
        """Record what a statement in the log does to the columns of a table.

        The version that is registered next gets its columns by this.

        Args:
            tenant: The pipeline's tenant.
            table: The table; only its name matters. If no version of it is known, nothing is
                recorded.
            changes: What the statement does.
            position_json: Position of the statement, JSON text.
        """
        namespace, key = registry(self._pipeline), table_key(tenant, table)
        history = _history(self._connection, namespace, key)
        if history is None:
            return
        marker = _marker(self._connection, namespace, key) or _first_marker(history.versions)
        _write_marker(self._connection, namespace, key, marker.with_altered(position_json, changes))

    @staticmethod
    def _columns(
        table: TableSchema, versions: Sequence[SchemaVersion], marker: Marker, position: str
    ) -> tuple[KnownColumns, Collection[str]]:
        """Return what is known of a version's columns, and all identities that the table has had.

        Both are as of a position of the log, JSON text.
        """
        by_sequence = {version.stamp.sequence: version.columns for version in versions}
        passed = [
            by_sequence[sequence]
            for sequence in marker.in_force_until(position)
            if sequence in by_sequence
        ]
        before = passed[-1] if passed else versions[0].columns if versions else None
        changes = marker.changes_until(position)
        had = {identity for columns in passed for identity in columns.identities.values()}
        return known_columns(table, before, by_sequence.values(), changes), had


def fingerprint(table: TableSchema, identities: Mapping[str, str] | None = None) -> str:
    """Return `sha256:` and the hexadecimal SHA-256 of the table's columns and primary key.

    The hash is computed over the compact JSON object `{"columns": [{name, data_type, type_oid,
    nullable, ordinal_position}, ...], "primary_key": [...]}` with this order of fields, without
    `type_oid` if the source has none. The names of database, schema and table are not included.

    Args:
        table: The version.
        identities: Identities of its columns, by name, if it looks like an earlier version that had
            other columns; they are then hashed as well, as a JSON object.
    """
    salt = b"" if identities is None else orjson.dumps(identities)
    return "sha256:" + hashlib.sha256(_definition(table) + salt).hexdigest()


def registry(pipeline: str) -> str:
    """Return the log namespace that holds the table versions of `pipeline`."""
    return f"schemas/{pipeline}"


def table_key(tenant: str, table: TableSchema) -> str:
    """Return the log key of a table, which is unique.

    Characters are percent-encoded as in URLs, including `/`, `%` and, in the names of schema and
    table, `.` (`%2E`).
    """
    name = ".".join(
        _escaped(part).replace(".", "%2E") for part in (table.schema, table.table) if part
    )
    return f"{_escaped(tenant)}/{_escaped(table.db)}/{name}"


def approve(connection: Connection, pipeline: str, table: str) -> int:
    """Approve all pending versions of a table, given by full name; return how many there were."""
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


def _histories(connection: Connection, pipeline: str) -> list[TableHistory]:
    namespace = registry(pipeline)
    by_key: dict[str, list[LogEntry]] = {}
    for record in log_entries(connection, namespace):
        by_key.setdefault(record.key, []).append(record)
    kept = _markers(connection, namespace)
    return [_history_of(entries, kept.get(key)) for key, entries in by_key.items()]


def _history(connection: Connection, namespace: str, key: str) -> TableHistory | None:
    """Return the history of one table, None if it has none."""
    entries = list(log_entries(connection, namespace, key))
    return _history_of(entries, _marker(connection, namespace, key)) if entries else None


def _history_of(entries: Sequence[LogEntry], marker: Marker | None) -> TableHistory:
    versions = [_version(record) for record in entries]
    marker = marker or _first_marker(versions)
    return TableHistory(_identified(versions, marker), marker.in_force, marker.pending)


def _identified(versions: Sequence[SchemaVersion], marker: Marker) -> tuple[SchemaVersion, ...]:
    """Return versions with the columns of entries that earlier releases registered without columns.

    These columns are derived from names, and from the renames in the marker.
    """
    if all(version.columns.identities for version in versions):
        return tuple(versions)
    by_sequence = {version.stamp.sequence: version for version in versions}
    before: VersionColumns | None = None
    for sequence in (*(sequence for _, sequence in marker.in_force), *sorted(by_sequence)):
        version = by_sequence.get(sequence)
        if version is None:
            continue
        if not version.columns.identities:
            changes = ColumnChanges(renamed=marker.renamed.get(sequence, {}))
            columns = known_columns(version.table, before, (), changes)
            columns_now = columns.registered(version.table, sequence)
            version = by_sequence[sequence] = replace(version, columns=columns_now)
        before = version.columns
    return tuple(by_sequence[version.stamp.sequence] for version in versions)


def _shown(pipeline: str) -> str:
    """Return the namespace that holds the sequence up to which versions are published."""
    return f"schemas-shown/{pipeline}"


def _name_of(connection: Connection, namespace: str, key: str) -> str:
    return _version(log_entries(connection, namespace, key)[0]).table.full_name


def _first_marker(versions: Sequence[SchemaVersion]) -> Marker:
    """Return the marker of a table without a stored one: each version replaced the previous one."""
    marker = Marker()
    for version in versions:
        marker = marker.reached(version.position, version.stamp.sequence)
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


def _version(record: LogEntry) -> SchemaVersion:
    fields = orjson.loads(record.value)
    schema = fields["schema"]
    columns = tuple(
        Column(
            column["name"],
            column["data_type"],
            column.get("type_oid"),
            column["nullable"],
            column["ordinal_position"],
        )
        for column in schema["columns"]
    )
    return SchemaVersion(
        TableSchema(
            schema["db"], schema["schema"], schema["table"], columns, tuple(schema["primary_key"])
        ),
        SchemaStamp(fields["hash"], fields["version"], fields["sequence"]),
        fields["registered_at"],
        json.dumps(fields["checkpoint"]),
        VersionColumns.from_fields(fields.get("columns") or {"identities": {}}),
    )


def _sequence(record: LogEntry) -> int:
    return int(orjson.loads(record.value)["sequence"])


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
    if marker.altered:
        fields["altered"] = marker.altered
    if marker.renamed:
        fields["renamed"] = {str(sequence): names for sequence, names in marker.renamed.items()}
    put_value(connection, namespace, key, orjson.dumps(fields))


def _parse_marker(value: bytes) -> Marker:
    fields = orjson.loads(value)
    notes = tuple((position, sequence) for position, sequence in fields["in_force"])
    renamed = {int(sequence): names for sequence, names in fields.get("renamed", {}).items()}
    altered = tuple((position, changes) for position, changes in fields.get("altered", ()))
    return Marker(notes, frozenset(fields["pending"]), altered, renamed)
