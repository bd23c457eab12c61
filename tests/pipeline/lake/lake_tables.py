"""Staged changes for tests, written as Spark's tasks write them, and sessions to apply them with."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import SecretStr

from deltaforge_dagster.pipeline.lake.writer import LakeWriter
from deltaforge_dagster.sinks.lake.config import (
    DeltaSinkConfig,
    IcebergSinkConfig,
    LakeSinkConfig,
)
from deltaforge_dagster.sinks.lake.delta import DeltaDialect
from deltaforge_dagster.sinks.lake.dialect import LakeDialect
from deltaforge_dagster.sinks.lake.iceberg import IcebergDialect
from deltaforge_dagster.sinks.lake.statements import quoted
from deltaforge_dagster.sinks.tables.staged import (
    META,
    OLD_KEY,
    VALIDITY,
    ChangePlace,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.sources.value_types import INT64, TEXT, ValueType
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from tests.fix_spark import connected

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

Format = Literal["delta", "iceberg"]
FORMATS: Sequence[Format] = ("delta", "iceberg")
EPOCH = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
COLUMNS: Mapping[str, ValueType] = {"id": INT64, "name": TEXT, "note": TEXT}


def moment(seconds: int) -> dt.datetime:
    """The time of a change."""
    return EPOCH + dt.timedelta(seconds=seconds)


@dataclass
class LakeSessions:
    """Sessions on the tests' server; implements `SessionProvider`."""

    remote: str
    elsewhere: bool = False
    _session: SparkSession | None = None

    def session(self) -> SparkSession:
        """The session."""
        if self._session is None:
            self._session = connected(self.remote)
        return self._session

    def lost(self, error: BaseException) -> bool:
        """Sessions of tests are not lost."""
        return False

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.stop()


@dataclass
class Lake:
    """A folder with tables of a format."""

    format: Format
    folder: Path
    remote: str
    opened: list[LakeSessions] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def config(self, **options: Any) -> LakeSinkConfig:
        """Options of the sink."""
        options.setdefault("table", "${source.schema}.${source.table}")
        if self.format == "delta":
            if "catalog" not in options:
                options["path"] = str(self.folder / "lake")
            return DeltaSinkConfig(id="lake", **options)
        properties = {
            "type": SecretStr("hadoop"),
            "warehouse": SecretStr(str(self.folder / "lake")),
        }
        options.setdefault("catalog_properties", properties)
        return IcebergSinkConfig(id="lake", **options)

    def sessions(self) -> LakeSessions:
        """A provider with a session of its own."""
        self.opened.append(LakeSessions(self.remote))
        return self.opened[-1]

    def writer(
        self, sessions: LakeSessions | None = None, uid: str = "uid-1", **options: Any
    ) -> LakeWriter:
        """A writer; options are those of the sink."""
        owner = TableOwner(uid, options.pop("pipeline", "shop"), options.pop("sink_id", "lake"))
        config = self.config(**options)
        return LakeWriter(sessions or self.sessions(), dialect_of(config), config, owner)

    def reading(self) -> SparkSession:
        """A session that knows the tables, and is not a writer's."""
        session = self.sessions().session()
        for name, value in dialect_of(self.config()).settings.items():
            session.conf.set(name, value)
        return session

    def rows(
        self, *names: str, destination: Sequence[str] = ("public", "orders")
    ) -> list[tuple[Any, ...]]:
        """The rows of a table, as a new session reads them, by their place in the journal."""
        found = self.arrow(*names, destination=destination)
        return [tuple(row.values()) for row in found.to_pylist()]

    def versions(self) -> int:
        """How many versions of the table readers could see so far."""
        table = dialect_of(self.config()).table(("public", "orders"))
        query = (
            f"DESCRIBE HISTORY {table}"
            if self.format == "delta"
            else f"SELECT * FROM {table}.history"
        )
        return self.reading().sql(query).count()

    def arrow(self, *names: str, destination: Sequence[str] = ("public", "orders")) -> pa.Table:
        """The same in Arrow."""
        dialect = dialect_of(self.config())
        columns = ", ".join(quoted(name) for name in names)
        query = (
            f"SELECT {columns} FROM {dialect.table(destination)} ORDER BY df_position, df_ordinal"
        )
        return self.reading().sql(query).toArrow()

    def write(self, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> str:
        """Write staged rows and return the file's name."""
        path = self.folder / f"staged-{next(self.numbers)}.parquet"
        return write_staged(path, rows, schema)

    def close(self) -> None:
        """End all sessions."""
        for one in self.opened:
            one.close()


def write_staged(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> str:
    """Write staged rows to a file and return its name."""
    columns = [pa.array([row.get(one.name) for row in rows], one.type) for one in schema]
    pq.write_table(pa.table(columns, schema=schema), path)
    return str(path)


class StagedFolder(Protocol):
    """Where staged files are."""

    def write(self, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> str:
        """Write staged rows and return the file's name."""
        ...


def dialect_of(config: LakeSinkConfig) -> LakeDialect:
    """The dialect of a sink."""
    if isinstance(config, DeltaSinkConfig):
        return DeltaDialect(config)
    assert isinstance(config, IcebergSinkConfig)
    return IcebergDialect(config)


@dataclass
class Staging:
    """Makes the staged changes of a table, step by step."""

    lake: StagedFolder
    mode: str
    types: Mapping[str, ValueType] = field(default_factory=lambda: COLUMNS)
    key: tuple[str, ...] = ("id",)
    destination: tuple[str, ...] = ("public", "orders")
    source: tuple[str, str | None, str] = ("shop", "public", "orders")

    def table(self, *steps: StagedStep, absent: Sequence[str] = ()) -> StagedTable:
        """The changes of one commit."""
        columns = TypedSchema(tuple(TypedColumn(*one, "type") for one in self.types.items()))
        return StagedTable(
            self.destination, self.source, columns, self.key, frozenset(absent), steps, 0
        )

    def renamed(self, table: StagedTable) -> StagedTable:
        """The same changes for the destination that is set now."""
        return replace(table, destination=self.destination)

    def step(
        self,
        *rows: Mapping[str, Any],
        segment: int = 0,
        rekey: bool = False,
        inserts_only: bool = False,
        reads: bool = False,
    ) -> StagedStep:
        """A step with rows; what they do not say is that they are updates, in order, a second apart."""
        names = TypedSchema(tuple(TypedColumn(*one) for one in self.types.items())).arrow
        fields = [*names, *META, *(VALIDITY if self.mode == "history" else ())]
        if rekey:
            fields += [pa.field(OLD_KEY + name, names.field(name).type) for name in self.key]
        filled = []
        for number, row in enumerate(rows):
            place = row.get("df_ordinal", number)
            time = moment(row.get("df_segment", segment) * 100 + place)
            known = {"df_op": "u", "df_segment": segment, "df_ordinal": place}
            known |= {"df_event_time": time, "df_valid_from": time, "df_event_id": f"e{place}"}
            filled.append(known | dict(row))
        last = ChangePlace(filled[-1]["df_segment"], filled[-1]["df_ordinal"])
        path = self.lake.write(filled, pa.schema(fields))
        kind: Literal["rekey", "rows"] = "rekey" if rekey else "rows"
        return StagedStep(kind, [path], len(rows), inserts_only, last, reads=reads)

    def truncate(self, segment: int, ordinal: int) -> StagedStep:
        """A step that truncates the table."""
        time = int(moment(segment * 100 + ordinal).timestamp() * 1e6)
        return StagedStep("truncate", [], 0, False, ChangePlace(segment, ordinal), time)
