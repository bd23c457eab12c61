"""Snapshots of Turso's and SQLite's tables: chunks by primary key, each read in one session.

A session sees rows and changes as of the same moment, so a read sees exactly the changes up to the
newest one that the session sees (`read_view.TursoReadView`).

The bounds of chunks are keys, as JSON values (a BLOB is `{"_base64":"..."}`). In SQLite, keys other
than an INTEGER PRIMARY KEY may contain NULL: such rows belong to the first chunk. A table without a
key is one chunk.
"""

# ruff: noqa: S608 - names in statements are quoted, values are parameters

from __future__ import annotations

import base64
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from deltaforge_dagster.errors import Retryable, SourceMisconfigured
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding, finding_errors
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.rows.snapshot import SnapshotRows
from deltaforge_dagster.sources.snapshot import MAX_CHUNKS, Chunk, ChunkRead
from deltaforge_dagster.sources.turso.config import TursoSourceConfig
from deltaforge_dagster.sources.turso.connection.sessions import TursoSession, Value, identifier
from deltaforge_dagster.sources.turso.decode.values import image, json_value, key_of
from deltaforge_dagster.sources.turso.modes.mode import Way, Ways
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.read_view import TursoReadView
from deltaforge_dagster.sources.turso.schema.definitions import DB, Definition, captured

_QUESTION_SECONDS = 30.0
_BATCH_ROWS = 5_000


