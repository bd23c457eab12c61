"""What is recorded of a pipeline's source: its server, its tables' definitions, gaps in its log.

Server: the namespace `failover/{pipeline}` has the value `identity:{source id}`, the server's
identity, and `{source id}/reconciliation`, the newest record of a change of servers; the log
`{source id}/history` holds all records. A record is the JSON object `{id, source_id,
previous_identity, new_identity, table_results: [{db, table, deltas}], reconciled_at}`, with the
comparison of the tables. It is committed together with the new identity.

Definitions, for sources whose log does not contain them: a source stores one text per table, in a
format of its own. The namespace of a pipeline is `definitions/{pipeline}` and the key is the
table's name. The value is the JSON array `[[position, text], ...]` in the order of the log; a null
text marks where the table was dropped. Definitions are stored before the changes to which they
apply. A run that starts at an earlier position therefore uses the definitions that applied there. A
definition is deleted once neither a run nor a repeated read of the journal can start at a position
to which it applies.

Gaps: each check of a source returns the tables that the log has now, and an identity of each. A log
that contains statements also says which tables were dropped and created. A table has a *gap* if the
log did not have it for a while or got it only later, or if the table was dropped and created again.
The gap lasts until the table's rows were read again (`SnapshotRepository`) or a user acknowledges
it. What is known of a pipeline's tables is one value of the key-value table (`primitives.Kv`),
written only if something has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.primitives import append_to_log, get_value, put_value
from deltaforge_dagster.state.database.tables import known_pipeline, kv, segments
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.tables import LoggedTable, TableFate

_TABLES = "tables"

GapCause = Literal["new", "away", "remade"]
"""Why there is a gap.

`new`: the log has the table only since `until`. `away`: the log did not have it from `since` to
`until`. `remade`: the table was dropped in between, and another one has its name.
"""


_Notes = list[tuple[str, str | None]]


_IDENTITY = "identity:"


class FailoverWrites:
    """Records the server that a lease holder reads: `FencedWriter.failovers`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def server(self, source_id: str) -> str | None:
        """Return the identity of the server from which the source was last read, or None."""
        identity = get_value(
            self._connection, _failover_namespace(self._pipeline), _identity_key(source_id)
        )
        return None if identity is None else identity.decode()

    def set_server(self, source_id: str, identity: str) -> None:
        """Store the identity of the server from which the source is read."""
        put_value(
            self._connection,
            _failover_namespace(self._pipeline),
            _identity_key(source_id),
            identity.encode(),
        )

    def reconciled(
        self,
        source_id: str,
        *,
        previous: str,
        identity: str,
        position: str,
        deltas: Mapping[tuple[str, str], Sequence[str]],
    ) -> None:
        """Record that the source is now another server, and store that server's identity.

        Args:
            source_id: `source.config.id`.
            previous: Identity of the previous server.
            identity: Identity of the new server.
            position: Position at which reading resumes, JSON text.
            deltas: Differences by (db, full table name), including tables without differences.
        """
        named = f"{source_id}\n{previous}\n{identity}\n{position}"
        record = {
            "id": hashlib.sha256(named.encode()).hexdigest()[:32],
            "source_id": source_id,
            "previous_identity": previous,
            "new_identity": identity,
            "table_results": [
                {"db": db, "table": table, "deltas": list(differences)}
                for (db, table), differences in deltas.items()
            ],
            "reconciled_at": self._connection.execute(select(clock())).scalar_one(),
        }
        text = orjson.dumps(record)
        append_to_log(
            self._connection, _failover_namespace(self._pipeline), f"{source_id}/history", text
        )
        put_value(
            self._connection,
            _failover_namespace(self._pipeline),
            f"{source_id}/reconciliation",
            text,
        )
        self.set_server(source_id, identity)


