from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.postgres.decode.pgoutput import (
    LogicalMessage,
    Relation,
    RelationColumn,
    SentType,
    parse_message,
    parse_relation,
    parse_type,
    truncate_payload,
)
from deltaforge_lab.synthetic import postgres_messages as samples

COLUMNS = (("id", 20, -1, True), ("näme", 1043, 68, False))
MESSAGE = samples.relation(16_385, "public", "users", COLUMNS, "i")[1:]


def test_relation() -> None:
    """A Relation message says all that it says; a system table's schema is sent empty."""
    assert parse_relation(MESSAGE) == Relation(
        16_385,
        "public",
        "users",
        "i",
        (RelationColumn("id", 20, -1, True), RelationColumn("näme", 1043, 68, False)),
    )
    assert parse_relation(samples.relation(1, "", "t", ())[1:]).schema == "pg_catalog"


def test_every_cut_relation_is_refused() -> None:
    """A Relation message that is shorter or longer is damage, never a table with fewer columns."""
    for end in range(len(MESSAGE)):
        with pytest.raises(CorruptLog):
            parse_relation(MESSAGE[:end])
    with pytest.raises(CorruptLog, match="goes on"):
        parse_relation(MESSAGE + b"\0")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (MESSAGE.replace(b"users\0i", b"users\0x"), "unknown replica identity 'x'"),
        (MESSAGE.replace(b"users", b"us\xffrs"), "not UTF-8"),
        (samples.relation(1, "s", "t", [COLUMNS[0], COLUMNS[0]])[1:], "two columns of one name"),
    ],
)
def test_bad_relations(message: bytes, words: str) -> None:
    """What cannot be a table is refused in words."""
    with pytest.raises(CorruptLog, match=words):
        parse_relation(message)


def test_logical_messages() -> None:
    """A message says where it stands and whether it belongs to a transaction; any cut is damage."""
    message = samples.message(7, "aüdit", b"{}", transactional=False)[1:]

    assert parse_message(message) == LogicalMessage(False, 7, "aüdit", 2)
    for bad in (
        *(message[:end] for end in range(len(message))),
        message + b"x",
        b"\2" + message[1:],
    ):
        with pytest.raises(CorruptLog):
            parse_message(bad)


def test_types() -> None:
    """A Type message names a type; it ends where its name does."""
    message = b"\0\0\x42\x43" + "sch\0mö\0".encode()

    assert parse_type(message) == SentType(0x4243, "sch", "mö")
    assert parse_type(b"\0\0\0\x01\0int4\0").schema == "pg_catalog"
    for bad in (*(message[:end] for end in range(len(message))), message + b"x"):
        with pytest.raises(CorruptLog):
            parse_type(bad)


def test_truncate_flags() -> None:
    """The flags of a truncate, as its event says them."""
    assert truncate_payload(2) == '{"sql":"TRUNCATE","cascade":false,"restart_identity":true}'
    assert truncate_payload(1) == '{"sql":"TRUNCATE","cascade":true,"restart_identity":false}'


@given(st.binary(max_size=60))
def test_any_bytes_are_answered(content: bytes) -> None:
    """Random bytes are what they are read as, or an error of the tree."""
    for read in (parse_relation, parse_type, parse_message):
        try:
            read(content)
        except CorruptLog as error:
            assert str(error)  # noqa: PT017
