from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.sources.base import ChangeBatch
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.postgres.decode.pgoutput import (
    HEARTBEAT,
    LogicalMessage,
    MessageFilter,
    copy_data,
    xlog,
)
from deltaforge_dagster.sources.postgres.decode.types import BUILT_IN, ISO_TIMESTAMPS
from deltaforge_dagster.sources.postgres.decode.versions import PostgresTableContext
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_lab.synthetic import postgres_messages as samples
from deltaforge_lab.synthetic.postgres_messages import Cell
from tests.sources.postgres.reference import Catalog, Reference, Registry, message_json
from tests.strategies import ENUM, streams

TABLE = 16_385
COLUMNS = (("id", 20, -1, True), ("name", 25, -1, False))
RELATION = samples.relation(TABLE, "public", "users", COLUMNS)


def make_decoder(**changed: Any) -> PostgresDecoder:
    """Return a decoder that captures everything, with some arguments changed."""
    arguments: dict[str, Any] = {
        "source_id": "shop-db",
        "db": "shop",
        "start": LsnPosition(0),
        "registry": Registry(),
        "catalog": Catalog(),
        "captures": lambda _schema, _table: True,
    } | changed
    names = {field.name for field in fields(PostgresTableContext)} & arguments.keys()
    context = PostgresTableContext(**{name: arguments.pop(name) for name in names})
    return PostgresDecoder(context, **arguments)


def decode(
    stream: bytes, cuts: tuple[int, ...] = (), **changed: Any
) -> tuple[list[ChangeBatch], DeltaforgeError | None]:
    """Feed the stream in the pieces that `cuts` makes, as the socket part does."""
    decoder = make_decoder(**changed)
    batches: list[ChangeBatch] = []
    tail, at = b"", 0
    for cut in (*sorted(cuts), len(stream)):
        piece = bytearray(tail + stream[at:cut])
        decoded = decoder.feed(piece, len(piece))
        assert 0 <= decoded.consumed <= len(piece)
        batches += decoded.batches
        tail, at = bytes(piece[decoded.consumed :]), cut
        piece[:] = bytes(len(piece))  # what came out must not look into the buffer any more
        if decoded.error or decoded.foreign:
            return batches, decoded.error
    return batches, None


def rows_of(batches: list[ChangeBatch]) -> list[dict[str, Any]]:
    """Return all rows."""
    return [row for batch in batches if batch.rows for row in batch.rows.to_pylist()]


def committed(batches: list[ChangeBatch]) -> list[dict[str, Any]]:
    """Return the rows up to the last end."""
    last = max((i for i, batch in enumerate(batches) if batch.end), default=-1)
    return rows_of(batches[: last + 1])


def transaction(*messages: bytes, lsn: int = 1000, xid: int = 7) -> bytes:
    """Return the messages as a transaction that commits at `lsn` + 50 and ends at `lsn` + 60."""
    parts = [samples.begin(lsn + 50, 0, xid), *messages, samples.commit(lsn + 50, lsn + 60, 0)]
    return b"".join(xlog(lsn + number, part) for number, part in enumerate(parts))


def insert(number: int, name: str = "x") -> bytes:
    """Return an Insert message for `users`."""
    return samples.insert(TABLE, [str(number).encode(), name.encode()])


@given(streams(), st.data())
def test_decodes_like_the_reference(stream: bytes, data: st.DataObject) -> None:
    """Any valid stream, cut anywhere into pieces, gives what the plain Python decoder reads."""
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    iso = data.draw(st.booleans())
    batches, error = decode(stream, tuple(cuts), built_in=ISO_TIMESTAMPS if iso else BUILT_IN)

    reference = Reference("shop-db", iso).decode(stream)
    rows = rows_of(batches)
    compared = list(reference.rows[0]) if reference.rows else []
    assert error is None
    assert not reference.failed
    assert reference.rows == [{name: row[name] for name in compared} for row in rows]
    ends = [batch.end for batch in batches if isinstance(batch.end, LsnPosition)]
    assert sorted(set(ends)) == ends
    assert (ends[-1].lsn if ends else 0) == reference.end
    for row in rows:
        assert row["db"] == "shop"
        for image in ("before", "after", "key"):
            image_ = None if row[image] is None else json.loads(row[image])
            assert image_ is None or isinstance(image_, dict) or row["schema"] == "__wal_message"


