"""Encoding segments through a real Spark server: order, sharing, and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import (
    JournalDamaged,
    SparkUnavailable,
    StoreUnavailable,
    Undeliverable,
)
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import encoder as encoder_module
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import SegmentRow
from tests.processors.rows import Row, row

pytestmark = pytest.mark.spark

PIPELINE = """
metadata: {name: shop, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}
  sinks:
    - type: redis
      config: {id: by-table, uri: "redis://localhost", stream: "df:${source.table}"}
    - type: redis
      config: {id: by-id, uri: "redis://localhost", stream: "id-${after.id}", key: "${after.id}"}
    - type: file
      config: {id: lines, path: "/tmp/all.jsonl"}
"""


class OneSession:
    """A provider with one session that never ends; remembers what it was told of errors."""

    elsewhere = False

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self.errors: list[BaseException] = []

    def session(self) -> SparkSession:
        """Return the session."""
        return self._session

    def lost(self, error: BaseException) -> bool:
        """Note the error."""
        self.errors.append(error)
        return False


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal((tmp_path / "a [journal]").as_uri())


@pytest.fixture
def spec(tmp_path: Path) -> PipelineSpec:
    """A pipeline with three sinks."""
    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE)
    return load_pipeline(file).spec


@pytest.fixture
def sessions(spark: SparkSession) -> OneSession:
    """A provider over the test session."""
    return OneSession(spark)


@pytest.fixture
def encoder(spec: PipelineSpec, journal: Journal, sessions: OneSession) -> Encoder:
    """A preparer of the pipeline."""
    return Encoder(spec, journal, sessions, "run-1")


@pytest.fixture
def through_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every result through encoded files, however small."""
    monkeypatch.setattr(encoder_module, "SMALL_ROWS", -1)


def segment(journal: Journal, number: int, rows: Sequence[Row]) -> SegmentRow:
    """Write a segment and return its row."""
    writer = journal.writer("shop", "uid", number, 1)
    for start in range(0, len(rows), 500):
        pylist = [{name: one[name] for name in CAPTURED.names} for one in rows[start : start + 500]]
        writer.write(pa.RecordBatch.from_pylist(pylist, schema=CAPTURED))
    written = writer.close()
    return SegmentRow(
        segment=number,
        start_position=LsnPosition(number).to_json(),
        end_position=LsnPosition(number + 1).to_json(),
        **written.recorded,
        range=1,
        epoch=1,
        created_at=0.0,
    )


def inserts(first: int, count: int) -> list[Row]:
    """Return inserts with ids from `first` on."""
    return [row(after=f'{{"id":{one}}}', pos=one) for one in range(first, first + count)]


def ids(batches: Sequence[SinkBatch]) -> list[int]:
    """Return the ids in the messages, in order."""
    return [
        json.loads(str(value))["after"]["id"]
        for batch in batches
        for value in batch.messages.column("value").to_pylist()
    ]


def encoded_names(journal: Journal) -> list[Path]:
    """Return the encoded files that exist."""
    return sorted(Path(journal.encoded_dir("shop")).iterdir())


