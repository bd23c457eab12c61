"""Messages as NATS' commands: read back by a parser of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.sinks.base import MESSAGES
from deltaforge_dagster.sinks.nats.pack import PackedMessages, Packer, PositionHeader
from tests.sinks.nats_messages import row


def parsed(data: bytes) -> list[tuple[str, str, list[tuple[str, str]], bytes]]:
    """Return subject, reply, headers and value of each command."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        words = line.decode().split(" ")
        header, whole = int(words[-2]), int(words[-1])
        reply = words[2] if len(words) == 5 else ""
        lines = data[:header].decode().split("\r\n")
        assert (words[0], lines[0], lines[-2:]) == ("HPUB", "NATS/1.0", ["", ""])
        pairs = [one.partition(": ") for one in lines[1:-2]]
        headers = [(name, value) for name, _, value in pairs]
        found.append((words[1], reply, headers, data[header:whole]))
        assert data[whole : whole + 2] == b"\r\n"
        data = data[whole + 2 :]
    return found


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "destination": st.from_regex(r"[a-zä]{1,9}(\.[a-z]{1,5}){0,2}", fullmatch=True),
            "key": st.none() | TEXT,
            "value": st.text(max_size=50),
            "event_id": TEXT,
            "idempotency_key": TEXT,
            "change_id": st.none() | TEXT,
            "headers": st.none() | st.sampled_from(['{"a":"1"}', '{"b":"ä","c":""}', "{}"]),
            "more": st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Return the rows with ordinals; `more` says that the next row is of the same change."""
    ordinal, made = 0, []
    for one in rows:
        made.append({**one, "ordinal": ordinal})
        ordinal += not one["more"]
    names = MESSAGES.names
    # Behind another row, so that the columns' buffers do not begin where the batch does.
    return pa.RecordBatch.from_pylist(
        [{**row(0, "x"), "headers": None}, *({n: one[n] for n in names} for one in made)],
        schema=MESSAGES,
    ).slice(1)


def blocks(
    packer: Packer, rows: int, keeping: PositionHeader | None, **limits: int
) -> list[tuple[PackedMessages, bytes]]:
    """Pack everything; the bytes are copies."""
    found: list[tuple[PackedMessages, bytes]] = []
    start = 0
    while start < rows:
        block = packer.pack(
            start,
            rows,
            7 + start,
            first={"first": "1"},
            marks={"m": "2"},
            keeping=keeping,
            **limits,
        )
        found.append((block, bytes(block.data)))
        start = block.stop
    return found


@given(ROWS, st.sampled_from([None, "_I"]), st.integers(1, 6), st.integers(1, 2000))
def test_every_message_is_read_back(
    rows: list[dict[str, Any]], reply: str | None, most: int, size: int
) -> None:
    """Every text arrives as it is, chained to the one before; no change is divided."""
    messages = batch_of(rows)
    packer = Packer(messages, "|s", reply)
    ordinals = messages.column("ordinal").to_pylist()

    for block, data in blocks(packer, len(rows), None, max_rows=most, max_bytes=size):
        assert block.stop == len(rows) or ordinals[block.stop] != ordinals[block.stop - 1]
        for place, (subject, answer, headers, value) in enumerate(parsed(data)):
            at = block.start + place
            one = rows[at]
            wanted = [("Nats-Msg-Id", f"{one['idempotency_key']}|s")]
            if reply is not None and place:
                wanted += [("Nats-Expected-Last-Msg-Id", packer.message_id(at - 1))]
            if one["key"] is not None:
                wanted += [("df-key", one["key"])]
            wanted += {
                '{"a":"1"}': [("a", "1")],
                '{"b":"ä","c":""}': [("b", "ä"), ("c", "")],
            }.get(one["headers"], [])
            wanted += [("m", "2")] + [("first", "1")] * (place == 0)
            assert headers == wanted
            assert (subject, value.decode()) == (one["destination"], one["value"])
            assert answer == ("" if reply is None else f"_I.{7 + at}")


@given(ROWS, st.integers(1, 6), st.booleans())
def test_every_position_can_be_resolved(rows: list[dict[str, Any]], most: int, ends: bool) -> None:
    """From any message one comes to the position after the last change that is complete there."""
    messages = batch_of(rows)
    ordinals = messages.column("ordinal").to_pylist()
    last = len(rows) - 1
    keeping = PositionHeader(lambda at: f"{{{at}}}", last if ends else None)
    positions: list[str] = []
    for _, data in blocks(Packer(messages, "|s", "_I"), len(rows), keeping, max_rows=most):
        for _, _, headers, _ in parsed(data):
            (position,) = [value for name, value in headers if name == "df-position"]
            positions.append(position)

    for at, _ in enumerate(rows):
        complete = at
        while complete >= 0 and complete < last and ordinals[complete + 1] == ordinals[complete]:
            complete -= 1
        assert resolved(positions, at, rows, ordinals) == complete
    if ends:
        assert positions[last] == f"{{{last}}}"


def resolved(
    positions: list[str], at: int, rows: list[dict[str, Any]], ordinals: list[int | None]
) -> int:
    """Return the row after which a message says the sink is; -1 for before the first."""
    if at < 0:
        return -1
    text = positions[at]
    if text.startswith("{"):
        return int(text[1:-1])
    if text == "-1":
        return resolved(positions, at - 1, rows, ordinals)
    places, ordinal, event_id = text.split(" ", 2)
    assert positions[at - int(places)].startswith("{")
    assert event_id == (
        rows[at]["change_id"] if rows[at]["change_id"] is not None else rows[at]["event_id"]
    )
    assert int(ordinal) == ordinals[at]
    return at


def test_the_first_of_a_block_says_where_to_look() -> None:
    """Where a block begins amid a change, or behind another's message, its first position says it."""
    rows = [row(n, "a", ordinal=0) for n in range(3)]
    packer = Packer(pa.RecordBatch.from_pylist(rows, schema=MESSAGES), "|s", "_I")

    keeping = PositionHeader(lambda at: f"{{{at}}}", None, "-@17")
    block = packer.pack(1, 3, 1, first={}, marks={}, keeping=keeping)

    assert [dict(headers)["df-position"] for _, _, headers, _ in parsed(bytes(block.data))] == [
        "-@17",
        "{2}",
    ]


def test_three_blocks_live_at_once() -> None:
    """A block's bytes stay until the third one after it: two are on their way, one is packed."""
    rows = [row(n, "a") for n in range(6)]
    packer = Packer(pa.RecordBatch.from_pylist(rows, schema=MESSAGES), "|s", "_I")
    made = [packer.pack(n, 6, n, first={}, marks={}, max_rows=1) for n in range(3)]

    assert [parsed(bytes(one.data))[0][3] for one in made] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']


@pytest.mark.parametrize("name", ["value", "destination", "event_id", "idempotency_key"])
def test_what_a_message_needs(name: str) -> None:
    """A message without a value is no message of NATS."""
    rows: list[Mapping[str, Any]] = [row(0, "a"), {**row(1, "a"), name: None}]
    fields = [field.with_nullable(True) for field in MESSAGES]
    messages = pa.RecordBatch.from_pylist(rows, schema=pa.schema(fields))

    with pytest.raises(SinkRejected, match=f"1 of 2 messages have no {name}"):
        Packer(messages, "|s", None)
