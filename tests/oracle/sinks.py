"""The sinks of a scenario: how the pipeline file names them, and what their readers see."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import duckdb
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.table import StaticTable
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.fix_spark import SparkAddress, connected
from tests.oracle.databases import TableState, printed
from tests.oracle.kinds import (
    ABSENT,
    UNCHANGED,
    Kind,
    Value,
    from_arrow,
    from_json,
    from_text,
    members,
)
from tests.pipeline.lake.test_readers import DUCKDB_DELTA

Fields = Mapping[str, Any]
"""A row as a reader has it, by the names of columns."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change.

    Attributes:
        op: `c`, `r`, `u`, `d` or `t`.
        before: The row before, or what there is of it.
        after: The row after.
    """

    op: str
    before: Fields | None
    after: Fields | None


@dataclass(frozen=True, slots=True)
class Readings:
    """What a reader has of a table.

    Attributes:
        form: Gives a value of the reader its form.
        rows: Current rows, unless there are changes.
        events: All changes, in order.
    """

    form: Callable[[Kind, Any], Value]
    rows: Sequence[Fields] = ()
    events: Sequence[Event] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the sinks of a pipeline are.

    Attributes:
        folder: A folder of the scenario's own.
        copy: The DSN of an empty PostgreSQL database.
        clickhouse: A ClickHouse server.
        database: The name of its database.
        spark: The Spark server.
        schema: The name of the source's schema, or database.
    """

    folder: Path
    copy: str
    clickhouse: ClickhouseServer
    database: str
    spark: SparkAddress
    schema: str


class Sink(Protocol):
    """A sink of a scenario."""

    def yaml(self, place: Place) -> str:
        """Return type and options, as YAML in braces."""
        ...

    def readers(
        self, place: Place, table: str, state: TableState
    ) -> Iterator[tuple[str, Readings | None]]:
        """Return the name of each reader, and what it has of a table: None if there is no such table."""
        ...


def _changes(rows: Sequence[Fields], op: str) -> list[Event]:
    """Return the rows of a changelog as changes."""
    return [
        Event(row[op], row if row[op] == "d" else None, None if row[op] == "d" else row)
        for row in rows
    ]


class Messages:
    """Events in the native format, as lines of a file."""

    def yaml(self, place: Place) -> str:
        """Return type and options."""
        return f"{{type: file, config: {{id: messages, path: {place.folder}/messages.jsonl}}}}"

    def readers(
        self, place: Place, table: str, state: TableState
    ) -> Iterator[tuple[str, Readings | None]]:
        """Return all events of the table."""
        path = place.folder / "messages.jsonl"
        events = []
        for line in path.read_text().split("\n") if path.exists() else []:
            if not line:
                continue
            event = members(line)
            source = members(event["source"])
            if source["table"] != f'"{table}"' or ("ddl" in event and event["op"] != '"t"'):
                continue
            before, after = (_image(event.get(name, "null")) for name in ("before", "after"))
            events.append(Event(json.loads(event["op"]), before, after))
        yield "messages", Readings(from_json, events=events)


def _image(raw: str) -> Fields | None:
    """Return the JSON text of each value of an image."""
    if raw == "null":
        return None
    return {name: ABSENT if one == UNCHANGED else one for name, one in members(raw).items()}


class Objects:
    """Parquet files, in the order of their names."""

    def yaml(self, place: Place) -> str:
        """Return type and options."""
        return f"{{type: s3, config: {{id: parquet, bucket: {place.folder}/objects, local: true}}}}"

    def readers(
        self, place: Place, table: str, state: TableState
    ) -> Iterator[tuple[str, Readings | None]]:
        """Return all rows of all files."""
        events = []
        files = (place.folder / "objects").rglob("*.parquet")
        for path in sorted(
            (one for one in files if f"table={table}/" in str(one)), key=lambda one: one.name
        ):
            for row in pq.ParquetFile(path).read().to_pylist():
                absent = set(row["absent"] or ())
                images = [
                    {
                        name.removeprefix(side): value
                        for name, value in row.items()
                        if name.startswith(side) and not {name, name.removeprefix(side)} & absent
                    }
                    for side in ("before_", "after_")
                ]
                before, after = (
                    one if any(v is not None for v in one.values()) else None for one in images
                )
                events.append(Event(row["op"], before, after))
        yield "parquet", Readings(from_arrow, events=events)


