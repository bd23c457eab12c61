"""Staged changes for tests, written as Spark's tasks write them, and tables to apply them to."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import SecretStr

from deltaforge_dagster.sinks.clickhouse.client import quoted
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig
from deltaforge_dagster.sinks.clickhouse.writer import ClickhouseWriter
from deltaforge_dagster.sinks.tables.staged import (
    META,
    OLD_KEY,
    ChangePlace,
    StagedSegment,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import TableOwner, WrittenTable
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.value_types import INT64, TEXT, ValueType
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_lab.servers.clickhouse import ClickhouseServer

COLUMNS: Mapping[str, ValueType] = {"id": INT64, "name": TEXT, "note": TEXT}
EPOCH = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def moment(seconds: float) -> dt.datetime:
    """The time of a change."""
    return EPOCH + dt.timedelta(seconds=seconds)


def unguarded() -> None:
    """A guard that lets everything pass."""


def segment(number: int) -> StagedSegment:
    """The place of a segment: 100 positions each."""
    return placed(number * 100, number * 100 + 100, 1_700_000_000.0 + number)


def placed(start: int, end: int, created_at: float) -> StagedSegment:
    """A segment of PostgreSQL's log between two positions."""
    return StagedSegment(LsnPosition(start).to_json(), LsnPosition(end).to_json(), created_at)


@dataclass
class World:
    """A database, and the changes of one table for it."""

    server: ClickhouseServer
    database: str
    folder: Path
    mode: str = "current"
    types: Mapping[str, ValueType] = field(default_factory=lambda: COLUMNS)
    key: tuple[str, ...] = ("id",)
    name: str = "orders"
    source: tuple[str, str | None, str] = ("shop", "public", "orders")
    segments: dict[int, StagedSegment] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)

    def config(self, **options: Any) -> ClickhouseSinkConfig:
        """Options of the sink."""
        known: dict[str, Any] = {
            "id": "click",
            "url": self.server.url,
            "database": self.database,
            "mode": self.mode,
        }
        known |= {"password": SecretStr(self.server.password), "send_timeout_secs": 300.0}
        return ClickhouseSinkConfig(**known | options)

    def writer(
        self, uid: str = "uid-1", log: str = "server-1", sink: str = "click", **options: Any
    ) -> ClickhouseWriter:
        """A writer."""
        return ClickhouseWriter(self.config(**options), TableOwner(uid, "shop", sink, log))

    def commit(
        self, *steps: StagedStep, absent: Sequence[str] = (), exists: bool = False, **options: Any
    ) -> WrittenTable:
        """Commit steps with a writer of its own."""
        writer = self.writer(**options)
        table = self.table(*steps, absent=absent)
        return writer.commit(table, max(table.segments), unguarded, exists=exists)

    def table(self, *steps: StagedStep, absent: Sequence[str] = ()) -> StagedTable:
        """The changes of one commit."""
        columns = TypedSchema(tuple(TypedColumn(*one, "type") for one in self.types.items()))
        numbers = {step.last.segment for step in steps}
        segments = {one: self.segments.get(one, segment(one)) for one in numbers}
        destination = self.database, self.name
        return StagedTable(
            destination, self.source, columns, self.key, frozenset(absent), steps, 0, segments
        )

    def step(
        self,
        *rows: Mapping[str, Any],
        segment: int = 0,
        rekey: bool = False,
        reads: bool = False,
    ) -> StagedStep:
        """A step with rows; what they do not say is that they are updates, in order, a second apart."""
        names = TypedSchema(tuple(TypedColumn(*one) for one in self.types.items())).arrow
        fields = [*names, *META]
        if rekey:
            fields += [pa.field(OLD_KEY + name, names.field(name).type) for name in self.key]
        filled = []
        for number, row in enumerate(rows):
            place = row.get("df_ordinal", number)
            known = {"df_op": "u", "df_segment": segment, "df_ordinal": place}
            known |= {"df_event_time": moment(segment * 100 + place)}
            filled.append(known | {"df_event_id": f"e{segment}-{place}"} | dict(row))
        last = ChangePlace(segment, filled[-1]["df_ordinal"])
        kind: Literal["rekey", "rows"] = "rekey" if rekey else "rows"
        path = self.write(filled, pa.schema(fields))
        return StagedStep(kind, [path], len(rows), False, last, reads=reads)

    def truncate(self, segment: int, ordinal: int) -> StagedStep:
        """A step that truncates the table."""
        time = int(moment(segment * 100 + ordinal).timestamp() * 1e6)
        return StagedStep("truncate", [], 0, False, ChangePlace(segment, ordinal), time)

    def write(self, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> str:
        """Write staged rows and return the file's name."""
        path = self.folder / f"staged-{next(self.numbers)}.parquet"
        columns = [_array([row.get(one.name) for row in rows], one.type) for one in schema]
        pq.write_table(pa.table(columns, schema=schema), path)
        return str(path)

    def rows(self, *names: str, final: bool = True) -> list[tuple[Any, ...]]:
        """The rows of the table as the source has them, or of a changelog, by key or version."""
        keys = (quoted(name) for name in self.key)
        order = "_version" if self.mode == "changelog" else ", ".join(keys)
        how = " FINAL" if final and self.mode == "current" else ""
        query = f"SELECT {', '.join(names)} FROM {self.database}.{quoted(self.name)}{how} ORDER BY {order}"
        answer = self.server.query(query, "JSONCompactEachRow")
        return [tuple(orjson.loads(line)) for line in answer.splitlines()]

    def schema(self) -> dict[str, str]:
        """Name and type of each column of the table."""
        answer = self.server.query(f"DESCRIBE TABLE {self.database}.{self.name}", "JSONEachRow")
        rows = [orjson.loads(line) for line in answer.splitlines()]
        return {row["name"]: row["type"] for row in rows}

    def with_types(self, **types: ValueType) -> World:
        """The same table, once it has other columns."""
        return replace(self, types=types)


def _array(values: Sequence[Any], type_: pa.DataType) -> pa.Array[Any]:
    """Return values in Arrow, which makes none of an extension type itself."""
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))
    if isinstance(type_, pa.ListType):
        inner = _array([one for row in values if row for one in row], type_.value_type)
        ends = itertools.accumulate((len(row or ()) for row in values), initial=0)
        mask = pa.array([row is None for row in values], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), inner, mask=mask)
    return pa.array(values, type_)
