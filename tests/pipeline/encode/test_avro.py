"""Messages in Avro as a sink gets them: beside JSON for others, with tombstones, and without what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.kernels import message_text
from deltaforge_dagster.pipeline.encode.encoder import RegisteredVersions
from deltaforge_dagster.pipeline.encode.files import slices_of
from deltaforge_dagster.pipeline.encode.messages import MessagePlan
from deltaforge_dagster.pipeline.encode.segments import EmptyKeys, EncodedSegments
from deltaforge_dagster.sinks.base import AVRO_MESSAGES, MESSAGES
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.tables import VersionName
from tests.avro import read
from tests.processors.rows import Row, batch, row

PIPELINE = """
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}}
  sinks: [{sinks}]
"""
AVRO = "encoding: {type: avro, schema_registry_url: http://r}"
COLUMNS = (("id", "integer"), ("born", "date"))
TABLE = TableSchema(
    "shop",
    "public",
    "orders",
    tuple(Column(name, type_, None, True, n) for n, (name, type_) in enumerate(COLUMNS, 1)),
    ("id",),
)
VERSION = VersionName("shop", "public", "orders", "sha256:00ff")

Encode = Callable[..., EncodedSegments]


@pytest.fixture
def encode(tmp_path: Path) -> Encode:
    """Encode rows as segment 1 for Kafka sinks, given their ids and more fields."""

    def make(rows: Sequence[Row], **sinks: str) -> EncodedSegments:
        blocks = [
            f"{{type: kafka, config: {{id: {name}, brokers: h, topic: a, {more}}}}}"
            for name, more in sinks.items()
        ]
        path = tmp_path / "shop.yaml"
        path.write_text(PIPELINE.format(sinks=", ".join(blocks)))
        plan = MessagePlan.of(load_pipeline(path).spec).with_versions([(VERSION, TABLE)])
        numbered = [{**one, "ordinal": number} for number, one in enumerate(rows)]
        batches = list(plan.batches([batch(numbered)]))
        unset = dict.fromkeys(one.name for one in fields(SegmentRow))
        row_of = SegmentRow(**{**unset, "segment": 1, "segment_id": "id", "rows": len(rows)})  # type: ignore[arg-type]
        return EncodedSegments(
            [row_of],
            plan.routes,
            [one for number, made in enumerate(batches) for one in slices_of(made, number, "")],
            batches,
            ordinals=None,
            empty_keys=EmptyKeys(lambda _: None),
        )

    return make


def events(encoded: EncodedSegments, sink: str) -> list[dict[str, Any] | None]:
    """Return a sink's events, None for tombstones."""
    found: list[dict[str, Any] | None] = []
    for one in encoded.batches(sink, 1, -1, set_aside=True):
        assert one.messages.schema == AVRO_MESSAGES
        for message in one.messages.to_pylist():
            value, number = message["value"], message["schema"]
            found.append(None if value is None else read(one.schemas[number].text, value))
    return found


UPDATE = row(op="u", before='{"id":1,"born":null}', after='{"id":2,"born":"2000-01-01"}', key='{"id":2}')  # fmt: skip
DELETE = row(op="d", before='{"id":2}', after=None, key='{"id":2}')


def test_several_messages_of_one_change(encode: Encode) -> None:
    """A split update is a delete and an insert with their rows, and each delete has a tombstone; JSON beside it stays."""
    encoded = encode(
        [UPDATE, DELETE],
        many=f"{AVRO}, tombstones: true, key_updates: delete_insert",
        json="tombstones: true",
    )

    found = events(encoded, "many")

    assert [one and one["op"] for one in found] == ["d", None, "c", "d", None]
    inserted = found[2]
    assert inserted is not None
    assert (inserted["before"], inserted["after"]["id"]) == (None, 2)
    deleted = found[3]
    assert deleted is not None
    assert (deleted["before"], deleted["before_missing"]) == ({"id": 2, "born": None}, ["born"])
    (plain,) = encoded.batches("json", 1, -1)
    assert (plain.messages.schema, plain.schemas) == (MESSAGES, ())
    values = plain.messages.column("value").to_pylist()
    assert [one and json.loads(one)["op"] for one in values] == ["u", "d", None]


def test_what_does_not_fit_is_refused(encode: Encode) -> None:
    """Only the change itself, only for the sink with Avro, with the reason and what to do."""
    rows = [
        row(after='{"id":1}'),
        row(after='{"id":2,"born":"infinity"}'),
        row(after='{"id":3,"born":null}'),
    ]
    encoded = encode(rows, avro=AVRO, json="key_updates: update")

    (made,) = encoded.batches("avro", 1, -1, set_aside=True)
    (refused,) = made.refused

    assert made.messages.column("ordinal").to_pylist() == [0, 2]
    assert (refused.ordinal, refused.cause) == (1, "serialization")
    assert "its column 'born' does not fit: it is not a value of that type" in str(refused)
    assert "segment 1, ordinal 1" in str(refused)
    (plain,) = encoded.batches("json", 1, -1)
    assert plain.messages.num_rows == 3
    stopped = encoded.batches("avro", 1, -1)
    assert next(stopped).messages.num_rows == 1
    with pytest.raises(Undeliverable):
        next(stopped)


def test_what_is_shared(encode: Encode) -> None:
    """Sinks with the same types share their messages, whatever their registries are; others have their own."""
    encoded = encode(
        [row()],
        one=AVRO,
        other=AVRO.replace("http://r", "http://s"),
        long=AVRO.replace("http://r", "http://r, naive_timestamp_mode: timestamp"),
    )
    routes = encoded._routes

    names = [routes[one].columns["value"] for one in ("one", "other", "long")]
    assert names[0] == names[1] != names[2]


def test_a_message_that_is_too_large(encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change whose message would exceed Arrow's limit is refused, and no other one."""
    monkeypatch.setattr(message_text, "MAX_BYTES", 4_000)
    rows = [row(after=json.dumps({"id": n}), ddl="x" * n) for n in (1, 5_000, 2)]
    encoded = encode(rows, avro=AVRO, json="key_updates: update")

    (refused,) = (one for made in encoded.batches("avro", 1, -1, set_aside=True) for one in made.refused)  # fmt: skip

    assert (refused.ordinal, refused.cause) == (1, "too_large")
    found = events(encoded, "avro")
    assert [one and one["after"]["id"] for one in found] == [1, 2]


def test_a_slice_of_a_batch(encode: Encode) -> None:
    """Messages after an ordinal are those of the rest, whichever bytes are before them."""
    encoded = encode([row(after=json.dumps({"id": n})) for n in range(5)], avro=AVRO)

    (made,) = encoded.batches("avro", 1, 2)

    values = made.messages.column("value")
    assert [
        read(made.schemas[1].text, one)["after"]["id"] for one in values.to_pylist() if one
    ] == [3, 4]
    assert isinstance(values, pa.BinaryArray)


class Histories:
    """A repository that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def histories(self, name: str) -> list[Any]:
        """Return nothing."""
        assert name == "shop"
        self.reads += 1
        return []


def test_versions_are_read_once() -> None:
    """The store is read when a version is asked for that was not asked for before, and for nothing else."""
    store = Histories()
    versions = RegisteredVersions(store, "shop")  # type: ignore[arg-type]

    for wanted in ({("a", "1")}, {("a", "1")}, set(), {("a", "1"), ("a", "2")}, {("a", "2")}):
        assert versions.of(wanted) == []

    assert store.reads == 2