class DefinitionRepository:
    """The table definitions of all pipelines: `StateStore.definitions`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def at(self, name: str, position: Position) -> dict[str, str]:
        """Return the definitions at `position`, by table, in the format of the source."""
        query = select(kv.c.key, kv.c.val).where(kv.c.ns == _definition_namespace(name))
        definitions = {}
        with self._database.read() as connection:
            for table, value in connection.execute(query):
                text = _definition_at(orjson.loads(value), position)
                if text is not None:
                    definitions[table] = text
        return definitions


class DefinitionWrites:
    """Stores the table definitions that a lease holder reads: `FencedWriter.definitions`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def define(self, definitions: Mapping[str, str | None], position: str) -> None:
        """Store the definitions of tables from `position` (JSON text) on; None for a dropped table.

        Existing definitions of the same tables at this position or later are replaced, because the
        log is being read again from an earlier position.
        """
        at: Position = parse_position(position)
        row = known_pipeline(self._connection, self._pipeline)
        began = _oldest(self._connection, row)
        oldest: Position = at if began is None else parse_position(began)
        for table, text in definitions.items():
            notes = [
                note
                for note in _notes(self._connection, self._pipeline, table)
                if _position(note) < at
            ]
            passed = [note for note in notes if _position(note) <= oldest]
            _write_notes(
                self._connection,
                self._pipeline,
                table,
                [*notes[max(len(passed) - 1, 0) :], (position, text)],
            )


@dataclass(frozen=True, slots=True)
class Gap:
    """A part of a table's changes that the log does not have.

    Attributes:
        table: Full name of the table.
        cause: See `GapCause`.
        since: The log had the table up to then at least; None if it never had.
        until: The log has the table from then on, at the latest.
        whole: Whether the log has every row of the current table, so that it only lacks the end of
            the former table of this name.
    """

    table: str
    cause: GapCause
    since: float | None
    until: float
    whole: bool


class GapRepository:
    """The gaps of all pipelines: `StateStore.gaps`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str) -> list[Gap]:
        """Return the gaps of a pipeline, by table."""
        with self._database.read() as connection:
            stored = _read_tables(connection, name)
        return [] if stored is None else [stored.gaps[table] for table in sorted(stored.gaps)]

    def note(self, name: str, tables: Mapping[str, LoggedTable], checked_at: float | None) -> None:
        """Record which tables the log has now, and the gaps that follow from it.

        Args:
            name: The pipeline.
            tables: The tables by their full names.
            checked_at: When that was last recorded.
        """
        with self._database.read() as connection:
            if _noted(_read_tables(connection, name), tables, checked_at, 0.0) is None:
                return
        with self._database.write() as connection:
            now = connection.execute(select(clock())).scalar_one()
            noted = _noted(_read_tables(connection, name), tables, checked_at, now)
            if noted is not None:
                _write_tables(connection, name, noted)

    def note_fates(self, name: str, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what the log says of tables, in order.

        A table that is created after another one of its name was dropped has a gap.

        Args:
            name: The pipeline.
            fates: Full name of each table, and what became of it.
        """
        with self._database.write() as connection:
            now = connection.execute(select(clock())).scalar_one()
            stored = _read_tables(connection, name) or _KnownTables()
            if not any(fate == "dropped" or table in stored.dropped for table, fate in fates):
                return
            for table, fate in fates:
                since = stored.dropped.pop(table, None)
                if fate == "dropped":
                    stored.dropped[table] = now
                elif fate == "made" and since is not None:
                    before = stored.gaps.get(table)
                    whole = before is None or before.whole
                    stored.gaps[table] = Gap(
                        table, "remade", since if before is None else before.since, now, whole
                    )
            _write_tables(connection, name, stored)

    def acknowledge(self, name: str, tables: Collection[str] = ()) -> list[str]:
        """Forget the gaps of these tables, by default of all; return the tables that had any."""
        with self._database.write() as connection:
            stored = _read_tables(connection, name)
            if stored is None:
                return []
            acknowledged = sorted(table for table in stored.gaps if not tables or table in tables)
            for table in acknowledged:
                del stored.gaps[table]
            _write_tables(connection, name, stored)
            return acknowledged


def forget_server(connection: Connection, pipeline: str) -> None:
    """Forget the server of each source, so that any server may be read next."""
    connection.execute(
        delete(kv).where(kv.c.ns == _failover_namespace(pipeline), kv.c.key.startswith(_IDENTITY))
    )


def forget_definitions(connection: Connection, pipeline: str) -> None:
    """Delete all definitions: the pipeline starts elsewhere, where they may no longer apply."""
    connection.execute(delete(kv).where(kv.c.ns == _definition_namespace(pipeline)))


def forget_gaps(connection: Connection, pipeline: str) -> None:
    """Forget what is known of a pipeline's tables, because its sinks get all rows again."""
    connection.execute(delete(kv).where(kv.c.ns == _gap_namespace(pipeline)))


def _identity_key(source_id: str) -> str:
    return f"{_IDENTITY}{source_id}"


def _failover_namespace(pipeline: str) -> str:
    return f"failover/{pipeline}"


