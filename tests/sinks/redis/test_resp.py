"""The packer against redis-py's own, the reply parser against replies cut anywhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection

from deltaforge_dagster.errors import SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.base import MESSAGES
from deltaforge_dagster.sinks.redis.resp import (
    PackedCommands,
    PositionKey,
    Replies,
    Verdict,
    pack_blocks,
)

TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("\r\n\0$*ä€😀"), max_size=30
)
SIZES = st.sampled_from([0, 1, 9, 10, 99, 100, 999, 1000, 12345])


@dataclass(frozen=True)
class Message:
    """One row of a batch."""

    destination: str
    key: str | None
    value: str
    event_id: str
    idempotency_key: str
    headers: str | None


MESSAGE = st.builds(
    Message,
    destination=TEXT,
    key=TEXT | st.none(),
    value=TEXT | SIZES.map("v".__mul__),
    event_id=TEXT,
    idempotency_key=TEXT,
    headers=TEXT | st.none(),
)


def batch_of(messages: list[Message]) -> pa.RecordBatch:
    """Return a batch of `MESSAGES` with ordinals from 0."""
    rows = [
        {"ordinal": ordinal}
        | {name: getattr(message, name) for name in Message.__dataclass_fields__}
        for ordinal, message in enumerate(messages)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=MESSAGES)


def expected_block(messages: list[Message], replay: str | None) -> bytes:
    """Return what redis-py sends for the same transaction."""
    commands: list[list[str]] = [["MULTI"]]
    for message in messages:
        key = message.event_id if message.key is None else message.key
        command = ["XADD", message.destination, "*", "event_id", message.event_id]
        command += ["idempotency_key", message.idempotency_key]
        command += ["df-event", message.value, "df-key", key]
        if message.headers is not None:
            command += ["df-headers", message.headers]
        if replay is not None:
            command += ["df-replay", replay]
        commands.append(command)
    commands.append(["EXEC"])
    connection = Connection()
    return b"".join(b"".join(connection.pack_command(*command)) for command in commands)


def sent(block: PackedCommands) -> bytes:
    """Return all bytes of a block."""
    return bytes(block.queued) + block.executed


@given(
    before=st.integers(0, 9),
    messages=st.lists(MESSAGE, min_size=1, max_size=12),
    after=st.integers(0, 3),
    replay=st.none() | TEXT,
    max_rows=st.integers(1, 14),
)
def test_blocks_are_what_redis_py_packs(
    before: int, messages: list[Message], after: int, replay: str | None, max_rows: int
) -> None:
    """Any texts, nulls, slices of larger batches and block sizes give redis-py's own bytes."""
    padding = Message("p", None, "p", "p", "p", None)
    whole = batch_of([padding] * before + messages + [padding] * after)
    packed = [
        (block.start, block.stop, sent(block))
        for block in pack_blocks(whole.slice(before, len(messages)), replay, max_rows=max_rows)
    ]

    bounds = range(0, len(messages), max_rows)
    expected = [
        (start, min(start + max_rows, len(messages)), messages[start : start + max_rows])
        for start in bounds
    ]
    assert packed == [(start, stop, expected_block(part, replay)) for start, stop, part in expected]


@given(st.lists(MESSAGE, min_size=1, max_size=20), st.integers(1, 2000))
def test_blocks_stay_below_the_byte_limit(messages: list[Message], max_bytes: int) -> None:
    """Blocks follow each other without a gap; only a single large message exceeds the limit."""
    blocks = [
        (block.start, block.stop, len(sent(block)))
        for block in pack_blocks(batch_of(messages), max_bytes=max_bytes)
    ]

    frame = len(expected_block([], None))
    assert [start for start, _, _ in blocks] == [0, *(stop for _, stop, _ in blocks[:-1])]
    assert blocks[-1][1] == len(messages)
    assert all(size - frame <= max_bytes or stop - start == 1 for start, stop, size in blocks)


def test_a_block_stays_valid_while_the_next_is_packed() -> None:
    """A sender may repeat a block after it has looked at the next one."""
    messages = [Message("s", None, str(n), str(n), str(n), None) for n in range(6)]
    blocks = pack_blocks(batch_of(messages), max_rows=2)
    first = next(blocks)
    second = next(blocks)

    assert sent(first) == expected_block(messages[:2], None)
    assert sent(second) == expected_block(messages[2:4], None)


