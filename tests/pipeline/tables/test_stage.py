"""Staging commits through a real Spark server: segments in, files that Spark reads out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.tables import stage as staging
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.sink_type import DELTA
from deltaforge_dagster.sinks.tables.staged import StagedCommit, StagedStep, StagedTable
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
from tests.pipeline.encode.test_encoder import OneSession, segment
from tests.pipeline.tables.changes import PIPELINE, change, table
from tests.processors.rows import row
from tests.state.make import NAME, held, position

pytestmark = pytest.mark.spark

Stage = Callable[..., StagedCommit]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal((tmp_path / "a [journal]").as_uri())


@pytest.fixture
def register(sqlite_store: StateStore) -> Callable[[TableSchema], str]:
    """Registers table versions and returns their fingerprints."""
    lease = held(sqlite_store)

    def of(version: TableSchema) -> str:
        with sqlite_store.fenced(lease) as writer:
            return writer.schemas.register("acme", version, position(1)).fingerprint

    return of


@pytest.fixture
def stage(tmp_path: Path, journal: Journal, sqlite_store: StateStore, spark: SparkSession) -> Stage:
    """Stages segments for a sink with these options."""

    def of(
        segments: Sequence[SegmentRow], options: str = "mode: current", **which: Any
    ) -> StagedCommit:
        file = tmp_path / "orders.yaml"
        file.write_text(PIPELINE.replace("OPTIONS", options))
        spec = load_pipeline(file).spec
        config = spec.spec.sinks[0].config
        assert isinstance(config, LakeSinkConfig)
        stager = TableStager(
            spec, config, DELTA.column_types(), journal, OneSession(spark), sqlite_store, "run-1"
        )
        return stager.stage(segments, **which)

    return of


def only(commit: StagedCommit) -> StagedTable:
    """Return the only table of a commit."""
    assert not commit.failed
    (found,) = commit.tables
    return found


def read(spark: SparkSession, step: StagedStep) -> list[dict[str, Any]]:
    """Return the rows of a step as Spark reads them, by place."""
    rows = spark.read.parquet(*step.files).toArrow().to_pylist()
    assert len(rows) == step.rows
    return sorted(rows, key=lambda one: (one["df_segment"], one["df_ordinal"], one["df_op"]))


def values(rows: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Return some columns."""
    return [tuple(one[name] for name in names) for one in rows]


def test_changelog(
    journal: Journal, register: Callable[[TableSchema], str], stage: Stage, spark: SparkSession
) -> None:
    """A changelog has every change with its operation, place and position, and columns of all versions."""
    old, new = register(table("id", "a")), register(table("id", "b"))
    segments = [
        segment(
            journal, 1, [change("c", 1, old, after={"id": 1, "a": 5}), change("t", 2, None)]
        ),
        segment(
            journal, 2,
            [
                change("u", 3, new, after={"id": 1, "b": {"_unchanged": True}}),
                change("d", 4, new, before={"id": 1}),
                row(op="ddl", after=None, key=None, table="_ddl", schema_version=None),
            ],
        ),
    ]  # fmt: skip
    found = only(stage(segments, "mode: changelog"))
    assert found.destination == ("public", "orders")
    assert [one.name for one in found.columns.columns] == ["id", "b", "a"]
    assert (found.key, found.changes, set(found.absent)) == (("id",), 4, {"a", "b"})
    (step,) = found.steps
    rows = read(spark, step)
    assert values(rows, "df_op", "id", "a", "b", "df_absent") == [
        ("c", 1, 5, None, None),
        ("t", None, None, None, None),
        ("u", 1, None, None, ["b", "a"]),
        ("d", 1, None, None, ["b", "a"]),
    ]
    assert values(rows, "df_segment", "df_ordinal", "df_source_position", "df_schema_version") == [
        (1, 0, "0/00000001", old),
        (1, 1, "0/00000002", None),
        (2, 0, "0/00000003", new),
        (2, 1, "0/00000004", new),
    ]
    assert rows[0]["df_event_time"].timestamp() == 1e-6
    assert (step.last.segment, step.last.ordinal) == (2, 1)