@pytest.mark.parametrize("small", [True, False])
def test_messages_of_a_sink(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """One sink's messages, column by column, on both ways, in the run and by Spark."""
    if not small:
        monkeypatch.setattr(encoder_module, "SMALL_ROWS", -1)
    one = segment(journal, 7, [row(headers='{"a":"b"}'), row(topic="audit", route_key="k")])

    encoded = encoder.encode([one])
    (batch,) = encoded.batches("by-table", 7, -1)

    assert (batch.segment, batch.segment_id, batch.replay) == (7, one.segment_id, None)
    assert batch.messages.schema == MESSAGES
    batch.messages.validate(full=True)
    messages = batch.messages.drop_columns(["value"]).to_pylist()
    event_id = row()["event_id"]
    assert messages == [
        {
            "ordinal": 0,
            "destination": "df:orders",
            "key": event_id,
            "event_id": event_id,
            "idempotency_key": f"acme|shop.orders|731|{event_id}",
            "headers": '{"a":"b"}',
            "change_id": None,
        },
        {
            "ordinal": 1,
            "destination": "audit",
            "key": "k",
            "event_id": event_id,
            "idempotency_key": f"acme|shop.orders|731|{event_id}",
            "headers": None,
            "change_id": None,
        },
    ]
    (other,) = encoded.batches("by-id", 7, -1)
    assert other.messages.column("destination").to_pylist() == ["id-1", "audit"]
    assert other.messages.column("key").to_pylist() == ["1", "k"]
    assert other.messages.column("value").equals(batch.messages.column("value"))
    assert (encoded.bytes > 0, len(encoded_names(journal))) == (True, 0 if small else 1)
    encoded.discard()


@pytest.mark.usefixtures("through_files")
def test_many_segments_in_order(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of very different sizes, many tasks: each segment comes out whole and in order."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 256 << 10)
    monkeypatch.setattr(encoder_module, "TASK_BYTES", 60_000)
    sizes = {3: 40, 4: 6000, 5: 1, 6: 2500, 7: 9000}
    segments = [segment(journal, n, inserts(n * 10_000, size)) for n, size in sizes.items()]

    encoded = encoder.encode(segments)

    assert (encoded.first_segment, encoded.last_segment) == (3, 7)
    assert len(encoded_names(journal)) > 1
    for number, size in sizes.items():
        batches = list(encoded.batches("by-table", number, -1))
        assert ids(batches) == list(range(number * 10_000, number * 10_000 + size))
    rest = list(encoded.batches("lines", 6, 1233))
    assert ids(rest) == list(range(61_234, 62_500))
    assert rest[0].messages.column("ordinal")[0].as_py() == 1234
    assert list(encoded.batches("lines", 6, 2499)) == []
    encoded.discard()
    encoded.discard()
    assert encoded_names(journal) == []


@pytest.mark.usefixtures("through_files")
def test_a_later_job_writes_over_the_files_of_an_earlier_one(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new file, also for fewer rows; those of a failed job go, and all when no backlog is left."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 64 << 10)
    monkeypatch.setattr(encoder_module, "TASK_BYTES", 30_000)
    segments = [
        segment(journal, n, inserts(n * 10_000, rows)) for n, rows in ((1, 4000), (2, 2000))
    ]
    first = encoder.encode(segments[:1])
    names = encoded_names(journal)
    encoder.recycle(first)
    encoder.recycle(first)

    second = encoder.encode(segments[1:])

    assert encoded_names(journal) == names
    assert len(names) > 1
    assert ids(list(second.batches("lines", 2, -1))) == list(range(20_000, 22_000))
    encoder.recycle(second)
    journal.delete(segments[0].path)
    with pytest.raises(JournalDamaged):
        encoder.encode(segments[:1])
    assert encoded_names(journal) == []
    encoder.recycle(encoder.encode(segments[1:]))
    assert encoded_names(journal)
    monkeypatch.setattr(encoder_module, "SMALL_ROWS", 1000)
    encoder.encode([segment(journal, 3, inserts(0, 1))])
    assert encoded_names(journal) == []


@pytest.mark.usefixtures("through_files")
def test_a_large_segment_in_parts(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole row groups each, none too large; together every row once; only their files are read."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 128 << 10)
    monkeypatch.setattr(encoder_module, "_ONE_PART_BYTES", 64 << 10)
    monkeypatch.setattr(encoder_module, "PART_ROW_GROUPS", 3)
    small, large = segment(journal, 1, inserts(0, 100)), segment(journal, 2, inserts(100, 9000))

    parts = encoder.parts(large)

    assert encoder.parts(small) == [range(100)]
    groups = journal.row_groups(large.path)
    assert sum(groups) == 9000
    assert (len(groups), len(parts)) == (9, 3)
    found = []
    for part in parts:
        encoded = encoder.encode([large], part)
        found += ids(list(encoded.batches("by-id", 2, -1)))
        assert encoded.last_ordinal(2) == part.stop - 1
        inside = next(encoded.batches("by-id", 2, part.start + 7)).messages
        assert inside.column("ordinal")[0].as_py() == part.start + 8
        encoded.discard()
    assert found == list(range(100, 9100))
    with pytest.raises(JournalDamaged, match="numbered from 8990"):
        encoder.encode([large], range(8990, 9010))
    with pytest.raises(JournalDamaged, match="holds 9000 rows, not the 8999"):
        encoder.parts(dataclasses.replace(large, rows=8999))


@pytest.mark.usefixtures("through_files")
def test_changes_with_several_messages(
    journal: Journal, sessions: OneSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through files and several tasks: every change once, with all of its messages, for each sink."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 256 << 10)
    monkeypatch.setattr(encoder_module, "TASK_BYTES", 60_000)
    kafka = 'type: kafka, config: {brokers: "localhost:9092", topic: all'
    sinks = (
        f"    - {{{kafka}, id: many, tombstones: true, key_updates: delete_insert}}}}\n"
        f"    - {{{kafka}, id: deletes, skipped_operations: u}}}}\n"
    )
    file = tmp_path / "several.yaml"
    file.write_text(PIPELINE.replace("name: shop", "name: several") + sinks)
    encoder = Encoder(load_pipeline(file).spec, journal, sessions, "run-1")
    update = {"op": "u", "before": '{"id":1}'}
    rows = [
        row(**update, after=f'{{"id":{n}}}', key=f'{{"id":{n}}}', pos=n) if n % 3
        else row(op="d", before=f'{{"id":{n}}}', after=None, pos=n)
        for n in range(2, 12_002)
    ]  # fmt: skip
    one = segment(journal, 1, rows)

    encoded = encoder.encode([one])

    shapes = {"u": "dtc", "d": "dt"}
    batches = list(encoded.batches("many", 1, -1))
    found: list[list[str]] = [[] for _ in rows]
    for each in batches:
        messages = each.messages.select(["ordinal", "value"]).to_pylist()
        assert len(messages) > 0
        for message in messages:
            event = message["value"] and json.loads(message["value"])
            found[message["ordinal"]].append(event["op"] if event else "t")
    assert ["".join(one) for one in found] == [shapes[str(one["op"])] for one in rows]
    ends = [each.messages.column("ordinal")[-1].as_py() for each in batches]
    starts = [each.messages.column("ordinal")[0].as_py() for each in batches]
    assert (len(batches) > 2, starts[1:]) == (True, [end + 1 for end in ends[:-1]])
    rest = next(encoded.batches("many", 1, 7000)).messages
    assert rest.column("ordinal")[0].as_py() == 7001
    deletes = [
        n for b in encoded.batches("deletes", 1, -1) for n in b.messages["ordinal"].to_pylist()
    ]
    assert deletes == [n for n, one in enumerate(rows) if one["op"] == "d"]
    encoded.discard()


@pytest.mark.usefixtures("through_files")
def test_batches_are_cut_by_bytes(encoder: Encoder, journal: Journal) -> None:
    """Large rows make batches of few rows: memory is bounded by bytes, not by a row count."""
    text = "x" * 1_000_000
    one = segment(journal, 1, [row(after=f'{{"id":1,"t":"{text}"}}') for _ in range(20)])

    batches = list(encoder.encode([one]).batches("by-table", 1, -1))

    assert sum(batch.messages.num_rows for batch in batches) == 20
    assert max(batch.messages.nbytes for batch in batches) < 9 << 20


@pytest.mark.parametrize("small", [True, False])
def test_unresolved_destination_stops_that_sink(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """What comes before the event is sent; then an error names template, variable and place."""
    if not small:
        monkeypatch.setattr(encoder_module, "SMALL_ROWS", -1)
    one = segment(journal, 2, [*inserts(0, 3), row(after=None, op="d", before='{"id":9}')])
    encoded = encoder.encode([one])

    batches = encoded.batches("by-id", 2, 0)
    assert ids([next(batches)]) == [1, 2]
    with pytest.raises(Undeliverable) as caught:
        next(batches)

    assert (caught.value.ordinal, caught.value.cause) == (3, "routing")
    assert str(caught.value) == (
        "sink by-id: ${after.id} in 'id-${after.id}' has no value for the event at segment 2, "
        "ordinal 3; use a variable that every event has"
    )
    assert sum(one.messages.num_rows for one in encoded.batches("lines", 2, -1)) == 4
    encoded.discard()


@pytest.mark.parametrize("small", [True, False])
def test_missing_journal_file(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """A segment whose file is gone is damage, and says which, on both ways."""
    if not small:
        monkeypatch.setattr(encoder_module, "SMALL_ROWS", -1)
    one = segment(journal, 9, inserts(0, 1))
    journal.delete(one.path)

    with pytest.raises(JournalDamaged, match="is missing"):
        encoder.encode([one])


@pytest.mark.usefixtures("through_files")
def test_journal_file_with_other_rows(encoder: Encoder, journal: Journal) -> None:
    """A file with more or fewer rows than its row says is refused, and leaves nothing behind."""
    one = segment(journal, 9, inserts(0, 3))
    for rows in (2, 4):
        with pytest.raises(JournalDamaged, match="segment 9: its journal file"):
            encoder.encode([dataclasses.replace(one, rows=rows)])

    assert encoded_names(journal) == []


@pytest.mark.usefixtures("through_files")
def test_a_folder_that_cannot_be_written(
    encoder: Encoder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and what cannot be written now can be tried again."""
    one = segment(journal, 4, inserts(0, 3))
    monkeypatch.setattr(journal, "encoded_dir", lambda _: "/nowhere/prepared")

    with pytest.raises(StoreUnavailable, match=r"/nowhere/prepared/.*No such file or directory"):
        encoder.encode([one])


@pytest.mark.usefixtures("through_files")
def test_failed_job(
    encoder: Encoder, journal: Journal, sessions: OneSession, tmp_path: Path
) -> None:
    """A job that fails can be tried again; its error shows no row and its files are gone."""
    one = segment(journal, 4, inserts(0, 3))
    (file,) = tmp_path.rglob(Path(one.path).name)
    pq.write_table(pa.table({"secret-4711": [1, 2, 3]}), file)

    with pytest.raises(SparkUnavailable) as caught:
        encoder.encode([one])

    assert str(caught.value).startswith("segments 4 to 4: the Spark job failed (")
    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    (error,) = sessions.errors
    assert isinstance(error, PySparkException)