def _oldest(connection: Connection, row: PipelineRow) -> str | None:
    """Return the earliest position from which the log may be read again; None if none is known."""
    first = (
        select(segments.c.start_position)
        .where(segments.c.pipeline == row.name)
        .order_by(segments.c.segment)
        .limit(1)
    )
    journal = connection.execute(first).scalar()
    run = row.confirmed_position or row.start_position
    positions = [position for position in (journal, run) if position is not None]
    return min(positions, key=parse_position, default=None)


def _definition_at(notes: Iterable[tuple[str, str | None]], position: Position) -> str | None:
    text = None
    for noted, definition in notes:
        at: Position = parse_position(noted)
        if at <= position:
            text = definition
    return text


def _position(note: tuple[str, str | None]) -> Position:
    return parse_position(note[0])


def _notes(connection: Connection, pipeline: str, table: str) -> _Notes:
    query = select(kv.c.val).where(kv.c.ns == _definition_namespace(pipeline), kv.c.key == table)
    value = connection.execute(query).scalar()
    return [] if value is None else [(noted, text) for noted, text in orjson.loads(value)]


def _write_notes(connection: Connection, pipeline: str, table: str, notes: _Notes) -> None:
    if all(text is None for _, text in notes):
        connection.execute(
            delete(kv).where(kv.c.ns == _definition_namespace(pipeline), kv.c.key == table)
        )
        return
    fields = {"val": orjson.dumps(notes), "updated_at": clock(), "expires_at": None}
    connection.execute(
        upsert(connection, kv)
        .values(ns=_definition_namespace(pipeline), key=table, **fields)
        .on_conflict_do_update(index_elements=["ns", "key"], set_=fields)
    )


def _definition_namespace(pipeline: str) -> str:
    return f"definitions/{pipeline}"


@dataclass(slots=True)
class _KnownTables:
    """What is stored of a pipeline's tables.

    Attributes:
        identities: By name, the identities that each table has had, oldest first.
        away: By name, since when the log does not have a table.
        dropped: By name, when a run read that a table was dropped; only for logs that contain
            statements.
        gaps: By name of the table.
    """

    identities: dict[str, list[str]] = field(default_factory=dict)
    away: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, Gap] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)


def _noted(
    stored: _KnownTables | None,
    tables: Mapping[str, LoggedTable],
    checked_at: float | None,
    now: float,
) -> _KnownTables | None:
    """Return what is known after a check of the source; None if nothing has changed."""
    if stored is None:
        return _KnownTables({name: [table.identity] for name, table in tables.items()})
    changed = False
    for name in stored.identities.keys() - tables.keys() - stored.away.keys():
        stored.away[name] = now if checked_at is None else checked_at
        changed = True
    for name, table in tables.items():
        identities = stored.identities.setdefault(name, [])
        away = stored.away.pop(name, None)
        if table.identity in identities and away is None:
            continue
        changed = True
        cause: GapCause = (
            "new" if not identities else "away" if table.identity in identities else "remade"
        )
        if table.identity not in identities:
            identities.append(table.identity)
        if cause == "new" and (table.whole or table.empty):
            continue
        since = None if cause == "new" else away if away is not None else checked_at
        gap = Gap(name, cause, since, now, whole=table.whole and cause == "remade")
        before = stored.gaps.get(name)
        if before is not None:
            # A sink that lacks the earlier gap lacks both, so they become one with the worse cause.
            causes = {before.cause, cause}
            worst: GapCause = "remade" if "remade" in causes else cause
            gap = replace(gap, cause=worst, since=before.since, whole=gap.whole and before.whole)
        stored.gaps[name] = gap
    return stored if changed else None


def _read_tables(connection: Connection, pipeline: str) -> _KnownTables | None:
    value = get_value(connection, _gap_namespace(pipeline), _TABLES)
    if value is None:
        return None
    fields = orjson.loads(value)
    gaps = {name: Gap(**gap) for name, gap in fields["gaps"].items()}
    return _KnownTables(fields["identities"], fields["away"], gaps, fields.get("dropped", {}))


def _write_tables(connection: Connection, pipeline: str, stored: _KnownTables) -> None:
    gaps = {name: asdict(gap) for name, gap in stored.gaps.items()}
    value = {
        "identities": stored.identities,
        "away": stored.away,
        "gaps": gaps,
        "dropped": stored.dropped,
    }
    put_value(connection, _gap_namespace(pipeline), _TABLES, orjson.dumps(value))


def _gap_namespace(pipeline: str) -> str:
    return f"gaps/{pipeline}"