class TursoSnapshots:
    """Snapshots of one database's tables; implements `sources.snapshot.base.Snapshots`.

    Args:
        config: `spec.source.config`.
        rules: The column rules.
    """

    def __init__(self, config: TursoSourceConfig, rules: ColumnRules) -> None:
        self._config = config
        self._rules = rules

    def watermark(self) -> str:
        """Return the newest position as watermark: every later read sees everything up to it."""
        with self._opened() as ways:
            way = ways.chosen(_QUESTION_SECONDS)
            with way.database.session(_QUESTION_SECONDS) as session:
                return way.log.newest(session).to_json()

    def plan(
        self, tables: Sequence[str] | None, chunk_rows: int, where: str | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks of captured tables, table after table; see `Snapshots.plan`.

        Raises:
            SourceMisconfigured: There is no such table, or `where` is not a valid condition.
        """
        with self._opened() as ways:
            way = ways.chosen(_QUESTION_SECONDS)
            for table in _tables(ways, way, tables):
                yield from self._planned(way, table, chunk_rows, where)

    def _planned(
        self, way: Way, table: Definition, chunk_rows: int, where: str | None
    ) -> list[Chunk]:
        """Return a table's chunks; a generator's session would keep the file locked in between."""
        with way.database.session(_QUESTION_SECONDS) as session:
            return list(self._chunks(session, table, chunk_rows, where))

    @contextmanager
    def reader(self) -> Generator[TursoReader]:
        """Provide a reader of chunks, which keeps nothing open between chunks."""
        with self._opened() as ways:
            yield TursoReader(ways, self._config.id, self._rules)

    def preflight(
        self,
        tables: Sequence[str] | None,
        parallel: int,  # noqa: ARG002 - changes are kept by confirmation
    ) -> list[Finding]:
        """Check that the tables exist, and that changes can be read."""
        findings: list[Finding] = []
        with self._opened() as ways:
            way = ways.chosen(_QUESTION_SECONDS)
            with finding_errors("tables", findings):
                _tables(ways, way, tables)
            with (
                finding_errors("changes", findings),
                way.database.session(_QUESTION_SECONDS) as session,
            ):
                way.log.newest(session)
        return findings or [Finding("changes", "ok", f"mode {way.mode} keeps what was not read")]

    def guard(self, start: Position) -> list[Finding]:
        """Check that all changes after `start` still exist; see `Snapshots.guard`."""
        assert isinstance(start, TursoPosition)
        findings: list[Finding] = []
        with self._opened() as ways:
            way = ways.of(start.mode)
            with (
                suppress(Retryable),
                finding_errors("changes", findings),
                way.database.session(_QUESTION_SECONDS) as session,
            ):
                way.log.check(session, start)
        return findings

    @contextmanager
    def _opened(self) -> Generator[Ways]:
        ways = Ways(self._config)
        try:
            yield ways
        finally:
            ways.close()

    @staticmethod
    def _chunks(
        session: TursoSession, table: Definition, chunk_rows: int, where: str | None
    ) -> Iterator[Chunk]:
        name, quoted = table.table.full_name, identifier(table.name)
        condition = f" AND ({where})" if where is not None else ""
        session.query(f"SELECT 1 FROM {quoted} WHERE TRUE{condition} LIMIT 0")
        ((rows,),) = session.query(f"SELECT count(*) FROM {quoted}")
        assert isinstance(rows, int)
        key = table.table.primary_key
        if not key:
            yield Chunk(name, 1, "whole", where=where, rows=rows)
            return
        step = max(chunk_rows, rows // MAX_CHUNKS)
        columns = ", ".join(map(identifier, key))
        number, after = 1, None
        while True:
            bounds, parameters = _bounds(table, after, None)
            boundary = session.query(
                f"SELECT {columns} FROM {quoted} WHERE {bounds} AND {_whole_key(key)}"
                f" ORDER BY {columns} LIMIT 1 OFFSET ?",
                (*parameters, step - 1),
            )
            if not boundary:
                yield Chunk(name, number, "key", after, None, where, step)
                return
            upto = orjson.dumps([json_value(value) for value in boundary[0]]).decode()
            yield Chunk(name, number, "key", after, upto, where, step)
            number, after = number + 1, upto


def _tables(ways: Ways, way: Way, names: Sequence[str] | None) -> list[Definition]:
    """Return the captured tables, or those of these names.

    Raises:
        SourceMisconfigured: A table is not captured.
    """
    with way.database.session(_QUESTION_SECONDS) as session:
        definitions = captured(session, ways.captures)
    by_name = {definition.table.full_name: definition for definition in definitions.values()}
    if names is None:
        return list(by_name.values())
    absent = [name for name in names if name not in by_name]
    if absent:
        raise SourceMisconfigured(
            f"{ways.where}: not captured: {', '.join(absent)}; a table must match"
            " source.config.tables"
        )
    return [by_name[name] for name in names]


@dataclass(frozen=True, slots=True)
class TursoReader:
    """Reads chunks, one after another.

    Attributes:
        ways: The modes of the database.
        source_id: `id` of the source.
        rules: The column rules.
    """

    ways: Ways
    source_id: str
    rules: ColumnRules

    def read(self, chunk: Chunk, watermark: str) -> ChunkRead:
        """Read a chunk; see `sources.snapshot.base.ChunkReader`.

        All rows are read before this returns, so that the database is unlocked while they are
        processed.
        """
        mark = parse_position(watermark)
        assert isinstance(mark, TursoPosition)
        way = self.ways.of(mark.mode)
        name = chunk.table.removeprefix(f"{DB}.")
        with way.database.session(_QUESTION_SECONDS) as session:
            table = captured(session, self.ways.captures).get(name)
            if table is None:
                raise SourceMisconfigured(f"{self.ways.where}: there is no table {chunk.table}")
            position = way.log.newest(session)
            bounds, parameters = _bounds(table, chunk.after, chunk.upto)
            condition = f" AND ({chunk.where})" if chunk.where is not None else ""
            rows = session.query(
                f"SELECT {table.selected()} FROM {identifier(name)} WHERE {bounds}{condition}",
                parameters,
            )
        now_us = time.time_ns() // 1000
        read_view = TursoReadView(position)
        snapshot_rows = SnapshotRows(
            self.source_id, chunk, read_view, table=table.table, rules=self.rules, ts_us=now_us
        )
        return ChunkRead(
            snapshot_rows.table, read_view, position, _batches(snapshot_rows, table, rows)
        )


def _batches(
    snapshot_rows: SnapshotRows, table: Definition, rows: Sequence[Sequence[Value]]
) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(rows), _BATCH_ROWS):
        images: list[str] = []
        keys: list[str | None] = []
        for row in rows[first : first + _BATCH_ROWS]:
            shown = {name: json_value(value) for name, value in table.row(list(row)).items()}
            key = key_of(shown, table.table.primary_key)
            images.append(image(shown))
            keys.append(None if key is None else image(key))
        yield snapshot_rows.batch(pa.array(images, pa.string()), pa.array(keys, pa.string()))


def _bounds(
    table: Definition, after: str | None, upto: str | None
) -> tuple[str, tuple[Value, ...]]:
    """Return the SQL condition for rows after one key up to another, and its parameters."""
    key = table.table.primary_key
    conditions: list[str] = []
    parameters: list[Value] = []
    for text, operator in ((after, ">"), (upto, "<=")):
        if text is not None:
            condition, values = _comparison(key, operator, _values(text))
            conditions.append(condition)
            parameters += values
    if not conditions:
        return "TRUE", ()
    both = " AND ".join(conditions)
    if after is not None:
        return f"({both} AND {_whole_key(key)})", tuple(parameters)
    return f"(({both}) OR NOT {_whole_key(key)})", tuple(parameters)


def _comparison(
    key: Sequence[str], operator: str, values: Sequence[Value]
) -> tuple[str, list[Value]]:
    """Return the SQL condition that compares a key with values, in a form that can use an index."""
    first, *rest = key
    if not rest:
        return f"{identifier(first)} {operator} ?", [values[0]]
    condition, parameters = _comparison(rest, operator, values[1:])
    loose, strict = f"{operator[0]}=", operator[0]
    name = identifier(first)
    return (
        f"({name} {loose} ? AND ({name} {strict} ? OR {condition}))",
        [values[0], values[0], *parameters],
    )


def _whole_key(key: Sequence[str]) -> str:
    """Return the SQL condition that no column of a key is NULL."""
    return "(" + " AND ".join(f"{identifier(name)} IS NOT NULL" for name in key) + ")"


def _values(text: str) -> list[Value]:
    return [_value(bound) for bound in orjson.loads(text)]


def _value(bound: Any) -> Value:
    match bound:
        case {"_base64": str(data)}:
            return base64.b64decode(data)
        case "Infinity":
            return float("inf")
        case "-Infinity":
            return float("-inf")
        case _:
            value: Value = bound
            return value