def test_current(
    journal: Journal, register: Callable[[TableSchema], str], stage: Stage, spark: SparkSession
) -> None:
    """The last change of each key remains; an update of the key is a delete and an update, or a step of its own."""
    version = register(table("id", "a", "b"))
    lacks = {"_unchanged": True}
    rows = [
        change("c", 1, version, after={"id": 1, "a": 1, "b": 1}),
        change("u", 2, version, after={"id": 1, "a": 2, "b": lacks}),
        change("u", 3, version, after={"id": 2, "a": 3, "b": lacks}),
        change("d", 4, version, before={"id": 3}),
        change("u", 5, version, before={"id": 4}, after={"id": 5, "a": 4, "b": 4}),
        change("u", 6, version, before={"id": 1}, after={"id": 6, "a": 5, "b": lacks}),
        change("u", 7, version, after={"id": 6, "a": 6, "b": lacks}),
    ]
    found = only(stage([segment(journal, 1, rows)]))
    assert [step.kind for step in found.steps] == ["rows", "rekey", "rows"]
    first, rekey, second = (read(spark, step) for step in found.steps)
    assert values(first, "df_op", "id", "a", "b", "df_absent") == [
        ("u", 1, 2, 1, None),
        ("u", 2, 3, None, ["b"]),
        ("d", 3, None, None, None),
        ("d", 4, None, None, None),
        ("u", 5, 4, 4, None),
    ]
    assert values(rekey, "df_old_id", "id", "a", "df_absent") == [(1, 6, 5, ["b"])]
    assert values(second, "id", "a", "df_absent") == [(6, 6, ["b"])]
    assert (found.key, set(found.absent), found.changes) == (("id",), {"b"}, 7)


def test_history_with_truncates(
    journal: Journal, register: Callable[[TableSchema], str], stage: Stage, spark: SparkSession
) -> None:
    """Each version is a row that is valid until the next; a truncate is a step between those before and after it."""
    version = register(table("id", "a"))
    rows = [
        change("r", 1, version, after={"id": 1, "a": 1}),
        change("u", 2, version, after={"id": 1, "a": 2}),
        change("d", 3, version, before={"id": 2}),
        change("t", 4, None),
        change("c", 5, version, after={"id": 1, "a": 3}),
        change("c", 6, version, after={"id": 2, "a": 4}),
    ]
    found = only(stage([segment(journal, 1, rows)], "mode: history"))
    assert [step.kind for step in found.steps] == ["rows", "truncate", "rows"]
    assert [step.inserts_only for step in found.steps] == [False, False, True]
    assert found.steps[1].event_time_us == 4
    (first, last) = (read(spark, step) for step in (found.steps[0], found.steps[2]))
    ends = [one["df_valid_to"] and one["df_valid_to"].microsecond for one in first + last]
    assert values(first + last, "df_op", "id", "a") == [
        ("u", 1, 1), ("u", 1, 2), ("d", 2, None), ("u", 1, 3), ("u", 2, 4),
    ]  # fmt: skip
    assert ends == [2, None, None, None, None]
    current = only(stage([segment(journal, 1, rows)]))
    assert [step.kind for step in current.steps] == ["truncate", "rows"]


@pytest.mark.parametrize("mode", ["current", "history"])
def test_rows_of_a_snapshot_are_apart(
    journal: Journal,
    register: Callable[[TableSchema], str],
    stage: Stage,
    spark: SparkSession,
    mode: str,
) -> None:
    """Keys that only a snapshot has read are in a step before the one of the others."""
    version = register(table("id", "a"))
    rows = [
        change("r", 1, version, after={"id": 1, "a": 1}),
        change("r", 2, version, after={"id": 2, "a": 2}),
        change("c", 3, version, after={"id": 3, "a": 3}),
        change("r", 4, version, after={"id": 4, "a": 4}),
        change("u", 5, version, after={"id": 2, "a": 5}),
        change("d", 6, version, before={"id": 4}),
        change("r", 7, version, after={"id": 5, "a": 7}),
        change("r", 8, version, after={"id": 5, "a": 8}),
    ]
    found = only(stage([segment(journal, 1, rows)], f"mode: {mode}"))
    assert [(step.reads, step.inserts_only, step.rows) for step in found.steps] == [
        (True, False, 1), (False, False, {"current": 4, "history": 6}[mode]),
    ]  # fmt: skip
    assert values(read(spark, found.steps[0]), "df_op", "id", "a") == [("u", 1, 1)]
    assert found.changes == 8