@given(streams(), st.data())
def test_damaged_bytes_give_an_error_or_what_they_say(stream: bytes, data: st.DataObject) -> None:
    """Changed bytes raise nothing but errors of the tree, in the same place as the reference."""
    damaged = bytearray(stream)
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'tnuKON{}"\\\0'))

    assert_read_alike(bytes(damaged), iso=data.draw(st.booleans()))


def assert_read_alike(stream: bytes, *, iso: bool = False) -> None:
    """The decoder gives the reference's rows, and an error where that has one."""
    batches, error = decode(stream, built_in=ISO_TIMESTAMPS if iso else BUILT_IN)
    reference = Reference("shop-db", iso).decode(stream)
    compared = list(reference.rows[0]) if reference.rows else []
    assert reference.failed == (error is not None)
    assert reference.rows == [{n: row[n] for n in compared} for row in committed(batches)]


@given(st.binary(max_size=200))
def test_any_bytes_are_answered(content: bytes) -> None:
    """Random bytes as the content of a message raise nothing but errors of the tree."""
    _, error = decode(xlog(1, content) + copy_data(content))

    assert error is None or isinstance(error, CorruptLog | UnsupportedEvent)


def test_every_cut_gives_the_same_rows() -> None:
    """A stream fed byte by byte, or cut once at any place, gives the same rows and last end."""
    stream = transaction(RELATION, insert(1), insert(2), insert(3))
    stream += transaction(insert(4), lsn=2000, xid=8)
    whole = rows_of(decode(stream)[0])

    assert [row["tx_end"] for row in whole] == [False, False, True, True]
    for cuts in [tuple(range(len(stream))), *((cut,) for cut in range(len(stream)))]:
        batches, error = decode(stream, cuts)
        assert error is None
        assert rows_of(batches) == whole
        assert batches[-1].end == LsnPosition(2060, 8)


def test_rows_of_an_open_transaction_come_without_an_end() -> None:
    """What follows the last commit is a batch of its own; its last row waits for the next message."""
    open_tx = xlog(2000, samples.begin(2500, 0, 8))
    open_tx += b"".join(xlog(2001, insert(number)) for number in (2, 3))
    batches, _ = decode(transaction(RELATION, insert(1)) + open_tx)

    assert [batch.end for batch in batches] == [LsnPosition(1060, 7), None]
    assert [row["after"] for row in rows_of(batches)] == [
        '{"id":1,"name":"x"}',
        '{"id":2,"name":"x"}',
    ]


def test_idle_progress() -> None:
    """Empty transactions and keepalives outside transactions tell how far the log is passed."""
    stream = transaction() + samples.keepalive(5000) + samples.keepalive(4000)
    stream += xlog(5001, samples.begin(6000, 0, 9)) + samples.keepalive(5900)
    batches, _ = decode(stream)

    assert batches == [ChangeBatch(None, LsnPosition(5000), batches[0].log_bytes)]
    empty, _ = decode(transaction())
    assert [(batch.rows, batch.end) for batch in empty] == [(None, LsnPosition(1060, 7))]
    assert empty[0].end.tx_id == 7  # type: ignore[union-attr]


def test_idle_progress_stands_before_open_rows() -> None:
    """Progress is never told behind rows of a transaction that is still open."""
    stream = transaction(RELATION) + samples.keepalive(1500)
    stream += xlog(2000, samples.begin(2500, 0, 8))
    stream += b"".join(xlog(2001, insert(number)) for number in (2, 3))
    batches, _ = decode(stream)

    assert [(batch.rows is None, batch.end) for batch in batches] == [
        (True, LsnPosition(1500)),
        (False, None),
    ]