@dataclass(frozen=True)
class PostgresTable:
    """Tables of another PostgreSQL database."""

    mode: Literal["current", "history", "changelog"]

    def yaml(self, place: Place) -> str:
        """Return type and options."""
        table = f"{self.mode}.${{source.table}}"
        return (
            f'{{type: postgres, config: {{id: postgres-{self.mode}, dsn: "{place.copy}", mode: {self.mode}, '
            f'table: "{table}", commit_seconds: 0.1}}}}'
        )

    def readers(
        self, place: Place, table: str, state: TableState
    ) -> Iterator[tuple[str, Readings | None]]:
        """Return the rows, each value as the server prints it."""
        with psycopg.connect(place.copy, autocommit=True) as client:
            for setting in (
                "TimeZone = UTC",
                "DateStyle = ISO",
                "lc_monetary = 'C'",
                "extra_float_digits = 3",
            ):
                client.execute(f"SET {setting}")
            found = client.execute(
                "SELECT attname, atttypid::regtype::text LIKE '%%[]' FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
                [f"{self.mode}.{table}"],
            ).fetchall()
            names = [name for name, _ in found]
            if not names:
                yield f"postgres-{self.mode}", None
                return
            columns = ", ".join(printed(name, is_list=is_list) for name, is_list in found)
            query = f"SELECT {columns} FROM {self.mode}.{table}"
            if self.mode == "history":
                query += " WHERE df_is_current"
            if self.mode == "changelog":
                query += " ORDER BY df_position, df_ordinal"
            rows = [dict(zip(names, row, strict=True)) for row in client.execute(query)]
        events = _changes(rows, "df_op") if self.mode == "changelog" else None
        yield f"postgres-{self.mode}", Readings(from_text, rows, events)


@dataclass(frozen=True)
class ClickhouseTable:
    """Tables of ClickHouse."""

    mode: Literal["current", "changelog"]

    def yaml(self, place: Place) -> str:
        """Return type and options."""
        return (
            f"{{type: clickhouse, config: {{id: clickhouse-{self.mode}, url: '{place.clickhouse.url}', "
            f"password: '{place.clickhouse.password}', database: {place.database}, mode: {self.mode}, "
            f"table: '{self.mode}_${{source.table}}', commit_seconds: 0.1}}}}"
        )

    def readers(
        self, place: Place, table: str, state: TableState
    ) -> Iterator[tuple[str, Readings | None]]:
        """Return the rows, each value as text or as digits of its bytes."""
        name = f"{self.mode}_{table}"
        where = f"database = '{place.database}' AND table = '{name}'"
        found = self._rows(place, f"SELECT name, type FROM system.columns WHERE {where}")
        names = [one for one, _ in found]
        if not names:
            yield f"clickhouse-{self.mode}", None
            return
        shown = [
            one
            if one == "_op"
            else f"arrayMap(x -> hex(toString(x)), `{one}`)"
            if type_.startswith("Array")
            else f"hex(toString(`{one}`))"
            for one, type_ in found
        ]
        query = f"SELECT {', '.join(shown)} FROM {place.database}.{name}"
        query += " FINAL" if self.mode == "current" else " ORDER BY _version"
        rows = [dict(zip(names, row, strict=True)) for row in self._rows(place, query)]
        events = _changes(rows, "_op") if self.mode == "changelog" else None
        yield f"clickhouse-{self.mode}", Readings(_of_clickhouse, rows, events)

    @staticmethod
    def _rows(place: Place, query: str) -> list[list[Any]]:
        answer = place.clickhouse.query(query, "JSONCompactEachRow")
        return [json.loads(line) for line in answer.splitlines()]


def _of_clickhouse(kind: Kind, value: Any) -> Value:
    """Return the form of a value whose bytes are given in hex, since a String may have any."""
    if isinstance(value, list):
        return tuple(_of_clickhouse(kind.element or kind, one) for one in value)
    if value is None:
        return None
    content = bytes.fromhex(value)
    if kind.name in {"binary", "geometry"}:
        return content
    return from_text(kind, content.decode(errors="surrogateescape"))


