"""Envelopes, byte for byte against a plain Python reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.processors.messages.envelope import (
    Envelope,
    EventOrigin,
    cloudevents_envelope,
    debezium_envelope,
    native_envelope,
)
from tests.processors.rows import (
    Row,
    batch,
    cloudevent,
    debezium,
    dumps,
    event,
    position_fields,
    row,
    rows,
)

POSTGRES = EventOrigin("postgresql", "orders-db", "acme", position_fields("postgresql"))
PREFIX = 'com.example."shop"'
ENVELOPES: dict[str, tuple[Envelope, Callable[[Row, EventOrigin], dict[str, Any]]]] = {
    "native": (native_envelope, event),
    "debezium": (debezium_envelope, debezium),
    "cloudevents": (
        functools.partial(cloudevents_envelope, PREFIX),
        functools.partial(cloudevent, type_prefix=PREFIX),
    ),
}


def envelopes(given_rows: list[Row], origin: EventOrigin, kind: str = "native") -> list[str]:
    """Return the envelopes of rows, in order."""
    made = ENVELOPES[kind][0](origin, batch(given_rows))
    made.validate(full=True)
    return [str(one) for one in made.to_pylist()]


@pytest.mark.parametrize("kind", ENVELOPES)
@given(st.lists(rows, min_size=1, max_size=60), st.sampled_from(["postgresql", "mysql"]))
def test_equals_the_reference(kind: str, given_rows: list[Row], connector: str) -> None:
    """For any row, the bytes equal those of `json.dumps` of the event, whatever characters its names have."""
    origin = EventOrigin(connector, 'the "source"\n', "ténant\\", position_fields(connector))

    found = envelopes(given_rows, origin, kind)

    assert found == [dumps(ENVELOPES[kind][1](one, origin)) for one in given_rows]


@pytest.mark.parametrize("rows_each", [1, 1500])
def test_a_slice_is_like_the_whole(rows_each: int) -> None:
    """Rows from the middle of a batch give the same texts, even more rows than are written at a time."""
    given_rows = [
        row(after=None if one % 3 else f'{{"id":{one}}}', pos=one, ts_us=one * 1000, tx_id=str(one))
        for one in range(3 * rows_each)
    ]
    whole = batch(given_rows)

    found = native_envelope(POSTGRES, whole.slice(rows_each, rows_each))

    expected = [dumps(event(one, POSTGRES)) for one in given_rows[rows_each : 2 * rows_each]]
    assert found.to_pylist() == expected


def test_whole_text() -> None:
    """A PostgreSQL insert has all keys in the documented order."""
    from deltaforge_dagster import __version__  # noqa: PLC0415 - only this sentence needs it

    (found,) = envelopes([row(tx_end=True)], POSTGRES)

    assert found == (
        f'{{"before":null,"after":{{"id":1}},"source":{{"version":"deltaforge-{__version__}",'
        '"connector":"postgresql","name":"orders-db","ts_ms":1700000000123,"db":"shop",'
        '"schema":"public","table":"orders","lsn":"0/016B6C50","txId":731},"op":"c",'
        '"ts_ms":1700000000123,"transaction":{"id":"731"},'
        '"event_id":"0192f0c1-0000-7000-8000-000000000001","tenant_id":"acme",'
        '"schema_version":"sha256:00ff","schema_sequence":3,"tx_end":true}'
    )


def test_row_images_keep_their_bytes() -> None:
    """Numbers of any length, trailing zeros, key order and duplicate keys pass unchanged."""
    image = '{"z":12345678901234567890123456789012345678901,"a":1.10,"e":1e400,"a":-0.0}'

    (found,) = envelopes([row(before=image, after=image)], POSTGRES)

    assert found.startswith(f'{{"before":{image},"after":{image},')


@pytest.mark.parametrize("kind", ENVELOPES)
def test_raw_payload_is_the_after_image(kind: str) -> None:
    """A raw payload is sent without envelope; without an image it is `null`."""
    given_rows = [row(raw_payload=True), row(raw_payload=True, after=None, op="d"), row()]

    *raw, whole = envelopes(given_rows, POSTGRES, kind)

    assert raw == ['{"id":1}', "null"]
    assert whole == dumps(ENVELOPES[kind][1](row(), POSTGRES))


def test_whole_cloudevent() -> None:
    """A delete is as documented: it has nulls, but neither log position nor tenant."""
    gone = row(op="d", before='{"id":1}', after=None, ts_us=1_736_935_445_007_999, tx_end=True)

    (found,) = envelopes([gone], POSTGRES, "cloudevents")

    assert found == (
        '{"specversion":"1.0","id":"0192f0c1-0000-7000-8000-000000000001",'
        '"source":"deltaforge/orders-db/public.orders","type":"com.example.\\"shop\\".deleted",'
        '"time":"2025-01-15T10:04:05.007Z","datacontenttype":"application/json",'
        '"subject":"public.orders","data":{"before":{"id":1},"after":null,"op":"d"}}'
    )


def test_ddl_has_its_place_and_is_no_snapshot() -> None:
    """A DDL event has `r`, as in the original, with its log position and its statement."""
    ddl = '{"sql":"DROP TABLE x","database":"shop"}'
    place = {"tx_id": "3e11:7", "file": "binlog.000001", "pos": 9, "schema_version": None}
    ddl_row = row(op="ddl", schema=None, table="_ddl", after=None, key=None, ddl=ddl, **place)

    (found,) = envelopes(
        [ddl_row], EventOrigin("mysql", "orders-db", "acme", position_fields("mysql"))
    )

    assert '"op":"r"' in found
    assert '"gtid":"3e11:7","file":"binlog.000001","pos":9}' in found
    assert '"snapshot"' not in found
    assert f'"ddl":{ddl}' in found