def test_keepalive_asks_for_a_reply() -> None:
    """The answer that a keepalive asks for is asked for once."""
    decoder = make_decoder()
    stream = samples.keepalive(10, reply=True)

    assert decoder.feed(stream, len(stream)).reply_requested
    assert not decoder.feed(b"", 0).reply_requested


def test_other_messages_end_the_copy() -> None:
    """Notices and parameters are passed over; anything else is handed back where it stands."""
    notice = b"N" + (8).to_bytes(4, "big") + b"text" + b"S" + (4).to_bytes(4, "big")
    stream = notice + b"E" + (100).to_bytes(4, "big") + b"SFATAL"
    decoded = make_decoder().feed(stream, len(stream))

    assert (decoded.consumed, decoded.foreign, decoded.error) == (len(notice), "E", None)


def test_transactions_before_the_start_are_skipped() -> None:
    """A transaction that committed before the start is skipped, and its tables stay known."""
    stream = transaction(RELATION, insert(1)) + transaction(insert(2), lsn=2000, xid=8)
    batches, _ = decode(stream, start=LsnPosition(1060))

    assert [row["after"] for row in rows_of(batches)] == ['{"id":2,"name":"x"}']


def test_tables_not_captured_are_passed_over() -> None:
    """Rows of other tables are counted but not read; alone in a transaction they are idle progress."""
    other = samples.relation(99, "public", "other", [("odd", 77_777, -1, True)])
    odd = samples.insert(99, [b"(1,2);(3,4)"])
    registry = Registry()
    stream = transaction(RELATION, other, odd, insert(1), odd, samples.truncate([99]))
    stream += transaction(odd, lsn=2000, xid=8)
    batches, error = decode(
        stream,
        registry=registry,
        captures=lambda schema, table: (schema, table) != ("public", "other"),
    )

    assert error is None
    assert [(row["row"], row["tx_end"]) for row in rows_of(batches)] == [(1, True)]
    assert [batch.end for batch in batches] == [LsnPosition(1060, 7), LsnPosition(2060, 8)]
    assert [table.table for table, _ in registry.registered] == ["users"]


def test_large_pieces_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many rows nor large ones need more than the scratch memory at a time."""
    monkeypatch.setattr("deltaforge_dagster.sources.postgres.decode.decoder.MAX_ROWS", 4)
    monkeypatch.setattr("deltaforge_dagster.sources.rows.arrays._ROOM", 1 << 10)
    names = ["\x01" * 50, "x" * 300, "\x01" * 900, "", "y" * 5000, *("z" * n for n in range(20))]
    stream = transaction(RELATION, *(insert(n, name) for n, name in enumerate(names)))
    stream += b"".join(transaction(lsn=2000 + 100 * n, xid=9) for n in range(10))
    batches, error = decode(stream)

    rows = rows_of(batches)
    assert error is None
    assert [json.loads(row["after"])["name"] for row in rows] == names
    assert [row["row"] for row in rows] == list(range(len(names)))
    assert [row["tx_end"] for row in rows] == [False] * (len(names) - 1) + [True]
    assert batches[-1].end == LsnPosition(2960, 9)


def test_log_bytes_add_up() -> None:
    """Every byte of the stream is counted once."""
    stream = samples.orders(500, rows_per_tx=30)
    batches, _ = decode(stream, (1000, 20_000, 50_000))

    assert sum(batch.log_bytes for batch in batches) <= len(stream)
    assert sum(batch.log_bytes for batch in batches) >= len(stream) - 200


def test_batches_have_the_frame_s_columns() -> None:
    """Every batch has the columns of the frame, and is valid Arrow."""
    batches, _ = decode(samples.orders(50))

    assert batches[0].rows is not None
    assert batches[0].rows.schema.equals(CAPTURED)
    batches[0].rows.validate(full=True)
    pa.Table.from_batches([b.rows for b in batches if b.rows]).to_pandas()


def test_unknown_messages_stop() -> None:
    """A message of a kind that is not known stops after the rows, named with its byte and place."""
    before = transaction(RELATION, insert(1))
    begin = xlog(2000, samples.begin(2500, 0, 8))
    for message, words in [(b"?", "a '?' message (byte 0x3F) at 0/000007D1"), (b"\xff", "0xFF")]:
        batches, error = decode(before + begin + xlog(2001, message))

        assert isinstance(error, UnsupportedEvent)
        assert words in str(error)
        assert "in transaction 8, committed at 0/000009C4" in str(error)
        assert len(rows_of(batches)) == 1
        assert batches[-1].end == LsnPosition(1060, 7)


def test_a_truncate_is_one_row_of_each_captured_table() -> None:
    """In the statement's order, with its flags, between the changes around it."""
    second = samples.relation(99, "public", "second", COLUMNS)
    ignored = samples.relation(98, "public", "ignored", COLUMNS)
    stream = transaction(
        RELATION, second, ignored, insert(1), samples.truncate([99, 98, TABLE], 3), insert(2)
    )
    stream += transaction(samples.truncate([TABLE]), lsn=2000, xid=8)
    batches, error = decode(stream, captures=lambda _, table: table != "ignored")

    rows = rows_of(batches)
    assert error is None
    assert [(row["op"], row["table"], row["row"], row["tx_end"]) for row in rows] == [
        ("c", "users", 0, False),
        ("t", "second", 1, False),
        ("t", "users", 3, False),
        ("c", "users", 4, True),
        ("t", "users", 0, True),
    ]
    assert [row["ddl"] for row in rows] == [
        None,
        '{"sql":"TRUNCATE","cascade":true,"restart_identity":true}',
        '{"sql":"TRUNCATE","cascade":true,"restart_identity":true}',
        None,
        '{"sql":"TRUNCATE","cascade":false,"restart_identity":false}',
    ]
    assert {(row["before"], row["after"], row["key"]) for row in rows if row["op"] == "t"} == {
        (None, None, None)
    }
    assert rows[1]["schema_version"] == "sha256:2"