@dataclass(frozen=True)
class LakeTable:
    """Tables of a lakehouse."""

    format: Literal["delta", "iceberg"]
    what: Literal["current", "pending", "history", "changelog"]

    def yaml(self, place: Place) -> str:
        """Return type and options."""
        folder = place.folder / self._id
        where = (
            f"path: {folder}"
            if self.format == "delta"
            else f"catalog_properties: {{type: hadoop, warehouse: {folder}}}"
        )
        mode = (
            "current, pending: {fold_changes: 12, fold_seconds: 3600}"
            if self.what == "pending"
            else self.what
        )
        return f"{{type: {self.format}, config: {{id: {self._id}, {where}, mode: {mode}, commit_seconds: 0.1}}}}"

    def readers(
        self, place: Place, table: str, state: TableState
    ) -> Iterator[tuple[str, Readings | None]]:
        """Return the rows as Arrow has them, as each reader of the format sees them."""
        folder = place.folder / self._id / place.schema / table
        if not folder.exists():
            yield self._id, None
            return
        for reader, rows in self._readers(place, folder, table).items():
            found: Sequence[Fields] = rows.to_pylist()
            events = None
            if self.what == "changelog":
                events = _changes(
                    sorted(found, key=lambda row: (row["df_position"], row["df_ordinal"])), "df_op"
                )
            if self.what == "history":
                found = [row for row in found if row["df_is_current"]]
            yield f"{self._id} by {reader}", Readings(from_arrow, found, events)

    @property
    def _id(self) -> str:
        return f"{self.format}-{self.what}"

    def _readers(self, place: Place, folder: Path, table: str) -> dict[str, pa.Table]:
        if self.what == "pending":
            return {"spark": self._view(place, table)}
        if self.format == "iceberg":
            versions = (folder / "metadata").glob("v*.metadata.json")
            newest = max(versions, key=lambda one: int(one.name[1:].partition(".")[0]))
            return {"pyiceberg": StaticTable.from_metadata(str(newest)).scan().to_arrow()}
        rust = QueryBuilder().register("t", DeltaTable(str(folder))).execute("SELECT * FROM t")
        with duckdb.connect(config={"allow_unsigned_extensions": True}) as ducks:
            ducks.execute(f"LOAD '{DUCKDB_DELTA}'")
            found = ducks.execute(f"SELECT * FROM delta_scan('{folder}')").fetch_arrow_table()
        return {"duckdb": found, "delta-rs": pa.table(rust.read_all())}

    def _view(self, place: Place, table: str) -> pa.Table:
        """Return the table with its pending changes."""
        environment = {
            "DELTAFORGE_HOME": str(place.folder / "home"),
            "DELTAFORGE_PIPELINES": str(place.folder),
        }
        command = [
            "lake",
            "view",
            "oracle",
            "--sink",
            self._id,
            "--table",
            f"{place.schema}.{table}",
            "--json",
        ]
        said = CliRunner().invoke(app, command, env=environment)
        assert said.exit_code == 0, said.output
        session = connected(place.spark.remote)
        with contextlib.closing(_Ended(session)):
            # The extensions are the server's; a catalog is a session's.
            if self.format == "iceberg":
                for name, value in _catalog(place.folder / self._id).items():
                    session.conf.set(name, value)
            return session.sql(json.loads(said.output)["query"]).toArrow()


@dataclass(frozen=True)
class _Ended:
    """A session of Spark that can be closed."""

    session: Any

    def close(self) -> None:
        """End it."""
        self.session.stop()


def _catalog(warehouse: Path) -> Mapping[str, str]:
    name = "spark.sql.catalog.lake"
    return {
        name: "org.apache.iceberg.spark.SparkCatalog",
        f"{name}.type": "hadoop",
        f"{name}.warehouse": str(warehouse),
    }


SINKS: Mapping[str, Sink] = {
    "messages": Messages(),
    "parquet": Objects(),
    "postgres-current": PostgresTable("current"),
    "postgres-history": PostgresTable("history"),
    "postgres-changelog": PostgresTable("changelog"),
    "clickhouse-current": ClickhouseTable("current"),
    "clickhouse-changelog": ClickhouseTable("changelog"),
    **{
        f"{format_}-{what}": LakeTable(format_, what)
        for format_ in ("delta", "iceberg")
        for what in ("current", "pending", "history", "changelog")
    },
}
"""Every sink, by its name."""
