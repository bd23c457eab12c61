"""What tables look like and from which position on, where the source's log does not say it itself.

A source that needs more than its log keeps its notes here, one text per table, in words of its own.
One namespace per pipeline: `definitions/{pipeline}`, the table's name as key; a value is the JSON
array `[[position, text], ...]` in the log's order, the text null from where the table was gone.
Notes are written ahead of the changes that they are for. So a run that begins again before some
of them takes what held at its position; only what nobody can begin at any more, no run and
no second look at a range of the journal, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.positions import Position, parse_position
from deltaforge_dagster.state.database import clock, upsert
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.rows import known_pipeline
from deltaforge_dagster.state.tables import kv, segments

_Notes = list[tuple[str, str | None]]


def define(
    connection: Connection, pipeline: str, definitions: Mapping[str, str | None], position: str
) -> None:
    """Note what tables look like from `position` (JSON text) on; None where a table is gone.

    Earlier notes of the same table for this position or later ones are replaced: the log is being
    read again from before it.
    """
    at: Position = parse_position(position)
    row = known_pipeline(connection, pipeline)
    began = _oldest(connection, row)
    oldest: Position = at if began is None else parse_position(began)
    for table, text in definitions.items():
        notes = [one for one in _notes(connection, pipeline, table) if _position(one) < at]
        passed = [one for one in notes if _position(one) <= oldest]
        _write(connection, pipeline, table, [*notes[max(len(passed) - 1, 0) :], (position, text)])


def defined(connection: Connection, pipeline: str, position: Position) -> dict[str, str]:
    """Return what tables looked like at `position`, as far as it was noted."""
    query = select(kv.c.key, kv.c.val).where(kv.c.ns == _namespace(pipeline))
    found = {}
    for table, value in connection.execute(query):
        text = _held_at(orjson.loads(value), position)
        if text is not None:
            found[table] = text
    return found


def forget(connection: Connection, pipeline: str) -> None:
    """Drop every note: the pipeline begins elsewhere, and nobody knows what became of tables."""
    connection.execute(delete(kv).where(kv.c.ns == _namespace(pipeline)))


def _oldest(connection: Connection, row: PipelineRow) -> str | None:
    """Return the first position that anybody may read the log from again."""
    first = (
        select(segments.c.start_position)
        .where(segments.c.pipeline == row.name)
        .order_by(segments.c.segment)
        .limit(1)
    )
    journal = connection.execute(first).scalar()
    run = row.confirmed_position or row.start_position
    known = [one for one in (journal, run) if one is not None]
    return min(known, key=parse_position, default=None)


def _held_at(notes: Iterable[tuple[str, str | None]], position: Position) -> str | None:
    text = None
    for noted, one in notes:
        at: Position = parse_position(noted)
        if at <= position:
            text = one
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