def test_a_truncate_of_more_tables_than_fit_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither cut nor tried for ever."""
    monkeypatch.setattr("deltaforge_dagster.sources.postgres.decode.decoder.MAX_ROWS", 4)
    _, error = decode(transaction(RELATION, insert(1), samples.truncate([TABLE] * 4)))
    assert error is None
    _, error = decode(transaction(RELATION, samples.truncate([TABLE] * 5)))

    assert isinstance(error, UnsupportedEvent)
    assert "a Truncate message" in str(error)


def message(lsn: int, content: bytes, prefix: str = "audit", *, inside: bool = False) -> bytes:
    """Return a logical message in the stream."""
    made = samples.message(lsn, prefix, content, transactional=inside)
    return xlog(lsn, made)


def test_messages_of_a_transaction_stand_among_its_changes() -> None:
    """A transactional message is an insert of its content, in its place, without a table version."""
    inside = samples.message(1002, "audit", b'{"by" : 1}')
    batches, _ = decode(transaction(RELATION, inside, insert(1)))

    row, after = rows_of(batches)
    assert (row["op"], row["schema"], row["table"]) == ("c", "__wal_message", "audit")
    assert (row["before"], row["after"], row["key"]) == (None, '{"by":1}', None)
    assert (row["pos"], row["row"], row["tx_id"], row["tx_end"]) == (1002, 0, "7", False)
    assert (row["schema_version"], row["schema_sequence"]) == (None, None)
    assert (after["row"], after["tx_end"], after["schema_sequence"]) == (1, True, 1)


def test_other_messages_are_transactions_of_their_own() -> None:
    """A message between transactions ends where its record ends, and has no xid."""
    batches, _ = decode(transaction(RELATION, insert(1)) + message(1100, b"[1, 2]"))

    row = rows_of(batches)[1]
    assert (row["after"], row["tx_id"], row["tx_end"], row["row"]) == ("[1,2]", None, True, 0)
    assert batches[-1].end == LsnPosition(1100)
    again, _ = decode(message(1100, b"[1, 2]"), start=LsnPosition(1099))
    assert rows_of(again) == [row]
    assert rows_of(decode(message(1100, b"[1, 2]"), start=LsnPosition(1100))[0]) == []


def test_messages_that_are_no_json_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """They are left out with a warning; the position passes them, and `tx_end` is right."""
    inside = samples.message(1002, "audit", b"secret text")
    stream = transaction(RELATION, insert(1), inside) + message(2000, b'"\xff"')
    batches, error = decode(stream + message(3000, b""))

    assert error is None
    assert [(row["after"], row["tx_end"]) for row in rows_of(batches)] == [
        ('{"id":1,"name":"x"}', True)
    ]
    assert batches[-1].end == LsnPosition(3000)
    assert "prefix 'audit' at 0/000007D0" in caplog.text
    assert "(3 such messages since reading began)" in caplog.text
    assert "secret" not in caplog.text


def test_our_heartbeats_move_the_position_only() -> None:
    """Messages with our own prefix are progress and no change."""
    batches, _ = decode(transaction(samples.message(1001, HEARTBEAT, b"")))

    assert [(batch.rows, batch.end) for batch in batches] == [(None, LsnPosition(1060, 7))]


def test_a_message_outside_its_transaction_is_damage() -> None:
    """A transactional message stands in a transaction, any other one does not."""
    for stream in (
        message(1, b"{}", inside=True),
        transaction(samples.message(1, "audit", b"{}", transactional=False)),
    ):
        assert isinstance(decode(stream)[1], CorruptLog)


@pytest.mark.parametrize(
    ("relation", "cells", "rows"),
    [
        # Of two tables of one name only the one with a type that nobody knows is held.
        (samples.relation(5, "public", "users", [("v", 77_777, -1, False)]), [b"1"], 1),
        (samples.relation(5, "public", "t", [("v", 719, -1, False)]), [b'{"<(1,2),3>"}'], 2),
        (samples.relation(5, "public", "t", [("v", 1021, -1, False)]), [b"{1.5,NaN}"], 2),
        (samples.relation(5, "pu.lic", "t.t", [("v", 25, -1, False)]), [b"x"], 2),
    ],
)
def test_what_damage_can_make_of_a_table(relation: bytes, cells: list[Cell], rows: int) -> None:
    """Any built-in type, any name, the name of another table: the reference reads the same."""
    stream = transaction(RELATION, relation, samples.insert(5, cells), insert(1))

    assert len(rows_of(decode(stream)[0])) == rows
    assert_read_alike(stream)


@pytest.mark.parametrize("inside", [False, True])
def test_every_byte_of_a_message_counts(inside: bool) -> None:
    """Whichever byte of a stream with one is another one, the reference reads the same of it."""
    stream = message(1002, b'{"a":1}')
    if inside:
        stream = transaction(samples.message(1001, "audit", b'{"a":1}'))
    for at, now in enumerate(stream):
        for byte in {0, 1, 2, 34, 127, 128, 255} - {now}:
            assert_read_alike(stream[:at] + bytes([byte]) + stream[at + 1 :])


CONTENTS = [
    b"",
    b"0",
    b"-1.5e+30",
    b'"\x01"',
    b'"a\0b"',
    b"{}\0",
    b"[]\n x",
    b"\r\n\t {} ",
    b'["\\u0000","\\ud83d\\ude00"]',
    b'{"\\"":"\\\\"}',
    '{"ä€😀":null}'.encode(),
    b'{"a":[true,false,{}],"a":-0}',
]


@pytest.mark.parametrize("content", CONTENTS)
def test_every_byte_of_a_message_s_content_counts(content: bytes) -> None:
    """Each byte as any other one: what is JSON in UTF-8 (RFC 8259) is taken, and nothing else."""
    taken = MessageFilter()
    variants = {content[:at] + bytes([n]) + content[at + 1 :] for at in range(len(content)) for n in range(256)}  # fmt: skip
    for variant in sorted({content, *variants}):
        message = LogicalMessage(transactional=False, lsn=1, prefix="m", size=len(variant))
        is_json = taken.takes(message, np.frombuffer(variant, np.uint8))
        assert is_json == (message_json(variant) is not None), variant


def test_a_message_s_time_may_be_any() -> None:
    """A damaged time wraps, as that of a transaction does: it is no reason to fall over."""
    for clock in (2**63 - 1, 2**63 - 946_684_800_000_000, -(2**63)):
        header = b"w" + struct.pack(">qqq", 1002, 1002, clock)
        body = samples.message(1002, "audit", b"{}", transactional=False)
        assert_read_alike(copy_data(header + body))


def test_a_transaction_has_a_number() -> None:
    """PostgreSQL gives no transaction the number 0, which stands for "none" in what was decoded."""
    stream = transaction(RELATION, insert(1)) + transaction(insert(2), lsn=2000, xid=0)
    batches, error = decode(stream)

    assert isinstance(error, CorruptLog)
    assert "a message that does not follow its format, after 0/00000424" in str(error)
    assert len(rows_of(batches)) == 1
    assert_read_alike(stream)


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        (("id", 20), b"twelve", "a value that is not of its type's form: column id (bigint)"),
        (("doc", 3802), b"{", "column doc (jsonb)"),
        (("doc", 114), b"[" * 70_000 + b"]" * 70_000, "nested deeper than 65536 levels"),
        (("data", 17), b"\\xabc", "column data (bytea)"),
        (("name", 25), b"\xff\xfe", "text that is not UTF-8: table public.t"),
        (("tags", 1009), b"{a,b", "column tags (text[])"),
    ],
)
def test_bad_values_are_named(column: tuple[str, int], cell: bytes, words: str) -> None:
    """A value that cannot be right stops with column, type, table and place, but not the value."""
    described = samples.relation(5, "public", "t", [("n", 23, -1, True), (*column, -1, False)])
    good, bad = samples.insert(5, [b"1", None]), samples.insert(5, [b"2", cell])
    stream = transaction(described, good) + transaction(good, bad, lsn=2000, xid=8)
    batches, error = decode(stream + transaction(good, lsn=3000, xid=9))

    assert isinstance(error, CorruptLog | UnsupportedEvent)
    assert words in str(error)
    assert "table public.t, transaction 8, at 0/000007D2" in str(error)
    assert cell.decode(errors="replace")[:6] not in str(error).partition(": ")[2]
    assert committed(batches) == rows_of(decode(transaction(described, good))[0])


def test_values_in_binary_form_are_refused() -> None:
    """The decoder reads text; a binary value was not asked for."""
    binary = b"I" + TABLE.to_bytes(4, "big") + b"N\0\2b\0\0\0\1x" + b"n"
    _, error = decode(transaction(RELATION, binary))

    assert isinstance(error, UnsupportedEvent)
    assert "binary form" in str(error)


def test_key_value_not_sent() -> None:
    """A key column that was not sent is taken from the old row, or the decoder stops."""
    old: list[Cell] = [b"1", None]
    new: list[Cell] = [samples.UNCHANGED, b"x"]
    batches, _ = decode(transaction(RELATION, samples.update(TABLE, new, old)))
    _, error = decode(transaction(RELATION, samples.update(TABLE, new)))

    assert rows_of(batches)[0]["key"] == '{"id":1}'
    assert rows_of(batches)[0]["after"] == '{"id":{"_unchanged":true},"name":"x"}'
    assert isinstance(error, UnsupportedEvent)
    assert "without the value of a key column: column id" in str(error)


def test_full_identity_asks_the_catalog_for_the_key() -> None:
    """Where the log marks all columns, or none, the key is the primary key of the catalog."""
    columns = [("name", 25, -1, True), ("id", 20, -1, True)]
    full = samples.relation(TABLE, "public", "users", columns, "f")
    change = samples.delete(TABLE, [b"x", b"1"], b"O")
    batches, error = decode(transaction(full, change), catalog=Catalog({TABLE: ("id",)}))

    row = rows_of(batches)[0]
    assert error is None
    assert (row["before"], row["after"], row["key"]) == ('{"name":"x","id":1}', None, '{"id":1}')


def test_versions_are_registered_once_with_their_position() -> None:
    """A repeated description registers nothing; a changed one stamps the rows after it.

    One that is in force again keeps its stamp, and its new place is noted.
    """
    registry = Registry()
    wider = samples.relation(TABLE, "public", "users", [*COLUMNS, ("mood", ENUM, -1, False)])
    stream = transaction(RELATION, insert(1), RELATION, insert(2))
    stream += transaction(
        wider, samples.insert(TABLE, [b"3", b"x", b"sad"]), RELATION, insert(4), lsn=2000, xid=8
    )
    batches, _ = decode(stream, registry=registry)

    assert [(t.table, position) for t, position in registry.registered] == [
        ("users", LsnPosition(1050)),
        ("users", LsnPosition(2050)),
        ("users", LsnPosition(2050)),
    ]
    assert registry.registered[2][0] == registry.registered[0][0]
    schema = registry.registered[1][0]
    assert [(c.name, c.data_type, c.nullable) for c in schema.columns] == [
        ("id", "bigint", False),
        ("name", "text", True),
        ("mood", "mood", True),
    ]
    assert schema.primary_key == ("id",)
    assert [(r["schema_version"], r["schema_sequence"]) for r in rows_of(batches)] == [
        ("sha256:1", 1),
        ("sha256:1", 1),
        ("sha256:2", 2),
        ("sha256:1", 1),
    ]


def test_an_error_is_returned_again() -> None:
    """A decoder that met an error decodes nothing more."""
    decoder = make_decoder()
    bad = xlog(1, b"?")
    first = decoder.feed(bad, len(bad))
    good = transaction(RELATION, insert(1))
    again = decoder.feed(good, len(good))

    assert first.error is again.error is not None
    assert (again.consumed, again.batches) == (0, ())


def test_plain_python_decodes_the_same() -> None:
    """Without compilation the kernels are ordinary Python, with the same result to the byte."""
    program = (
        "import hashlib, json\n"
        "from deltaforge_lab.synthetic import postgres_messages as samples\n"
        "from tests.sources.postgres.decode.test_decoder import *\n"
        "for built_in in (BUILT_IN, ISO_TIMESTAMPS):\n"
        "    batches, _ = decode(every_type(), (500, 1000), built_in=built_in)\n"
        "    print(json.dumps(rows_of(batches)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    text, iso = map(json.loads, ran.stdout.splitlines())
    assert text == rows_of(decode(every_type())[0])
    assert iso == rows_of(decode(every_type(), built_in=ISO_TIMESTAMPS)[0])
    assert "T12:34:56" in iso[0]["after"]
    assert "T12:34:56" not in text[0]["after"]


def every_type() -> bytes:
    """Return a stream with a value of each kind that the kernels write."""
    values = {
        16: b"t",
        17: b"\\x00ff10",
        20: b"-9223372036854775808",
        25: 'tab\t "quote" \\ ü \x01'.encode(),
        114: b'{"a" : [1, 2.5e-3, "x\\u0000"], "b":{}}',
        701: b"1e+20",
        700: b"-Infinity",
        1009: b'{a,NULL,"NULL","say \\"hi\\"",{b}}',
        1001: b'{"\\\\x0102"}',
        3807: b'{"{\\"a\\": [1, 2]}"}',
        1016: b"[0:1]={1,-2}",
        1114: b"2026-03-01 12:34:56.789",
        1185: b'{"0044-03-15 12:34:56+00 BC",NULL,infinity,"294276-12-31 12:34:56.5+00"}',
    }
    columns = [(f"c{oid}", oid, -1, oid == 20) for oid in values]
    described = samples.relation(6, "public", "everything", columns)
    cells = list(values.values())
    return transaction(
        described,
        samples.insert(6, cells),
        samples.update(6, [samples.UNCHANGED] * len(cells), cells, b"O"),
        samples.delete(6, [None if oid != 20 else b"1" for oid in values]),
    ) + samples.orders(20, rows_per_tx=3)
