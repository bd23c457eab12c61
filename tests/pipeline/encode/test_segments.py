"""What a sink gets of encoded messages, from memory: whole changes, and only its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.kernels import message_text as text
from deltaforge_dagster.pipeline.encode.files import (
    BatchSlice,
    reported,
    slices_of,
    write_partition,
)
from deltaforge_dagster.pipeline.encode.messages import MessagePlan
from deltaforge_dagster.pipeline.encode.segments import EmptyKeys, EncodedSegments
from deltaforge_dagster.processors.messages.expansion import copy_id
from deltaforge_dagster.state.records import SegmentRow
from tests.pipeline.encode.test_files import resident
from tests.processors.rows import Row, batch, row

PIPELINE = """
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}}
  sinks: [{sinks}]
"""
KAFKA = '{{type: kafka, config: {{id: {id}, brokers: "localhost:9092", topic: "{topic}"{more}}}}}'

_UNSET = dict.fromkeys(field.name for field in dataclasses.fields(SegmentRow))

Make = Callable[..., EncodedSegments]


def segment(rows: int) -> SegmentRow:
    """Return the row of segment 1."""
    return SegmentRow(**{**_UNSET, "segment": 1, "segment_id": "id", "rows": rows})  # type: ignore[arg-type]


@pytest.fixture
def told() -> list[str]:
    """What people were told."""
    return []


@pytest.fixture
def encode(tmp_path: Path, told: list[str]) -> Make:
    """Encode rows as segment 1 for Kafka sinks; of each its id, its topic, and more fields."""
    empty_keys = EmptyKeys(told.append)

    def make(rows: Sequence[Row], **sinks: str) -> EncodedSegments:
        blocks = []
        for name, fields in sinks.items():
            topic, _, more = fields.partition(";")
            blocks.append(KAFKA.format(id=name, topic=topic, more=more and f", {more}"))
        (tmp_path / "shop.yaml").write_text(PIPELINE.format(sinks=", ".join(blocks)))
        plan = MessagePlan.of(load_pipeline(tmp_path / "shop.yaml").spec)
        numbered = [{**one, "ordinal": number} for number, one in enumerate(rows)]
        batches = list(plan.batches([batch(numbered)]))
        slices = [one for number, made in enumerate(batches) for one in slices_of(made, number, "")]
        encoded = EncodedSegments(
            [segment(len(rows))], plan.routes, slices, batches, ordinals=None, empty_keys=empty_keys
        )
        encoded.check()
        return encoded

    return make


def messages(
    encoded: EncodedSegments, sink: str, after: int = -1, **options: bool
) -> list[dict[str, Any]]:
    """Return a sink's messages."""
    batches = encoded.batches(sink, 1, after, **options)
    return [one for made in batches for one in made.messages.to_pylist()]


UPDATE = row(op="u", before='{"id":1}', after='{"id":2}', key='{"id":2}')
DELETE = row(op="d", before='{"id":2}', after=None, key='{"id":2}')
ID = row()["event_id"]


def test_several_messages_of_one_change(encode: Make) -> None:
    """Same ordinal, own ids, the delete's key; a tombstone has no value. Siblings get one each."""
    encoded = encode(
        [UPDATE, DELETE], many="a;tombstones: true, key_updates: delete_insert", one="a"
    )

    many, one = messages(encoded, "many"), messages(encoded, "one")

    assert [(m["ordinal"], m["key"], m["event_id"], m["change_id"]) for m in many] == [
        (0, '{"id":1}', ID, None),
        (0, '{"id":1}', copy_id(ID, 2), ID),
        (0, '{"id":2}', copy_id(ID, 3), ID),
        (1, '{"id":2}', ID, None),
        (1, '{"id":2}', copy_id(ID, 2), ID),
    ]
    assert [m["value"] and json.loads(m["value"])["op"] for m in many] == [
        "d",
        None,
        "c",
        "d",
        None,
    ]
    assert [m["idempotency_key"].rpartition("|")[2] for m in many] == [m["event_id"] for m in many]
    assert [m["value"] and json.loads(m["value"])["event_id"] for m in many[:3]] == [
        ID, None, copy_id(ID, 3),
    ]  # fmt: skip
    assert [(m["ordinal"], m["key"], m["change_id"]) for m in one] == [
        (0, '{"id":2}', None),
        (1, '{"id":2}', None),
    ]
    assert messages(encoded, "many", 0) == many[3:]
    assert messages(encoded, "many", 1) == []


