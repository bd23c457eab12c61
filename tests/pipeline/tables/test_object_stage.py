"""The content of object files: images, operations, table versions, periods, and native events."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.storage import open_located
from deltaforge_dagster.pipeline.encode.messages import source_origin
from deltaforge_dagster.pipeline.tables import object_files
from deltaforge_dagster.pipeline.tables.object_stage import ObjectStager
from deltaforge_dagster.processors.messages.envelope import native_envelope
from deltaforge_dagster.sinks.objects.sink_type import S3, S3SinkConfig
from deltaforge_dagster.sinks.tables.staged import ObjectPart, StagedCommit, StagedStep
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import TableSchema
from tests.pipeline.encode.test_encoder import OneSession, segment
from tests.pipeline.tables.changes import HereSession, change, table
from tests.processors.rows import Row, batch, row
from tests.state.make import held, position

PIPELINE = """
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}
  sinks:
    - type: s3
      config: {id: files, bucket: /nowhere, local: true, OPTIONS}
"""

DAY = 86_400_000_000
"""Microseconds of a day."""

Stage = Callable[..., StagedCommit]
Register = Callable[[TableSchema], str]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal, in a folder whose name Spark has to escape."""
    return Journal((tmp_path / "a [journal]").as_uri())


@pytest.fixture
def register(sqlite_store: StateStore) -> Register:
    """Registers table versions and returns their fingerprints."""
    lease = held(sqlite_store)

    def of(version: TableSchema) -> str:
        with sqlite_store.fenced(lease) as writer:
            return writer.schemas.register("acme", version, position(1)).fingerprint

    return of


@pytest.fixture
def stager(tmp_path: Path, journal: Journal, sqlite_store: StateStore) -> Callable[[str], Any]:
    """Makes a stager for a sink with these options, whose task runs in this process."""

    def of(options: str) -> ObjectStager:
        file = tmp_path / "orders.yaml"
        file.write_text(PIPELINE.replace("OPTIONS", options))
        spec = load_pipeline(file).spec
        config = spec.spec.sinks[0].config
        assert isinstance(config, S3SinkConfig)
        return ObjectStager(
            spec,
            config,
            S3.column_types(),
            journal,
            OneSession(cast("SparkSession", HereSession())),
            sqlite_store,
            "run-1",
            S3.object_form(config),
        )

    return of


@pytest.fixture
def stage(journal: Journal, stager: Callable[[str], ObjectStager]) -> Stage:
    """Stages changes, those of each list in a segment of their own."""

    def of(*changes: Sequence[Row], options: str = "") -> StagedCommit:
        rows = [segment(journal, number, one) for number, one in enumerate(changes, 1)]
        return stager(options or "format: parquet").stage(rows)

    return of


def steps(commit: StagedCommit) -> Sequence[StagedStep]:
    """Return the objects of the only table."""
    assert not commit.failed
    (found,) = commit.tables
    return found.steps


def read(step: StagedStep) -> pa.Table:
    """Return the content of a Parquet object."""
    (path,) = step.files
    with open_located(path) as file:
        found = pq.read_table(file)
    assert found.num_rows == step.rows
    return found


def values(step: StagedStep, *names: str) -> list[tuple[Any, ...]]:
    """Return some columns of a Parquet object."""
    return [tuple(one[name] for name in names) for one in read(step).to_pylist()]


def lines(step: StagedStep) -> list[str]:
    """Return the lines of an object of JSON lines that gzip has compressed."""
    (path,) = step.files
    with open_located(path) as file:
        return gzip.decompress(file.read()).decode().split("\n")[:-1]


def test_both_images_of_each_operation(register: Register, stage: Stage) -> None:
    """What an operation has no image of is null; what an image lacks is named; a delete has at least its key."""
    version = register(table("id", "a", "b"))
    lacks = {"_unchanged": True}
    (step,) = steps(
        stage(
            [
                change("c", 1, version, after={"id": 1, "a": 5, "b": None}),
                change("u", 2, version, before={"id": 1, "a": 5, "b": 6}, after={"id": 1, "a": 7, "b": lacks}),
                change("d", 3, version, before={"id": 1}),
                change("d", 4, version, key={"id": 9}),
                change("r", 5, version, after={"id": 2, "a": 1, "b": 1}),
                change("t", 6, None),
            ]
        )
    )  # fmt: skip
    images = [f"{prefix}_{name}" for prefix in ("before", "after") for name in ("id", "a", "b")]
    assert values(step, "op", *images, "absent") == [
        ("c", None, None, None, 1, 5, None, None),
        ("u", 1, 5, 6, 1, 7, None, ["after_b"]),
        ("d", 1, None, None, None, None, None, ["before_a", "before_b"]),
        ("d", 9, None, None, None, None, None, ["before_a", "before_b"]),
        ("r", None, None, None, 2, 1, 1, None),
        ("t", None, None, None, None, None, None, None),
    ]
    assert step.part == ObjectPart(0, version)
    assert (step.last.segment, step.last.ordinal) == (1, 5)


