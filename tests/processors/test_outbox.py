"""Outbox rows become the events that they contain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.config.processors import OutboxProcessor
from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.messages.envelope import EventOrigin, native_envelope
from deltaforge_dagster.processors.outbox import Outbox
from tests.processors.rows import Row, batch, row

MYSQL = EventOrigin("mysql", "shop-db", "acme")

EVENT = {
    "id": 7, "aggregate_type": "Order", "aggregate_id": 1,
    "event_type": "OrderCreated", "payload": {"total": 9.90},
}  # fmt: skip


def outbox_row(**changed: Any) -> Row:
    """Return an insert into an outbox table; None removes a column."""
    image = {name: one for name, one in {**EVENT, **changed}.items() if one is not ...}
    return row(schema="__outbox", table="outbox", after=json.dumps(image))


def processor(**options: Any) -> Outbox:
    """Return an outbox processor with these options."""
    return Outbox(OutboxProcessor.model_validate_json(json.dumps({"type": "outbox", **options})))


def made(rows: Sequence[Row], **options: Any) -> list[dict[str, Any]]:
    """Return the result for rows."""
    found: pa.RecordBatch = processor(**options).process(batch(rows))
    return found.to_pylist()


def test_a_row_becomes_its_event() -> None:
    """The payload becomes the event; topic, key and headers come from the other columns."""
    (event,) = made([outbox_row()], topic="${aggregate_type}.${event_type}", raw_payload=True)

    assert json.loads(event["after"]) == {"total": 9.90}
    assert event["before"] is None
    assert event["schema"] is None
    assert (event["topic"], event["route_key"]) == ("Order.OrderCreated", "1")
    assert event["raw_payload"]
    assert json.loads(event["headers"]) == {
        "df-event-id": "7", "df-aggregate-type": "Order", "df-aggregate-id": "1",
        "df-event-type": "OrderCreated", "df-source-kind": "outbox",
    }  # fmt: skip
    assert (event["op"], event["table"], event["db"]) == ("c", "outbox", "shop")


@pytest.mark.parametrize("pattern", ["outbox", "out%", "shop.outbox", "*.outbox"])
def test_everything_else_passes_in_its_place(pattern: str) -> None:
    """Other tables, and outboxes that do not match the patterns, pass unchanged and in order."""
    rows = [row(after='{"id":1}'), outbox_row(), {**outbox_row(), "table": "payments_outbox"}]

    found = made(rows, tables=["nothing", pattern])

    assert [one["schema"] for one in found] == ["public", None, "__outbox"]
    assert found[0]["after"] == '{"id":1}'
    assert json.loads(found[2]["after"]) == EVENT


@pytest.mark.parametrize(
    ("options", "changed", "topic"),
    [
        ({"topic": "events"}, {}, "events"),
        ({"topic": "${aggregate_type}.${nothing}"}, {}, "Order."),
        ({"topic": "${nothing}"}, {"topic": "mine"}, "mine"),
        ({"topic": "${payload.total}"}, {}, "9.9"),
        ({}, {"topic": "mine"}, "mine"),
        ({"default_topic": "rest"}, {}, "rest"),
        ({"default_topic": "rest"}, {"topic": None}, "rest"),
        ({}, {}, None),
    ],
)
def test_topics(options: dict[str, Any], changed: dict[str, Any], topic: str | None) -> None:
    """The order of precedence is template, column of the row, default, and then the sink's own."""
    (event,) = made([outbox_row(**changed)], **options)

    assert event["topic"] == topic


def test_keys() -> None:
    """The key is the template's text, or else the aggregate's id."""
    assert made([outbox_row()], key="${event_type}-${id}")[0]["route_key"] == "OrderCreated-7"
    assert made([outbox_row()], key="${nothing}")[0]["route_key"] == "1"
    assert made([outbox_row(aggregate_id=...)])[0]["route_key"] is None


@pytest.mark.parametrize(
    ("payload", "after", "sent"),
    [
        ({"a": [1]}, '{"a":[1]}', '{"a":[1]}'),
        (None, "null", "null"),
        (5, "5", "5"),
        ('{"a": 1.10,\n "b": 12345678901234567890}', '{"a":1.10,"b":12345678901234567890}', ...),
        (" [ ] ", "[]", ...),
        ("1e400", "1e400", ...),
        ("plain words", '"plain words"', ...),
        ('"said"', '"said"', ...),
        ("NaN", '"NaN"', ...),
        ('{"a":', '"{\\"a\\":"', ...),
        ("naïve 😀\n", '"naïve 😀\\n"', ...),
        ("", '""', ...),
        ("[" * 5000, f'"{"[" * 5000}"', ...),
    ],
)
def test_payloads(payload: Any, after: str, sent: Any) -> None:
    """Text that is JSON becomes JSON, other text a string; a raw payload is byte-identical."""
    (event,) = made([outbox_row(payload=payload)])
    raw = processor(raw_payload=True).process(batch([outbox_row(payload=payload)]))
    messages = native_envelope(MYSQL, raw).to_pylist()

    assert event["after"] == after
    assert messages == [payload if sent is ... else sent]


