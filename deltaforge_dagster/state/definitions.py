"""Table definitions by position, for sources whose log does not contain them.

A source stores one text per table, in a format of its own. The namespace of a pipeline is
`definitions/{pipeline}` and the key is the table's name. The value is the JSON array
`[[position, text], ...]` in the order of the log; a null text marks where the table was dropped.

Definitions are stored before the changes to which they apply. A run that starts at an earlier
position therefore uses the definitions that applied there. A definition is deleted once neither a
run nor a repeated read of the journal can start at a position to which it applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.tables import known_pipeline, kv, segments
from deltaforge_dagster.state.records import PipelineRow

_Notes = list[tuple[str, str | None]]


class DefinitionRepository:
    """The table definitions of all pipelines: `StateStore.definitions`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def at(self, name: str, position: Position) -> dict[str, str]:
        """Return the definitions at `position`, by table, in the format of the source."""
        query = select(kv.c.key, kv.c.val).where(kv.c.ns == _namespace(name))
        definitions = {}
        with self._database.read() as connection:
            for table, value in connection.execute(query):
                text = _held_at(orjson.loads(value), position)
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
            _write(
                self._connection,
                self._pipeline,
                table,
                [*notes[max(len(passed) - 1, 0) :], (position, text)],
            )


def forget(connection: Connection, pipeline: str) -> None:
    """Delete all definitions: the pipeline starts elsewhere, where they may no longer apply."""
    connection.execute(delete(kv).where(kv.c.ns == _namespace(pipeline)))


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


def _held_at(notes: Iterable[tuple[str, str | None]], position: Position) -> str | None:
    text = None
    for noted, definition in notes:
        at: Position = parse_position(noted)
        if at <= position:
            text = definition
    return text


def _position(note: tuple[str, str | None]) -> Position:
    return parse_position(note[0])


def _namespace(pipeline: str) -> str:
    return f"definitions/{pipeline}"


def _notes(connection: Connection, pipeline: str, table: str) -> _Notes:
    query = select(kv.c.val).where(kv.c.ns == _namespace(pipeline), kv.c.key == table)
    value = connection.execute(query).scalar()
    return [] if value is None else [(noted, text) for noted, text in orjson.loads(value)]


def _write(connection: Connection, pipeline: str, table: str, notes: _Notes) -> None:
    if all(text is None for _, text in notes):
        connection.execute(delete(kv).where(kv.c.ns == _namespace(pipeline), kv.c.key == table))
        return
    fields = {"val": orjson.dumps(notes), "updated_at": clock(), "expires_at": None}
    connection.execute(
        upsert(connection, kv)
        .values(ns=_namespace(pipeline), key=table, **fields)
        .on_conflict_do_update(index_elements=["ns", "key"], set_=fields)
    )