@given(
    changes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    max_rows=st.integers(1, 6),
    max_bytes=st.integers(1, 1_000),
)
def test_messages_of_one_change_share_a_block(
    changes: list[int], max_rows: int, max_bytes: int
) -> None:
    """No limit divides messages of one ordinal; a limit is only exceeded by a change alone."""
    ordinals = [2 * n for n, count in enumerate(changes) for _ in range(count)]
    messages = [Message("s", None, str(n), "i", "i", None) for n in range(len(ordinals))]
    whole = batch_of(messages).set_column(0, MESSAGES.field(0), pa.array(ordinals))
    blocks = list(pack_blocks(whole, max_rows=max_rows, max_bytes=max_bytes))

    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    for block in blocks:
        found = set(ordinals[block.start : block.stop])
        assert not found & set(ordinals[block.stop :])
        assert len(found) == 1 or block.rows <= max_rows
    for block in pack_blocks(whole, max_rows=max_rows):
        assert sent(block) == expected_block(messages[block.start : block.stop], None)


def test_nothing_makes_no_block() -> None:
    """An empty batch, and one whose buffers are absent, have no block."""
    assert list(pack_blocks(batch_of([]))) == []
    assert list(pack_blocks(batch_of([Message("s", None, "", "", "", None)]).slice(1))) == []


def test_all_empty_texts() -> None:
    """Columns without a single byte of data are packed as empty strings."""
    messages = [Message("", "", "", "", "", "")] * 3
    (block,) = pack_blocks(batch_of(messages))

    assert sent(block) == expected_block(messages, None)


def test_a_message_without_destination_is_refused() -> None:
    """What every message must have is checked before a byte is written."""
    columns = [column.to_pylist() for column in batch_of([Message(*"abcdef")]).columns]
    columns[MESSAGES.get_field_index("destination")] = [None]
    fields = [pa.field(field.name, field.type) for field in MESSAGES]
    batch = pa.record_batch(columns, schema=pa.schema(fields))

    with pytest.raises(SinkRejected, match="1 of 1 messages have no destination"):
        next(pack_blocks(batch))


@given(st.lists(MESSAGE, min_size=1, max_size=9), TEXT, st.integers(1, 5))
def test_a_kept_position_is_what_redis_py_packs(
    messages: list[Message], key: str, max_rows: int
) -> None:
    """Each block sets the key to the text of its last row, then watches and reads it."""
    keeping = PositionKey(key, lambda row: f"ä{row}")
    connection = Connection()

    for block in pack_blocks(batch_of(messages), keeping=keeping, max_rows=max_rows):
        text = f"ä{block.stop - 1}"
        plain = expected_block(messages[block.start : block.stop], None)
        end = b"".join(connection.pack_command("EXEC"))
        kept = [["SET", key, text], ["EXEC"], ["WATCH", key], ["GET", key]]
        packed = b"".join(b"".join(connection.pack_command(*command)) for command in kept)
        assert sent(block) == plain.removesuffix(end) + packed
        assert block.position == text.encode()


def read(answer: bytes, rows: int, cuts: list[int], *, keeping: bool = False) -> Verdict | None:
    """Feed an answer in pieces and return the verdict, which only the last piece may give."""
    replies = Replies()
    replies.expect(rows, keeping=keeping)
    bounds = [0, *sorted(cut % len(answer) for cut in cuts), len(answer)]
    verdict = None
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        assert verdict is None
        replies.space()[: stop - start] = answer[start:stop]
        verdict = replies.received(stop - start)
    return verdict


IDS = st.tuples(st.integers(0, 2**63), st.integers(0, 2**63)).map("{0[0]}-{0[1]}".format)
CUTS = st.lists(st.integers(0, 10_000), max_size=6)


@given(st.lists(IDS, max_size=30), CUTS)
def test_success_cut_anywhere(ids: list[str], cuts: list[int]) -> None:
    """An executed block is recognized with its last byte, not before."""
    answer = b"+OK\r\n" + b"+QUEUED\r\n" * len(ids) + b"*%d\r\n" % len(ids)
    answer += b"".join(b"$%d\r\n%s\r\n" % (len(text), text.encode()) for text in ids)

    assert read(answer, len(ids), cuts) == Verdict(executed=True, error=None, row=None)