def test_half_a_surrogate_pair_stays_escaped() -> None:
    """UTF-8 cannot encode a lone surrogate, so the string is sent with its quotes and escape."""
    event = row(schema="__outbox", table="outbox", after=r'{"payload":"\ud800"}')
    raw = processor(raw_payload=True).process(batch([event]))

    assert native_envelope(MYSQL, raw).to_pylist() == [r'"\ud800"']


def test_without_a_payload_column_the_row_is_the_payload() -> None:
    """Without the payload column, the whole row is the event."""
    (event,) = made([outbox_row(payload=...)])

    assert json.loads(event["after"]) == {k: v for k, v in EVENT.items() if k != "payload"}


def test_headers_of_ones_own() -> None:
    """Scalars become text; null, objects and lists are left out; existing headers are kept."""
    rows = [{**outbox_row(trace="t-1", flag=True, nested={}, gone=None), "headers": '{"x":"1"}'}]
    named = {"trace": "trace", "flag": "flag", "nested": "nested", "gone": "gone", "no": "no"}

    headers = json.loads(made(rows, additional_headers=named)[0]["headers"])

    assert headers.items() >= {"x": "1", "trace": "t-1", "flag": "true"}.items()
    assert headers.keys().isdisjoint({"nested", "gone", "no"})


def test_columns_of_other_names() -> None:
    """The names of columns can be configured, for example those of Debezium's outbox."""
    rows = [outbox_row(aggregatetype="Order", type="Paid", aggregate_type=..., event_type=...)]
    columns = {"aggregate_type": "aggregatetype", "event_type": "type"}

    (event,) = made(rows, topic="${aggregatetype}.${type}", columns=columns)

    assert event["topic"] == "Order.Paid"
    assert json.loads(event["headers"])["df-event-type"] == "Paid"


def test_a_row_goes_on_where_an_earlier_processor_sent_it() -> None:
    """Existing topic and key stay if the outbox gives none, and existing headers are kept."""
    before = {"topic": "mine", "route_key": "k", "headers": '{"df-event-id":"old","x":"1"}'}
    (kept,) = made([{**outbox_row(aggregate_id=...), **before}], key="${nothing}")
    (changed,) = made([{**outbox_row(), **before}], topic="${event_type}")

    assert (kept["topic"], kept["route_key"]) == ("mine", "k")
    assert (changed["topic"], changed["route_key"]) == ("OrderCreated", "1")
    assert json.loads(changed["headers"]).items() >= {"df-event-id": "7", "x": "1"}.items()


def test_what_is_no_event_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Updates, deletes, rows without an image, and messages that are not objects are dropped."""
    one = processor()
    rows = [
        outbox_row(),
        {**outbox_row(), "op": "d"},
        {**outbox_row(), "op": "u"},
        {**outbox_row(), "op": "t", "after": None},
        {**outbox_row(), "after": None},
        {**outbox_row(), "after": "[1]"},
        row(),
    ]

    found = one.process(batch(rows))

    assert found.num_rows == 2
    assert one.counts == {
        "outbox_transformed": 1, "outbox_dropped:non_insert": 3,
        "outbox_dropped:null_payload": 1, "outbox_dropped:non_object": 1,
    }  # fmt: skip
    assert caplog.messages == [
        "outbox: 3 events of outbox dropped: non_insert",
        "outbox: 1 events of outbox dropped: null_payload",
        "outbox: 1 events of outbox dropped: non_object",
    ]


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({}, []),
        ({"topic": ...}, ["topic"]),
        ({"payload": None}, []),
        ({"payload": ..., "aggregate_id": {"a": 1}}, ["payload", "aggregate_id"]),
        ({"aggregate_type": None, "event_type": ...}, ["aggregate_type", "event_type"]),
    ],
)
def test_strict(changed: dict[str, Any], missing: list[str]) -> None:
    """With `strict`, a row that lacks a field stops the batch with an error that names it; null is a payload."""
    rows = [outbox_row(**{"topic": "mine"} | changed)]

    if not missing:
        assert len(made(rows, strict=True)) == 1
        return
    with pytest.raises(ProcessorFailed) as caught:
        made(rows, strict=True)
    assert str(caught.value) == (
        "processor outbox: outbox strict: event from table 'outbox' missing required fields: "
        f"[{', '.join(missing)}]"
    )


def test_a_row_that_python_cannot_read() -> None:
    """A row that is nested too deeply is an error with the table's name, and does not crash the worker."""
    deep = row(schema="__outbox", table="outbox", after='{"a":' + "[" * 60_000 + "]" * 60_000 + "}")

    with pytest.raises(ProcessorFailed, match="an event of outbox is nested too deeply"):
        made([deep])