def test_default_keys(tmp_path: Path) -> None:
    """Kafka's is the row's, the same for every change of it; Redis has the event's id, NATS none."""
    kinds = {
        "kafka": 'brokers: "localhost:9092", topic: a',
        "redis": 'uri: "redis://localhost", stream: a',
        "nats": 'url: "nats://localhost", subject: a, stream: s',
    }
    sinks = ", ".join(
        f"{{type: {one}, config: {{id: {one}, {rest}}}}}" for one, rest in kinds.items()
    )
    (tmp_path / "shop.yaml").write_text(PIPELINE.format(sinks=sinks))
    plan = MessagePlan.of(load_pipeline(tmp_path / "shop.yaml").spec)
    update = row(op="u", before='{"id":1}')
    delete = row(op="d", before='{"id":1}', after=None)
    (made,) = plan.batches([batch([row(), update, delete, row(route_key="k")])])

    keys = {one: made.column(plan.routes[one].columns["key"]).to_pylist() for one in kinds}

    assert keys == {
        "kafka": ['{"id":1}'] * 3 + ["k"],
        "redis": [ID] * 3 + ["k"],
        "nats": [None] * 3 + ["k"],
    }


def test_tables_have_no_messages(tmp_path: Path) -> None:
    """A sink that writes tables has no route, and no column is made for it."""
    redis = '{type: redis, config: {id: a, uri: "redis://localhost", stream: a}}'
    lake = "{type: delta, config: {id: lake, path: /lake}}"
    plans = []
    for sinks in (redis, f"{redis}, {lake}"):
        (tmp_path / "shop.yaml").write_text(PIPELINE.format(sinks=sinks))
        plans.append(MessagePlan.of(load_pipeline(tmp_path / "shop.yaml").spec))

    alone, beside = plans
    assert list(beside.routes) == ["a"]
    assert list(beside.columns) == list(alone.columns)


def test_a_tombstone_has_the_delete_s_key(encode: Make) -> None:
    """Whatever the key is made of, the event's own id included."""
    keyless = row(op="d", before='{"id":2}', after=None, key=None)
    encoded = encode(
        [DELETE, keyless],
        default="a;tombstones: true",
        own='a;tombstones: true, key: "${event_id}-${before.id}"',
    )

    for sink in ("default", "own"):
        keys = [one["key"] for one in messages(encoded, sink)]
        assert keys[::2] == keys[1::2]


def test_what_a_sink_skips_is_passed(encode: Make) -> None:
    """Nothing to send is no batch, and the rest of a segment is asked for by ordinal."""
    rows = [row(), DELETE, row(), DELETE, DELETE]
    encoded = encode(
        rows, inserts='a;skipped_operations: "d"', nothing="a;filter: {synthetic_only: true}"
    )

    assert [one["ordinal"] for one in messages(encoded, "inserts")] == [0, 2]
    assert [one["ordinal"] for one in messages(encoded, "inserts", 0)] == [2]
    assert list(encoded.batches("inserts", 1, 2)) == []
    assert list(encoded.batches("nothing", 1, -1)) == []


def test_refused_changes_are_set_aside(encode: Make) -> None:
    """All of them are named, in order, and everything else comes; nothing of a refused change does."""
    gone = row(op="d", before='{"id":7}', after=None, key='{"id":7}')
    rows = [UPDATE, gone, row(), gone, row(after=None, topic="audit")]
    sink = "t-${after.id};tombstones: true, key_updates: delete_insert"
    encoded = encode(rows, sink=sink, calm="a")

    (found,) = encoded.batches("sink", 1, -1, set_aside=True)
    (calm,) = encoded.batches("calm", 1, -1, set_aside=True)

    assert [(one.ordinal, one.cause) for one in found.refused] == [
        (0, "routing"), (1, "routing"), (3, "routing"),
    ]  # fmt: skip
    assert str(found.refused[1]) == (
        "sink sink: ${after.id} in 't-${after.id}' has no value for the event at segment 1, "
        "ordinal 1; use a variable that every event has"
    )
    assert found.messages.column("ordinal").to_pylist() == [2, 4]
    assert found.messages.column("destination").to_pylist() == ["t-1", "audit"]
    assert (calm.refused, calm.messages.num_rows) == ((), 5)
    (rest,) = encoded.batches("sink", 1, 2, set_aside=True)
    assert ([one.ordinal for one in rest.refused], rest.messages.num_rows) == ([3], 1)


def test_a_batch_of_refused_changes_only(encode: Make) -> None:
    """It comes without messages, since somebody has to hear of them; what is skipped is not refused."""
    encoded = encode(
        [DELETE, DELETE], sink="t-${after.id}", inserts='t-${after.id};skipped_operations: "d"'
    )

    (found,) = encoded.batches("sink", 1, -1, set_aside=True)

    assert ([one.ordinal for one in found.refused], found.messages.num_rows) == ([0, 1], 0)
    assert list(encoded.batches("inserts", 1, -1, set_aside=True)) == []