def test_a_truncate_alone(
    journal: Journal, register: Callable[[TableSchema], str], stage: Stage
) -> None:
    """The segments do not say which version the table has: it is the newest, or there is nothing to empty."""
    alone = [segment(journal, 1, [change("t", 1, None)])]
    for mode in ("current", "history"):
        nothing = stage(alone, f"mode: {mode}")
        assert (nothing.tables, nothing.failed) == ([], {})
    register(table("id", "a"))
    for mode, kind in (("current", "truncate"), ("history", "truncate"), ("changelog", "rows")):
        found = only(stage(alone, f"mode: {mode}"))
        assert [step.kind for step in found.steps] == [kind]
        assert [one.name for one in found.columns.columns] == ["id", "a"]
        assert found.key == ("id",)


def test_many_buckets(
    journal: Journal,
    register: Callable[[TableSchema], str],
    stage: Stage,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several tasks read the segments, and several fold their keys; every key is there once, with its last change."""
    monkeypatch.setattr(staging, "BUCKET_ROWS", 100)
    monkeypatch.setattr("deltaforge_dagster.pipeline.encode.encoder.TASK_BYTES", 10_000)
    version = register(table("id", "a"))
    segments = [
        segment(
            journal, number,
            [change("u", 1, version, after={"id": one, "a": number}) for one in range(number, 500)],
        )
        for number in (1, 2, 3)
    ]  # fmt: skip
    found = only(stage(segments))
    (step,) = found.steps
    assert len(step.files) > 5
    rows = read(spark, step)
    assert sorted(values(rows, "id", "a")) == [(1, 1), (2, 2), *((one, 3) for one in range(3, 500))]


def test_tables_that_cannot_be_staged(
    journal: Journal, register: Callable[[TableSchema], str], stage: Stage
) -> None:
    """They fail one by one with the remedy and without values, and the others are staged."""
    version = register(table("id", "a"))
    keyless = register(dataclasses.replace(table("id", name="log"), primary_key=()))
    wide = register(table("id", "b", name="wide"))
    wider = register(table("id", name="wide", type_="text"))
    rows = [
        change("c", 1, version, after={"id": 1, "a": 5}),
        {**change("c", 2, keyless, after={"id": 1}), "table": "log"},
        {**change("c", 3, wide, after={"id": 1}), "table": "wide"},
        {**change("c", 4, wider, after={"id": "x"}), "table": "wide"},
        {**change("c", 5, None, after={"id": "secret"}), "table": "Orders"},
        {**change("c", 6, None, after={"id": "secret"}), "schema": "__wal_message", "table": "m"},
    ]
    small = [segment(journal, 1, rows)]
    commit = stage(small)
    assert [one.destination[1] for one in commit.tables] == ["orders"]
    reasons = {name[1]: str(error) for name, error in commit.failed.items()}
    assert set(reasons) == {"log", "wide", "Orders"}
    assert all(isinstance(error, TableRejected) for error in commit.failed.values())
    assert "`keys`" in reasons["log"]
    assert "column id" in reasons["wide"]
    assert "text under `types`" in reasons["wide"]
    declared = stage(small, "keys: {public.log: [id]}, types: {public.wide: {id: text}}")
    assert {one.destination[1] for one in declared.tables} == {"orders", "log", "wide"}
    misfit = [segment(journal, 2, [change("c", 1, version, after={"id": 1, "a": "secret"})])]
    (error,) = stage(misfit).failed.values()
    assert "column a" in str(error)
    assert "secret" not in str(error)
    assert stage(misfit, "types: {public.orders: {a: text}}").failed == {}
    orders = frozenset({("public", "orders")})
    assert not stage(misfit, skip=orders).failed
    assert len(stage(small, only=orders).tables) == 1


def test_one_destination(
    journal: Journal, register: Callable[[TableSchema], str], stage: Stage
) -> None:
    """Two tables with the same destination fail, and are named."""
    first, second = register(table("id")), register(table("id", name="items"))
    rows = [
        change("c", 1, first, after={"id": 1}),
        {**change("c", 2, second, after={"id": 1}), "table": "items"},
    ]
    commit = stage([segment(journal, 1, rows)], "table: all")
    assert not commit.tables
    assert "public.orders and public.items" in str(commit.failed["all",])


def test_discard(journal: Journal, register: Callable[[TableSchema], str], stage: Stage) -> None:
    """Discarding a commit deletes its files; intermediate ones are gone before."""
    version = register(table("id"))
    commit = stage([segment(journal, 1, [change("c", 1, version, after={"id": 1})])])
    folder = Path(journal.encoded_dir(NAME))
    assert [one.suffix for one in folder.iterdir()] == [".parquet"]
    commit.discard()
    assert not list(folder.iterdir())


TYPES: dict[str, tuple[str, str, list[tuple[Any, Any]]]] = {
    "boolean": ("boolean", "boolean", [(True, True), (False, False)]),
    "smallint": ("smallint", "smallint", [(-32768, -32768), (32767, 32767)]),
    "bigint": ("bigint", "bigint", [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1)]),
    "uint32": ("oid", "bigint", [(0, 0), (2**32 - 1, 2**32 - 1)]),
    "uint64": ("text", "decimal(20,0)", [(0, Decimal(0)), (2**64 - 1, Decimal(2**64 - 1))]),
    "numeric": (
        "numeric(38,10)", "decimal(38,10)",
        [("-9999999999999999999999999999.9999999999", Decimal("-9999999999999999999999999999.9999999999")),
         ("1e-10", Decimal("0.0000000001"))],
    ),
    "real": ("real", "float", [(1.5, 1.5), ("-Infinity", -math.inf)]),
    "double": ("double precision", "double", [(5e-324, 5e-324), ("NaN", math.nan)]),
    "bytea": ("bytea", "binary", [({"_base64": "AP8="}, b"\x00\xff"), ({"_base64": ""}, b"")]),
    "uuid": ("uuid", "string", [("0192f0c1-0000-7000-8000-000000000001",) * 2, (None, None)]),
    "json": ("jsonb", "string", [({"a": [1]}, '{"a":[1]}'), ("b", '"b"')]),
    "date": ("date", "date", [("0001-01-01", date(1, 1, 1)), ("9999-12-31", date(9999, 12, 31))]),
    "time": ("time without time zone", "string", [("24:00:00",) * 2, ("01:02:03.000004",) * 2]),
    "timestamp": (
        "timestamp without time zone", "timestamp_ntz",
        [("0001-01-01 00:00:00", datetime(1, 1, 1)),  # noqa: DTZ001 - it has no zone
         ("9999-12-31 23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999999))],  # noqa: DTZ001
    ),
    "timestamptz": (
        "timestamp with time zone", "timestamp",
        [("1582-10-15T00:00:00.000001Z", datetime(1582, 10, 15, 0, 0, 0, 1, UTC)),
         ("1969-12-31T23:59:59Z", datetime(1969, 12, 31, 23, 59, 59, 0, UTC))],
    ),
    "list": ("integer[]", "array<int>", [([1, None, -3], [1, None, -3]), ([], [])]),
    "decimals": ("numeric(5,2)[]", "array<decimal(5,2)>", [(["1.5"], [Decimal("1.50")]), (None, None)]),
    "text": ("text", "string", [("ä\u0000b", "ä\u0000b"), ("", "")]),
}  # fmt: skip
"""Columns by name: the type in the source, in Spark, and values in images with what Spark is to read."""


@pytest.mark.parametrize("mode", ["changelog", "current"])
def test_types(
    journal: Journal,
    register: Callable[[TableSchema], str],
    stage: Stage,
    spark: SparkSession,
    mode: str,
) -> None:
    """Spark reads every type that rows can have, with the same values, whether or not rows are folded."""
    columns = [
        Column("id", "integer", None, False, 1),
        *(Column(name, type_, None, True, n) for n, (name, (type_, *_)) in enumerate(TYPES.items(), 2)),
    ]  # fmt: skip
    version = register(TableSchema("shop", "public", "orders", tuple(columns), ("id",)))
    rows = [
        change("c", number, version, after={"id": number, **{name: cells[number][0] for name, (_, _, cells) in TYPES.items()}})
        for number in (0, 1)
    ]  # fmt: skip
    types = "types: {public.orders: {uint64: uint64}}"
    found = only(stage([segment(journal, 1, rows)], f"mode: {mode}, {types}"))
    (step,) = found.steps
    schema = dict(spark.read.parquet(*step.files).dtypes)
    assert {name: schema[name] for name in TYPES} == {name: type_ for name, (_, type_, _) in TYPES.items()}  # fmt: skip
    made = sorted(read(spark, step), key=lambda one: one["id"])
    for number, one in enumerate(made):
        expected = {name: cells[number][1] for name, (_, _, cells) in TYPES.items()}
        assert {name: repr(one[name]) for name in TYPES} == {
            name: repr(value).replace("datetime.timezone.utc", repr(one["timestamptz"].tzinfo))
            for name, value in expected.items()
        }