def test_success_of_a_full_block() -> None:
    """The largest block's answer is understood: numbers of any length are."""
    answer = (
        b"+OK\r\n" + b"+QUEUED\r\n" * 5_000 + b"*5000\r\n" + b"$15\r\n1700000000000-0\r\n" * 5_000
    )

    assert read(answer, 5_000, []) == Verdict(executed=True, error=None, row=None)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.data())
def test_replies_to_the_next_block_follow(blocks: list[int], data: st.DataObject) -> None:
    """What the server says while it queues the next block may arrive with the reply to the one before."""
    queued = [b"+OK\r\n" + b"+QUEUED\r\n" * rows for rows in blocks]
    executed = [b"*%d\r\n" % rows + b"$3\r\n0-1\r\n" * rows for rows in blocks]
    queued.append(b"")
    replies = Replies()
    early = 0  # bytes of the next block's replies that are received with those to the one before
    for number, rows in enumerate(blocks):
        replies.expect(rows)
        first, following = queued[number][early:], queued[number + 1]
        early = data.draw(st.integers(0, len(following)))
        cut = data.draw(st.integers(0, len(first)))
        rest = first[cut:] + executed[number] + following[:early]
        replies.space()[:cut] = first[:cut]
        assert replies.received(cut, more=True) is None
        replies.space()[: len(rest)] = rest
        more = number + 1 < len(blocks)
        assert replies.received(len(rest), more=more) == Verdict(True, None, None)


def test_an_error_while_the_next_block_is_queued() -> None:
    """If the next block is refused while it is queued, that is reported for it, also if the error comes with the reply to a block."""
    replies = Replies()
    replies.expect(1)
    received = b"+OK\r\n+QUEUED\r\n*1\r\n$3\r\n0-1\r\n" + b"+OK\r\n-OOM no room\r\n"
    replies.space()[: len(received)] = received
    assert replies.received(len(received), more=True) == Verdict(True, None, None)
    replies.expect(1)

    assert replies.so_far() == Verdict(False, "OOM no room", 0)
    last = b"-EXECABORT discarded\r\n"
    replies.space()[: len(last)] = last
    assert replies.received(len(last)) == Verdict(False, "OOM no room", 0)


@given(st.integers(1, 20), st.data(), CUTS)
def test_refused_while_queueing(rows: int, data: st.DataObject, cuts: list[int]) -> None:
    """The first refused command is named; EXECABORT behind it is not taken for the reason."""
    refused = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    lines = [b"-OOM no room %d" % n if n in refused else b"+QUEUED" for n in range(rows)]
    answer = b"\r\n".join([b"+OK", *lines, b"-EXECABORT discarded", b""])

    first = min(refused)
    assert read(answer, rows, cuts) == Verdict(
        executed=False, error=f"OOM no room {first}", row=first
    )


@given(st.integers(1, 20), st.data(), CUTS)
def test_failed_at_exec(rows: int, data: st.DataObject, cuts: list[int]) -> None:
    """A command that fails when EXEC runs it is named, and the block counts as executed."""
    failed = data.draw(st.integers(0, rows - 1))
    items = [b"$3\r\n0-1"] * rows
    items[failed] = b"-WRONGTYPE not a stream"
    lines = [b"+OK", *[b"+QUEUED"] * rows, b"*%d" % rows, *items, b""]

    assert read(b"\r\n".join(lines), rows, cuts) == Verdict(
        executed=True, error="WRONGTYPE not a stream", row=failed
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"-NOAUTH first\r\n-NOAUTH\r\n-NOAUTH\r\n", Verdict(False, "NOAUTH first", None)),
        (b"+OK\r\n+QUEUED\r\n-EXECABORT why\r\n", Verdict(False, "EXECABORT why", None)),
        (b"+OK\r\n+QUEUED\r\n*-1\r\n", Verdict(False, None, None)),
    ],
)
def test_whole_blocks_that_did_not_run(answer: bytes, expected: Verdict) -> None:
    """Errors of MULTI and EXEC belong to no row; a null answer is an aborted block."""
    assert read(answer, 1, []) == expected


HELD = [(b"$-1\r\n", None), (b"$0\r\n\r\n", b""), (b"$4\r\na\r\nb\r\n", b"a\r\nb")]