def test_columns_beside_the_images(register: Register, stage: Stage) -> None:
    """Their names, types and values; a position is null for a snapshot's row."""
    version = register(table("id"))
    (step,) = steps(
        stage(
            [
                {**change("c", 0x16B6C50, version, after={"id": 1}), "event_id": "e-1"},
                {**change("r", 5, version, after={"id": 2}), "tx_id": None},
            ]
        )
    )
    found = read(step)
    assert [(one.name, str(one.type)) for one in found.schema] == [
        ("op", "string"),
        ("op_ts", "timestamp[us, tz=UTC]"),
        ("source_db", "string"),
        ("source_schema", "string"),
        ("source_table", "string"),
        ("source_position", "string"),
        ("source_snapshot", "bool"),
        ("event_id", "string"),
        ("schema_version", "string"),
        ("tx_id", "string"),
        ("sequence", "string"),
        ("absent", "list<element: string>"),
        ("before_id", "int32"),
        ("after_id", "int32"),
    ]
    first, second = found.to_pylist()
    assert first == {
        "op": "c",
        "op_ts": datetime.fromtimestamp(0x16B6C50 / 1e6, UTC),
        "source_db": "shop",
        "source_schema": "public",
        "source_table": "orders",
        "source_position": "lsn:0/016B6C50",
        "source_snapshot": False,
        "event_id": "e-1",
        "schema_version": version,
        "tx_id": "731",
        "sequence": "000000000001-0000000000",
        "absent": None,
        "before_id": None,
        "after_id": 1,
    }
    assert (second["source_position"], second["source_snapshot"], second["tx_id"]) == (None, True, None)  # fmt: skip