@pytest.mark.parametrize("most", [1200, 1500])
def test_changes_that_are_too_large(
    encode: Make, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What Arrow cannot hold is refused, alone; sinks whose messages fit get it."""
    monkeypatch.setattr(text, "MAX_BYTES", most)
    large = row(after=json.dumps({"id": 5, "t": "x" * 800}), headers='{"a":"b"}')
    encoded = encode(
        [row(), large, DELETE],
        sink='a;key: "${after.t}${after.t}", tombstones: true',
        calm="a;envelope: {type: cloudevents, type_prefix: p}",
    )

    (found,) = {
        one for made in encoded.batches("sink", 1, -1, set_aside=True) for one in made.refused
    }

    assert (found.ordinal, found.cause) == (1, "too_large")
    assert str(found) == (
        "sink sink: no message of 2 GiB or more can be made of the event at segment 1, ordinal 1; "
        "leave out what makes it so large"
    )
    sent = messages(encoded, "sink", set_aside=True)
    assert [one["ordinal"] for one in sent] == [0, 2, 2]
    assert [one["ordinal"] for one in messages(encoded, "calm")] == [0, 1, 2]


def test_a_change_too_large_to_be_divided(encode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not copied beyond what Arrow can hold: the change is refused for every sink."""
    monkeypatch.setattr("deltaforge_dagster.processors.messages.expansion.MAX_BYTES", 3000)
    large = row(op="d", before=json.dumps({"id": 5, "t": "x" * 1600}), after=None)
    encoded = encode([row(), large], sink="a;tombstones: true", calm="a")

    for sink in ("sink", "calm"):
        refused = [
            one for made in encoded.batches(sink, 1, -1, set_aside=True) for one in made.refused
        ]
        assert [(one.ordinal, one.cause) for one in refused] == [(1, "too_large")]
        assert [one["ordinal"] for one in messages(encoded, sink, set_aside=True)] == [0]


def test_empty_keys_are_told_once(encode: Make, told: list[str]) -> None:
    """Once for each key and variable, of events that the sink gets, and not where a key is set."""
    rows = [row(), DELETE, row(op="d", before=None, after=None, route_key="k"), DELETE]
    key = 'a;key: "${after.id}/${before.id}"'
    encoded = encode(rows, sink=key, again=key, skips=f'{key}, skipped_operations: "c,d"', fine="a")

    for _ in range(2):
        for sink in ("fine", "skips", "sink", "again"):
            messages(encoded, sink)

    end = (
        "in the key '${after.id}/${before.id}' has no value for some events and is empty text there; "
        "${key.<column>} has a value for every change of a row with a primary key"
    )
    assert told == [f"sink sink: ${{before.id}} {end}", f"sink sink: ${{after.id}} {end}"]
    assert [one["key"] for one in messages(encoded, "sink")] == ["1/", "/2", "k", "/2"]


def test_check_finds_every_gap() -> None:
    """A missing slice, a doubled one, and one of an unknown segment are all refused."""

    def batch_slice(ordinal: int, rows: int, number: int = 1) -> BatchSlice:
        return BatchSlice("", 0, 0, 0, number, ordinal, rows, 2 * rows, 10)

    def encoded(*slices: BatchSlice) -> EncodedSegments:
        return EncodedSegments(
            [segment(4)], {}, slices, [], ordinals=None, empty_keys=EmptyKeys(print)
        )

    encoded(batch_slice(2, 2), batch_slice(0, 2)).check()
    for slices in (
        [],
        [batch_slice(0, 2)],
        [batch_slice(0, 2), batch_slice(3, 1)],
        [batch_slice(0, 2), batch_slice(0, 2)],
        [batch_slice(0, 4), batch_slice(4, 1)],
        [batch_slice(0, 4), batch_slice(0, 4)],
        [batch_slice(0, 4), batch_slice(0, 1, 2)],
    ):
        with pytest.raises(JournalDamaged):
            encoded(*slices).check()


def test_what_was_sent_leaves_memory(tmp_path: Path) -> None:
    """Only the newest batch stays in memory, of files that are not read in the order of their batches."""
    size, rows = 1 << 20, 8
    (tmp_path / "shop.yaml").write_text(
        PIPELINE.format(sinks=KAFKA.format(id="sink", topic="a", more=""))
    )
    plan = MessagePlan.of(load_pipeline(tmp_path / "shop.yaml").spec)
    value = json.dumps({"a": "x" * size})
    made = [
        one
        for number in range(rows)
        for one in plan.batches([batch([{**row(after=value), "ordinal": number}])])
    ]
    one, other = (
        _file(tmp_path, [made[number] for number in numbers])
        for numbers in ((4, 5, 0, 1), (6, 7, 2, 3))
    )
    encoded = EncodedSegments(
        [segment(rows)],
        plan.routes,
        [*one, *other],
        [],
        ordinals=None,
        empty_keys=EmptyKeys(lambda _: None),
    )
    seen, memory = [], []

    for _ in range(2):
        left = encoded.batches("sink", 1, -1)
        while batches := list(itertools.islice(left, 4)):
            messages = [one for sent in batches for one in sent.messages.to_pylist()]
            seen += [(one["ordinal"], len(one["value"]) > size) for one in messages]
            encoded.sent("sink")
            memory.append(sum(resident(slices[0].path) for slices in (one, other)))

    assert seen == [(number, True) for number in range(rows)] * 2
    assert max(memory) < 2 * size


def _file(folder: Path, batches: Iterable[pa.RecordBatch]) -> list[BatchSlice]:
    """Write batches to a file, and return their slices."""
    return reported(pa.Table.from_batches(list(write_partition(str(folder), "run.job", batches))))