@given(st.lists(IDS, max_size=9), st.sampled_from(HELD), CUTS)
def test_a_kept_position(ids: list[str], held: tuple[bytes, bytes | None], cuts: list[int]) -> None:
    """A block that keeps a position ends with what its key holds, whatever that is."""
    answer = b"+OK\r\n" + b"+QUEUED\r\n" * (len(ids) + 1) + b"*%d\r\n" % (len(ids) + 1)
    answer += b"".join(b"$%d\r\n%s\r\n" % (len(text), text.encode()) for text in ids)
    answer += b"+OK\r\n+OK\r\n" + held[0]

    expected = Verdict(executed=True, error=None, row=None, stored=held[1])
    assert read(answer, len(ids), cuts, keeping=True) == expected


@given(st.sampled_from(HELD), CUTS)
def test_a_block_overtaken(held: tuple[bytes, bytes | None], cuts: list[int]) -> None:
    """A null answer to EXEC is followed by what the key holds by then."""
    answer = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*-1\r\n+OK\r\n" + held[0]

    expected = Verdict(executed=False, error=None, row=None, stored=held[1])
    assert read(answer, 1, cuts, keeping=True) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            b"+OK\r\n-OOM a\r\n-OOM b\r\n-EXECABORT why\r\n+OK\r\n$1\r\np\r\n",
            Verdict(False, "OOM a", 0, b"p"),
        ),
        (
            b"+OK\r\n+QUEUED\r\n-NOPERM key\r\n-EXECABORT why\r\n-NOPERM w\r\n-NOPERM g\r\n",
            Verdict(False, "NOPERM key", 1, None),
        ),
        (
            b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n$1\r\nx\r\n+OK\r\n-NOPERM w\r\n-NOPERM g\r\n",
            Verdict(True, "NOPERM w", None, None),
        ),
    ],
)
def test_refusals_of_a_block_that_keeps(answer: bytes, expected: Verdict) -> None:
    """The SET is the row after the last one; WATCH and GET belong to none."""
    assert read(answer, 1, [], keeping=True) == expected


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$3\r\n0-1\r\n",
        b"+OK\r\n+QUEUED\r\n*2\r\n",
        b"+OK\r\n+QUEUED\r\n+OK\r\n",
        b"+OK\r\n+QUEUED\r\n*1\r\n$-1\r\n",
        b"+OK\r\n+QUEUED\r\n*1\r\n$3\r\n0-1\r\n+more\r\n",
    ],
)
def test_answers_to_something_else(answer: bytes) -> None:
    """What is no answer to a block of one message makes the connection unusable."""
    with pytest.raises(SinkUnavailable):
        read(answer, 1, [])


NOISE = st.binary(min_size=1, max_size=9) | st.sampled_from(
    [
        b"+OK\r\n",
        b"+QUEUED\r\n",
        b"-\r\n",
        b"\r\n",
        b"\n",
        b"*0\r\n",
        b"*1\r\n",
        b"*2\r\n",
        b"$\r\n",
    ]
    + [b"$%d\r\n" % size for size in (0, 3, -1, -(2**62), 2**31, 2**63, 2**64 - 1)]
)


@given(st.lists(NOISE), st.integers(0, 3), st.booleans())
def test_any_bytes_end_well(pieces: list[bytes], rows: int, keeping: bool) -> None:
    """No bytes make the parser loop, read outside its buffer or raise a foreign error."""
    replies = Replies()
    replies.expect(rows, keeping=keeping)
    for piece in pieces:
        replies.space()[: len(piece)] = piece
        try:
            if replies.received(len(piece)) is not None:
                return
        except SinkUnavailable:
            return


def test_long_answers_get_room() -> None:
    """The buffer grows with an answer of many long error lines."""
    rows = 5_000
    answer = b"+OK\r\n" + (b"-OOM " + b"x" * 200 + b"\r\n") * rows + b"-EXECABORT\r\n"
    replies = Replies()
    replies.expect(rows)
    verdict, at = None, 0
    while at < len(answer):
        space = replies.space()
        piece = answer[at : at + len(space)]
        space[: len(piece)] = piece
        verdict = replies.received(len(piece))
        at += len(piece)

    assert verdict is not None
    assert verdict.row == 0