def test_a_run_of_a_table_version_is_an_object(register: Register, stage: Stage) -> None:
    """Each has its own columns and types, even if none would hold both, and a number by which they sort."""
    old, new = register(table("id", "a")), register(table("id", "a", "b", type_="boolean"))
    found = steps(
        stage(
            [change("c", 1, old, after={"id": 1, "a": 5})],
            [
                change("c", 2, new, after={"id": True, "a": False, "b": None}),
                change("c", 3, old, after={"id": 2, "a": 6}),
                change("c", DAY, old, after={"id": 3, "a": 7}),
                change("c", 4, old, after={"id": 4, "a": 8}),
            ],
        )
    )
    assert [one.part for one in found] == [
        ObjectPart(0, old, 0),
        ObjectPart(0, new, 1),
        ObjectPart(0, old, 2),
        ObjectPart(DAY // 1_000_000, old, 2),
    ]
    assert [values(one, "sequence", "after_id") for one in found] == [
        [("000000000001-0000000000", 1)],
        [("000000000002-0000000000", True)],
        [("000000000002-0000000001", 2), ("000000000002-0000000003", 4)],
        [("000000000002-0000000002", 3)],
    ]


def test_a_truncate_is_at_its_place(register: Register, stage: Stage) -> None:
    """In the run that it is in, or before; it never begins one. The first of a commit goes with what follows."""
    old, new = register(table("id")), register(table("id", "b"))
    found = steps(
        stage(
            [change("t", 1, None), change("c", 2, old, after={"id": 1}), change("t", 3, None)],
            [change("c", 4, old, after={"id": 2}), change("t", 5, None)],
            [change("c", 6, new, after={"id": 3, "b": 1}), change("t", 7, None)],
        )
    )
    assert [one.part for one in found] == [ObjectPart(0, old, 0), ObjectPart(0, new, 1)]
    runs = [values(one, "op", "after_id") for one in found]
    none = ("t", None)
    assert runs == [[none, ("c", 1), none, ("c", 2), none], [("c", 3), none]]


def test_tables_are_numbered_for_themselves(register: Register, stage: Stage) -> None:
    """One of a single version has no number, and the name that it has always had."""
    old, new = register(table("id")), register(table("id", "b"))
    other = register(table("id", name="items"))
    commit = stage(
        [
            change("c", 1, old, after={"id": 1}),
            {**change("c", 2, other, after={"id": 1}), "table": "items"},
            change("c", 3, new, after={"id": 2, "b": 1}),
            {**change("c", 4, other, after={"id": 2}), "table": "items"},
        ]
    )
    parts = {one.destination[1]: [step.part for step in one.steps] for one in commit.tables}
    assert parts == {
        "orders": [ObjectPart(0, old, 0), ObjectPart(0, new, 1)],
        "items": [ObjectPart(0, other)],
    }


def test_periods_are_objects(register: Register, stage: Stage) -> None:
    """By the UTC time of the event, as fine as the folder distinguishes them; the order within each is that of the log."""
    version = register(table("id"))
    times = (0, DAY - 1, DAY, 5, 32 * DAY)
    rows = [change("c", time, version, after={"id": number}) for number, time in enumerate(times)]

    def ids(folder: str) -> dict[Any, list[Any]]:
        commit = stage(rows, options=f"folder: '{folder}'")
        return {
            one.part.began: [id_ for (id_,) in values(one, "after_id")]
            for one in steps(commit)
            if one.part is not None
        }

    day = 86_400
    assert ids("${source.table}/${time.day}") == {0: [0, 1, 3], day: [2], 32 * day: [4]}
    assert ids("${time.year}/${time.hour}") == {0: [0, 3], day - 3600: [1], day: [2], 32 * day: [4]}
    assert ids("${time.year}-${time.month}") == {0: [0, 1, 2, 3], 31 * day: [4]}
    assert ids("${time.year}") == {0: [0, 1, 2, 3, 4]}
    assert ids("all") == {None: [0, 1, 2, 3, 4]}


def test_fields_that_turn_up_later(
    register: Register, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that a processor has added is a column of text of the same object, also for the rows that were written before."""
    version = register(table("id"))
    monkeypatch.setattr(object_files, "MAX_MEMORY", 0)
    commit = stage(
        [change("c", 1, version, after={"id": 1})],
        [change("c", 2, version, after={"id": 2, "more": "x"})],
        [change("u", 3, version, before={"id": 2, "most": 1}, after={"id": 2})],
    )
    (step,) = steps(commit)
    assert [column.name for column in commit.tables[0].columns.columns] == ["id", "more", "most"]
    assert values(step, "after_id", "after_more", "before_most", "absent") == [
        (1, None, None, None),
        (2, "x", None, None),
        (2, None, "1", None),
    ]
    assert read(step).schema.names[-6:] == [
        "before_id", "before_more", "before_most", "after_id", "after_more", "after_most",
    ]  # fmt: skip


def test_unknown_tables_have_columns_of_text(stage: Stage) -> None:
    """Of a table that the source has not registered every field is text, unless the file declares its type."""
    rows = [row(schema_version=None, after='{"id":7,"n":1.50}', before=None)]
    (step,) = steps(stage(rows, options="types: {public.orders: {n: 'decimal(9,2)'}}"))
    assert read(step).schema.field("after_n").type == pa.decimal128(9, 2)
    assert values(step, "after_id") == [("7",)]
    assert step.part is not None
    assert step.part.version is None


def test_a_value_that_does_not_fit_fails_its_table_only(register: Register, stage: Stage) -> None:
    """The error names the place and not the value; no file of the table is left."""
    good, bad = register(table("id", name="items")), register(table("id"))
    commit = stage(
        [
            change("c", 1, bad, after={"id": 1}),
            {**change("c", 2, good, after={"id": 1}), "table": "items"},
        ],
        [change("c", 3, bad, after={"id": "geheim"}), change("c", 4, bad, after={"id": 4})],
    )
    (failed,) = commit.failed.items()
    assert failed[0] == ("public", "orders")
    assert "table public.orders, segment 2, ordinal 0: a value of column id" in str(failed[1])
    assert "geheim" not in str(failed[1])
    assert [one.destination for one in commit.tables] == [("public", "items")]
    commit.discard()


def test_lines_are_native_events(register: Register, stage: Stage, tmp_path: Path) -> None:
    """A line is the message that a sink of messages gets, with its `sequence`; one object has all table versions."""
    old, new = register(table("id")), register(table("id", "note"))
    rows = [
        change("c", 1, old, after={"id": 1}),
        change("u", 2, new, before={"id": 1}, after={"id": 1, "note": "a\nb\u2028"}),
        change("d", 3, new, before={"id": 1, "note": None}),
        change("t", 4, None, ddl={"sql": "TRUNCATE"}),
        row(op="ddl", after=None, key=None, table="_ddl", schema_version=None),
    ]
    commit = stage(rows, options="format: jsonl")
    (step,) = steps(commit)
    loaded = load_pipeline(tmp_path / "orders.yaml").spec
    numbered = [{**one, "ordinal": number} for number, one in enumerate(rows)]
    events = native_envelope(source_origin(loaded), batch(numbered)).to_pylist()[:4]
    assert lines(step) == [
        f'{str(event)[:-1]},"sequence":"000000000001-{number:010d}"}}'
        for number, event in enumerate(events)
    ]
    assert step.part == ObjectPart(0, None)
    assert step.rows == 4


def test_line_breaks_of_json_documents(stage: Stage) -> None:
    """A document that the source stores with line breaks between its tokens stays one line, with the same value."""
    (step,) = steps(stage([row(after='{"doc":{\n"a":\n1}}')], options="format: jsonl"))
    (line,) = lines(step)
    assert json.loads(line)["after"] == {"doc": {"a": 1}}


def test_a_raw_payload_with_line_breaks_is_no_line(stage: Stage) -> None:
    """Its table is held, because the payload would have to be changed."""
    rows = [row(raw_payload=True, after='"two\\nlines"')]
    commit = stage(rows, options="format: jsonl")
    assert "a raw payload has a line break" in str(commit.failed["public", "orders"])
    (step,) = steps(stage([row(raw_payload=True, after='"one"')], options="format: jsonl"))
    assert lines(step) == ["one"]


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_compression_of_lines(stage: Stage, compression: str) -> None:
    """The content is the same."""
    (step,) = steps(
        stage([row()], [row(pos=7)], options=f"format: jsonl, compression: {compression}")
    )
    with open_located(step.files[0]) as file:
        content = file.read()
    if compression != "none":
        with pa.CompressedInputStream(pa.BufferReader(content), cast("Any", compression)) as stream:
            content = stream.read()
    assert content.count(b"\n") == 2
    assert [json.loads(line)["after"] for line in content.splitlines()] == [{"id": 1}, {"id": 1}]


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd", "none"])
def test_compression_of_parquet(register: Register, stage: Stage, compression: str) -> None:
    """It is that of the file."""
    rows = [change("c", 1, register(table("id")), after={"id": 1})]
    (step,) = steps(stage(rows, options=f"compression: {compression}"))
    with open_located(step.files[0]) as file:
        found = pq.ParquetFile(file).metadata.row_group(0).column(0).compression
    assert found == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


def test_a_commit_is_repeated_alike(register: Register, stage: Stage) -> None:
    """The same segments give the same objects with the same rows."""
    version, later = register(table("id")), register(table("id", "a"))
    rows = [
        [change("c", one * DAY // 3, version, after={"id": one}) for one in range(9)],
        [change("t", 9, None), change("c", 10, later, after={"id": 1, "a": 1})],
        [change("c", 11, version, after={"id": 1}), change("t", 12, None)],
    ]
    first, second = steps(stage(*rows)), steps(stage(*rows))
    assert [one.part for one in first] == [one.part for one in second]
    assert [read(one).to_pylist() for one in first] == [read(one).to_pylist() for one in second]


def test_which_changes_a_sink_gets(
    register: Register, journal: Journal, stager: Callable[[str], ObjectStager]
) -> None:
    """Not operations that it skips, segments for others, or tables that are not asked for."""
    version = register(table("id"))
    rows = [change("c", 1, version, after={"id": 1}), change("d", 2, version, before={"id": 1})]
    one, other = segment(journal, 1, rows), segment(journal, 2, rows)
    segments: list[SegmentRow] = [one, dataclasses.replace(other, sinks=["other"])]
    (step,) = steps(stager("skipped_operations: d").stage(segments))
    assert values(step, "op") == [("c",)]
    assert not stager("prefix: a").stage(segments, skip=frozenset({("public", "orders")})).tables


def test_files_are_discarded(register: Register, stage: Stage, tmp_path: Path) -> None:
    """Nothing of a commit is left in the journal's folder."""
    version = register(table("id"))
    commit = stage([change("c", 1, version, after={"id": 1})])
    assert list(tmp_path.rglob("prepared/*"))
    commit.discard()
    assert not list(tmp_path.rglob("prepared/*"))
