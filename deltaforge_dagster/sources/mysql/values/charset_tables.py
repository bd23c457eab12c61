"""The tables by which kernels read MySQL's character sets, made of what `charsets` says.

A set of single bytes is a line of `SINGLES`. Sets of several bytes have tables of Unicode code points,
made when the first column with such a set is met, and used again from then on::

    place in the table     the code point, 0 for none, of
    0 - 0x7FFF             the single byte
    0x8000 - 0xFFFF        the two bytes lead, trail: lead << 8 | trail
    65536 +                sets of three bytes: 0x8F, lead, trail: lead << 8 | trail
                           sets of four bytes: the number of the code (`gb18030_number`), up to U+FFFF
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS, Charset, Form

PLANE = 1 << 16
"""Size of a table; those of sets with three or four bytes have two of them."""

GB18030_BMP = 39_420
"""Numbers of four bytes below this are characters up to U+FFFF."""

_SHORT = {8: b"b", 9: b"t", 10: b"n", 12: b"f", 13: b"r"}

_NAMES = sorted({c.name for c in CHARSETS.values() if c.form is Form.SINGLE})
_CHARSETS = {charset.name: charset for charset in CHARSETS.values()}


def single_line(charset: Charset) -> int:
    """Return the line of `SINGLES` that a set of single bytes has."""
    return _NAMES.index(charset.name)


def _singles() -> Bytes:
    """Return each byte as a JSON string's bytes: how many, then they; none for no character."""
    table = np.zeros((len(_NAMES), 256, 7), np.uint8)
    for line, name in enumerate(_NAMES):
        for byte in range(256):
            character = _CHARSETS[name].character(bytes([byte]))
            if character is None:
                continue
            text = character.encode()
            if character < " ":
                text = b"\\" + _SHORT.get(byte, b"u%04x" % byte)
            elif character in '"\\':
                text = b"\\" + text
            table[line, byte, 0] = len(text)
            table[line, byte, 1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
    return table


SINGLES = _singles()


@functools.cache
def code_points(charset: Charset) -> npt.NDArray[np.uint16]:
    """Return the table of a set of several bytes."""
    table = np.zeros(PLANE if charset.width == 2 else 2 * PLANE, np.uint16)
    for byte in range(256):
        _enter(table, byte, charset.character(bytes([byte])))
    for lead in range(0x80, 256):
        if table[lead]:
            continue  # it stands for itself
        for trail in range(256):
            _enter(table, lead << 8 | trail, charset.character(bytes([lead, trail])))
            if charset.width == 3 and lead > 0xA0 and trail > 0xA0:
                place = PLANE + (lead << 8 | trail)
                _enter(table, place, charset.character(bytes([0x8F, lead, trail])))
    if charset.width == 4:
        for number in range(GB18030_BMP):
            code = gb18030_code(number)
            _enter(table, PLANE + number, charset.character(code))
    return table


def gb18030_code(number: int) -> bytes:
    """Return the code of four bytes with this number, counted from 81 30 81 30."""
    number, fourth = divmod(number, 10)
    number, third = divmod(number, 126)
    first, second = divmod(number, 10)
    return bytes([0x81 + first, 0x30 + second, 0x81 + third, 0x30 + fourth])


def _enter(table: npt.NDArray[np.uint16], place: int, character: str | None) -> None:
    if character is not None:
        table[place] = ord(character)
