"""Every code of every character set is the character that the server converts it to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pymysql
import pytest

from deltaforge_dagster.sources.mysql.values.charsets import (
    CHARSETS,
    GB18030_BMP,
    Charset,
    Form,
    gb18030_code,
)
from deltaforge_lab.servers.mysql import MysqlServer, connect

_BY_NAME = {charset.name: charset for charset in CHARSETS.values()}


@pytest.fixture(scope="module")
def connection(mysql_server: MysqlServer) -> Iterator[pymysql.Connection[Any]]:
    """A connection that takes what is no text for an empty one, with a warning."""
    with connect(mysql_server.create_database()) as opened, opened.cursor() as cursor:
        cursor.execute("SET sql_mode = ''")
        cursor.execute("CREATE TEMPORARY TABLE codes (i int PRIMARY KEY, code varbinary(8))")
        yield opened


def converted(
    connection: pymysql.Connection[Any], name: str, codes: Sequence[bytes]
) -> list[str | None]:
    """Return the character that the server makes of each code, None for none."""
    found: list[str | None] = []
    with connection.cursor() as cursor:
        for at in range(0, len(codes), 5000):
            lines = [f"({i},x'{code.hex()}')" for i, code in enumerate(codes[at : at + 5000])]
            cursor.execute("DELETE FROM codes")
            cursor.execute(f"INSERT INTO codes VALUES {','.join(lines)}")
            cursor.execute(
                f"SELECT hex(convert(cast(code AS char CHARACTER SET {name}) USING utf8mb4))"
                " FROM codes ORDER BY i"
            )
            texts = [bytes.fromhex(row[0] or "").decode() for row in cursor.fetchall()]
            for text, code in zip(texts, codes[at : at + 5000], strict=True):
                # The server shows `?` or U+FFFD for what it cannot convert.
                missing = len(text) != 1 or (text == "?" and code != b"?") or text == "\ufffd"
                found.append(None if missing else text)
    return found


@pytest.mark.mysql
@pytest.mark.parametrize(
    "name", sorted(c.name for c in _BY_NAME.values() if c.form in (Form.SINGLE, Form.MULTI))
)
def test_every_code_is_what_the_server_says(connection: pymysql.Connection[Any], name: str) -> None:
    """Our table has the server's characters, and no other; four bytes where they are in the BMP."""
    charset = _BY_NAME[name]
    single = [bytes([byte]) for byte in range(256)]
    of_one = dict(zip(single, converted(connection, name, single), strict=True))
    codes = list(single)
    if charset.form is Form.MULTI:
        leads = [byte for byte in range(0x80, 256) if of_one[bytes([byte])] is None]
        trails = set(range(0x20, 256))
        if name == "gb2312":  # converted, but not let into a column
            trails -= set(range(0x20, 0xA1))
        codes += [bytes([lead, trail]) for lead in leads for trail in sorted(trails)]
    if charset.width == 3:
        codes += [bytes([0x8F, a, b]) for a in range(0xA1, 255) for b in range(0xA1, 255)]
    if charset.width == 4:
        # U+FFFD is a character of this set, too.
        codes += [gb18030_code(n) for n in range(0, GB18030_BMP, 7) if n != 39_417]

    said = converted(connection, name, codes)

    differences = [
        (code.hex(), text, charset.character(code))
        for code, text in zip(codes, said, strict=True)
        if charset.character(code) != text
    ]
    assert not differences


@pytest.mark.mysql
def test_every_character_set_and_collation_is_known(connection: pymysql.Connection[Any]) -> None:
    """Each collation that the server has belongs to the character set that it says."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, character_set_name FROM information_schema.collations")
        for number, name in cursor.fetchall():
            assert CHARSETS[number].name == {"utf8": "utf8mb3"}.get(name, name)


def test_a_label_in_any_character_set() -> None:
    """Short texts are decoded in sets of one to four bytes a character; what is none is an error."""
    assert _decoded("gb18030", "a日\U0001f600") == "a日\U0001f600"
    assert _decoded("sjis", "aｱ日") == "aｱ日"
    assert _BY_NAME["eucjpms"].decode(b"\x8f\xf3\xf3\xad\xa1") == "ⅰ①"
    assert _BY_NAME["swe7"].decode(b"{}") == "äå"
    with pytest.raises(ValueError, match=r"^$"):
        _BY_NAME["swe7"].decode(b"\xe4")


def _decoded(name: str, text: str) -> str:
    charset: Charset = _BY_NAME[name]
    return charset.decode(text.encode(charset.codec))
