"""A kind of source in a package of its own: it reads a growing file of JSON lines.

A line is a new row: `{"table": "orders", "ts_ms": 1767225600000, "row": {"id": 1, "v": "a"}}`.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.blocks import Text
from deltaforge_dagster.config.sources import OnSchemaDrift, SourceConfig
from deltaforge_dagster.errors import (
    CorruptLog,
    NotAllowed,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.tables import TablePatterns
from deltaforge_dagster.tables import Column, SchemaStamp, TableDetails, TableSchema

if TYPE_CHECKING:  # Dagster's code servers load this module, and do without Arrow
    import pyarrow as pa

    from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, SourceNotes


class JsonlSourceConfig(SourceConfig):
    """How to read the file."""

    path: Text
    """The file. Every line of it ends with a line feed."""
    key: tuple[Text, ...] = ("id",)
    """The columns of every table's primary key."""
    tables: tuple[Text, ...] = ()
    """Tables to capture; `[]` means every table. A name may end in `*`."""
    on_schema_drift: OnSchemaDrift = "adapt"
    """What to do when another file has taken the place of this one and its tables differ."""
    snapshot: None = None
    """There are no snapshots: the file has every row."""


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class JsonlPosition:
    """The end of a line: a number of bytes from the file's beginning."""

    end: int

    def to_json(self) -> str:
        """Return `{"jsonl": n}`."""
        return json.dumps({"jsonl": self.end})

    def __lt__(self, other: JsonlPosition) -> bool:
        return self.end < other.end


class JsonlSource:
    """A file, as `sources.base.Source` promises."""

    def __init__(self, config: JsonlSourceConfig) -> None:
        self._config = config
        self._path = Path(config.path)
        self._patterns = TablePatterns(config.tables, unqualified="main", system=())
        self._closed = threading.Event()

    def head(self) -> JsonlPosition:
        """Return the end of the last whole line."""
        content = self._content(0)
        return JsonlPosition(content.rfind(b"\n") + 1)

    def ensure_start(self, at: Position | None = None) -> JsonlPosition:
        """Return the end of the file, or `at` if the file has it."""
        if at is None:
            return self.head()
        self._content(_own(at).end)
        return _own(at)

    def reset(self, *, dry_run: bool) -> list[str]:  # noqa: ARG002
        """Return nothing: nothing is kept for the pipeline."""
        return []

    def definitions(self, start: Position) -> dict[str, str]:  # noqa: ARG002
        """Return nothing: every line names its columns."""
        return {}

    def has_changes(self, after: Position) -> bool:
        """Return whether lines of captured tables follow."""
        return any(self._captured(line) for _, line in self._lines(_own(after).end))

    def maintain(self, position: Position | None) -> list[Finding]:
        """Return no finding; raise an error if the file lacks what was captured."""
        self._content(0 if position is None else _own(position).end)
        return []

    def preflight(
        self,
        position: Position | None,
        as_of: float | None,  # noqa: ARG002
        *,
        snapshot: bool = False,  # noqa: ARG002
    ) -> list[Finding]:
        """Return whether the file can be read."""
        self.maintain(position)
        return [Finding("connection", "ok", f"{self._path} can be read")]

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield the lines after `start`; look for more until closed."""
        from deltaforge_dagster.sources.base import ChangeBatch  # noqa: PLC0415 - Arrow

        at, versions = _own(start).end, dict[TableSchema, SchemaStamp]()
        while not self._closed.is_set():
            found, begin = list[dict[str, Any]](), at
            for at, line in self._lines(begin):
                if self._captured(line):
                    found.append(self._change(line, at, versions, registry))
                if len(found) == limits.max_events or at - begin >= limits.max_bytes:
                    break
            yield ChangeBatch(
                _batch(found) if found else None,
                JsonlPosition(at) if at > begin else None,
                at - begin,
            )
            if at == begin:
                self._closed.wait(limits.max_wait)
        raise SourceUnavailable(f"{self._path}: the source was closed")

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Yield what `read` would: a file has any number of readers."""
        return self.read(start, limits, registry)

    def identity(self) -> str:
        """Return the path: nothing in a file says which one it is."""
        return str(self._path)

    def relocate(self, position: Position, previous: str) -> Position:  # noqa: ARG002
        """Return the same position, if the other file has it."""
        return self.ensure_start(position)

    def tables(self) -> list[str]:
        """Return the captured tables that have rows."""
        lines = (line for _, line in self._lines(0) if self._captured(line))
        return list(dict.fromkeys(f"main.{line['table']}" for line in lines))

    def database(self) -> None:
        """Return nothing: full names begin with `main`."""

    def details(self, table: str) -> TableDetails:  # noqa: ARG002
        """Return nothing: a file has no catalog."""
        return TableDetails({})

    def schema(self, table: str) -> TableSchema:
        """Return a table with the columns of its last row."""
        lines = [line for _, line in self._lines(0) if f"main.{line['table']}" == table]
        if not lines:
            raise SourceMisconfigured(f"{self._path}: there is no table {table}")
        return self._table(lines[-1])

    def decode_parked(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Refuse: nothing is ever held."""
        del events, fix, position, registry
        raise NotAllowed("a line that cannot be read stops the pipeline; correct the file")

    def confirm(self, position: Position) -> None:
        """Do nothing: the file keeps its lines."""

    def close(self) -> None:
        """End the reading."""
        self._closed.set()

    def _content(self, start: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < start:
                    raise PositionLost(
                        f"{self._path}: is shorter than captured. Re-snapshot required"
                    )
                file.seek(start)
                return file.read()
        except OSError as error:
            raise SourceUnavailable(f"{self._path}: {error.strerror}") from error

    def _lines(self, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each whole line, with the position of its end."""
        for text in self._content(start).splitlines(keepends=True):
            start += len(text)
            if text.endswith(b"\n"):
                try:
                    yield start, json.loads(text)
                except ValueError as error:
                    raise UnsupportedEvent(f"{self._path}: no JSON before byte {start}") from error

    def _captured(self, line: Mapping[str, Any]) -> bool:
        return self._patterns.matches("main", line["table"])

    def _table(self, line: Mapping[str, Any]) -> TableSchema:
        columns = tuple(Column(name, "", None, True, at) for at, name in enumerate(line["row"], 1))
        return TableSchema("main", None, line["table"], columns, self._config.key)

    def _change(
        self,
        line: Mapping[str, Any],
        end: int,
        versions: dict[TableSchema, SchemaStamp],
        registry: SourceNotes,
    ) -> dict[str, Any]:
        table, row = self._table(line), line["row"]
        if table not in versions:
            versions[table] = registry.register(table, JsonlPosition(end))
        return {
            "op": "c",
            "ts_us": line.get("ts_ms", 0) * 1000,
            "db": "main",
            "table": line["table"],
            "after": _json(row),
            "key": _json({name: row[name] for name in self._config.key}),
            "pos": end,
            "row": 0,
            "tx_end": True,
            "schema_version": versions[table].fingerprint,
            "schema_sequence": versions[table].sequence,
            "event_id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self._config.id}:{end}")),
            "raw_payload": False,
        }


