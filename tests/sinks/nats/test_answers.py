"""What a NATS server says, cut anywhere."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.sinks.nats.answers import DUPLICATE, STORED, Answers

PREFIX = len("_I.")


def message(number: object, body: str) -> bytes:
    """Return an answer."""
    return f"MSG _I.{number} 1 {len(body)}\r\n{body}\r\n".encode()


def received(data: bytes, step: int, messages: int = 0) -> Answers:
    """Return what is known after `data` came in pieces."""
    answers = Answers(PREFIX)
    answers.expect(messages)
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        answers.space()[: len(piece)] = piece
        answers.received(len(piece))
    return answers


TALK = (
    b"+OK\r\nPING\r\n"
    + message(1, '{"stream":"S", "seq":17}')
    + message(3, '{"stream":"S","domain":"hub","seq":12345678901,"duplicate": true}')
    + b'INFO {"a":"b"}\r\nPING\r\n'
    + message(2, '{"stream":"S", "seq":18}')
    + message(99, '{"stream":"S", "seq":99}')
    + message(4, '{"error":{"code":400,"err_code":10071,"description":"wrong"},"seq":0}')
    + b"HMSG _I.5 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    + b"PONG\r\n"
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 10_000])
def test_every_answer_counts_once(step: int) -> None:
    """Stored, dropped, refused, and what is no answer to a message, in any order and any pieces."""
    answers = received(TALK, step, messages=5)

    assert answers.outcomes(1, 3).tolist() == [STORED, STORED, DUPLICATE]
    assert (answers.first_missing, answers.next_number) == (6, 6)
    assert (answers.sequence, answers.pongs) == (18, 1)
    assert answers.sequences(1, 3).tolist() == [17, 18, 12345678901]
    assert answers.refusal is not None
    assert (answers.refusal.number, "10071" in answers.refusal.text) == (4, True)
    assert (answers.take_pings(), answers.take_pings()) == (2, 0)


def test_the_first_missing_one_is_known() -> None:
    """Answers that overtake others do not hide that these are missing."""
    answers = received(message(2, '{"stream":"S", "seq":2}'), 100, messages=2)

    assert answers.first_missing == 1


def test_what_was_answered_can_be_forgotten() -> None:
    """Numbers go on behind what was forgotten; a late answer to that changes nothing."""
    answers = received(TALK, 1000, messages=5)
    answers.forget(6)
    answers.forget_refusal()
    answers.expect(1)
    for number in (2, 6):
        data = message(number, '{"stream":"S", "seq":20}')
        answers.space()[: len(data)] = data
        answers.received(len(data))

    assert (answers.first_missing, answers.refusal) == (7, None)


@pytest.mark.parametrize("step", [1, 10_000])
def test_a_reply_waits_to_be_taken(step: int) -> None:
    """The answer to a request stands in the way of nothing behind it."""
    answers = received(message("r", '{"a":1}') + message(1, '{"stream":"S", "seq":1}'), step, 1)

    assert answers.take_reply() == b'{"a":1}'
    assert answers.take_reply() is None
    assert answers.first_missing == 2


def test_an_error_is_heard() -> None:
    """An -ERR line is kept as it is."""
    assert received(b"-ERR 'Stale Connection'\r\n", 5).error == "-ERR 'Stale Connection'"


def test_a_large_reply_fits() -> None:
    """Whatever is asked for may be larger than what was made room for."""
    body = '{"a":"' + "x" * 2_000_000 + '"}'

    assert len(received(message("r", body), 60_000).take_reply() or b"") == len(body)


@pytest.mark.parametrize("data", [b"HELLO\r\n", b"MSG _I.1 1 x\r\n", b"MSG _I 1 5\r\nabcde\r\n"])
def test_what_is_no_answer(data: bytes) -> None:
    """Something else than NATS at the other end is an error, not a wait."""
    with pytest.raises(SinkUnavailable, match="no answer"):
        received(data, 100)
