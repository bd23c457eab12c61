"""Statements as their session and server read them."""

from __future__ import annotations

import re
import struct

import pytest

from deltaforge_dagster.sources.mysql.events.binlog import LogServer, parse_query
from deltaforge_dagster.sources.mysql.events.sql_text import SqlSession, plain

MYSQL, MARIADB = SqlSession(), SqlSession(is_mariadb=True)
ANSI, NO_ESCAPES = SqlSession(sql_mode=1 << 2), SqlSession(sql_mode=1 << 20)
BOTH = SqlSession(sql_mode=1 << 2 | 1 << 20 | 1 << 29)


@pytest.mark.parametrize(
    ("session", "text", "expected"),
    [
        (MYSQL, "a /* b ' */ c # d '\n e -- f\n g --1 h", "a c e g --1 h"),
        (MYSQL, "a /*!80000 b /* c */ d */ e", "a b d e"),
        (MYSQL, "a /*! b */ /*!1 c */ e", "a b 1 c e"),
        (MYSQL, "a /* 99999 b /* c */ d */ e", "a e"),
        (MYSQL, "d(/*!500005*/,2) /*!050000 x */", "d( 5 ,2) x"),
        (MARIADB, "a /*!100100 b */ /*!050000 c */", "a b c"),
        (MYSQL, "a /*M! b */ /*M!100100 c */ d", "a d"),
        (MARIADB, "a /*M! b */ /*M!100100 c */ /*m! d */ /*M 999999 e */ f", "a b c f"),
        (MYSQL, r"""'a\'b' "c""d'e" `f``g` '\n\%\\'""", "'a''b' 'c\"d''e' `f``g` '\n\\\\%\\\\'"),
        (NO_ESCAPES, r"""'a\' "b\" 'c''d'""", r"""'a\\' 'b\\' 'c''d'"""),
        (ANSI, '''"a""b`c" 'd\\'e' "f\\"''', "`a\"b``c` 'd''e' `f\\`"),
        (BOTH, '''"a\\" 'b\\' "c"''', r"`a\` 'b\\' `c`"),
        (MARIADB, "SET STATEMENT x = 'FOR', y=2 FOR ALTER TABLE t", "ALTER TABLE t"),
        (MARIADB, "set statement sql_mode='' for x", "set statement sql_mode='' for x"),
    ],
)  # fmt: skip
def test_plain(session: SqlSession, text: str, expected: str) -> None:
    """Comments go, code stays, quotes become those of MySQL's default; a plain statement stays as it is."""
    found = plain(text, session)
    again = plain(found, MYSQL)
    assert re.sub(" +", " ", found).strip() == expected
    assert re.sub(" +", " ", again).strip() == expected


def query(text: bytes, *variables: bytes) -> bytes:
    """Return the body of a QUERY event."""
    status = b"".join(variables)
    return struct.pack("<IIBHH", 8, 0, 4, 0, len(status)) + status + b"shop\0" + text


SJIS, GBK = 13, 28


@pytest.mark.parametrize(
    ("charset", "codec", "text"),
    [
        (SJIS, "shift_jis", "x '\u8868', '\u30bd\\'', `\u4e88`"),
        (GBK, "gbk", "x '\u8aa0', `\u9295` '\\''"),
        (1, "big5", "x '\u529f', '\u84cb' '\\''"),
        (248, "gb18030", "x '\u8aa0\U0001f600' '\\''"),
        (45, "utf-8", "x '\u8868\u00a0' a\u3000b"),
        (8, "cp1252", "x '\u00e9\u20ac'"),
    ],
)
def test_the_event_has_the_character_set(charset: int, codec: str, text: str) -> None:
    """Where a backslash or a backtick is part of a character, also beside bytes that are none."""
    variables = [
        b"\0" + bytes(4),
        b"\1" + bytes(8),
        b"\6\3std",
        b"\x83\2" + bytes(8),
        b"\4" + struct.pack("<HHH", charset, charset, 8),
    ]
    body = query(text.encode(codec), *variables)
    found = parse_query(body, LogServer())
    assert found.statement == text
    assert found.sql == text.replace("\\'", "''")
    if codec != "cp1252":
        broken = parse_query(
            query(text.encode(codec) + b", '\xff\xff\\''", *variables), LogServer()
        )
        assert broken.sql.replace("\ufffd", "") == found.sql + ", ''''"


@pytest.mark.parametrize(
    ("server", "variables", "expected"),
    [
        ("9.7.0", [b"\x0c\2a\0b\0", b"\x0b\1u\1h", b"\x11" + bytes(8)], "CREATE TABLE  t (x int)"),
        ("9.7.0", [b"\x0c\xfe", b"\x12\xff\0"], "CREATE TABLE IF NOT EXISTS t (x int)"),
        ("11.4.5-MariaDB", [], "CREATE TABLE  t (x int)"),
    ],
)
def test_a_table_that_was_made_is_made(server: str, variables: list[bytes], expected: str) -> None:
    """MariaDB logs `IF NOT EXISTS` only with an effect; MySQL's event has the number of a transaction then."""
    body = query(b"CREATE TABLE IF NOT EXISTS t (x int)", *variables)
    assert parse_query(body, LogServer.named(server)).sql == expected