def _batch(changes: list[dict[str, Any]]) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415

    from deltaforge_dagster.frame import CAPTURED  # noqa: PLC0415

    return pa.RecordBatch.from_pylist(changes, CAPTURED)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _own(position: Position) -> JsonlPosition:
    if not isinstance(position, JsonlPosition):
        raise CorruptLog(f"not a position in a file: {position.to_json()}")
    return position


class JsonlSourceType(SourceType[JsonlSourceConfig]):
    """Files of JSON lines."""

    name = "jsonl"
    title = "a file of JSON lines"
    summary = "A file of JSON lines, to which an application appends."
    config = JsonlSourceConfig
    connector = "jsonl"

    def build(self, config: JsonlSourceConfig, context: SourceContext) -> JsonlSource:  # noqa: ARG002
        """Return a source of the file."""
        return JsonlSource(config)

    def position(self, fields: Mapping[str, Any]) -> JsonlPosition | None:
        """Return the position in these fields, None if it has no `jsonl`."""
        return JsonlPosition(int(fields["jsonl"])) if "jsonl" in fields else None

    def position_fields(self, config: JsonlSourceConfig) -> tuple[PositionField, ...]:  # noqa: ARG002
        """Return `pos`, the end of the line."""
        return (PositionField("pos", "pos", "number"),)

    def names(self, config: JsonlSourceConfig, pipeline: str) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the file."""
        return {"file": config.path}

    def rows_until(self, rows: pa.RecordBatch, end: Position) -> int:
        """Return how many lines end at or before a position."""
        return sum(pos <= _own(end).end for pos in rows.column("pos").to_pylist())


JSONL = JsonlSourceType()
