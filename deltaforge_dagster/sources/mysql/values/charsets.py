"""MySQL's character sets: the character set of each collation, and the characters of its codes.

The log identifies a column's character set by the number of its collation
(`information_schema.collations.id`; these numbers never change). A few of MySQL's tables differ
from Python's codecs of the same name, and some have no codec. So a character set is a codec, plus
the differences of MySQL's own conversion to `utf8mb4`: every code of every set was compared on a
server. Codes that MySQL cannot convert, for which a client sees `?`, have no character here either.

Kernels read tables made from this. A single-byte set is a line of `SINGLES`. Multi-byte sets
have tables of Unicode code points, which are made for the first column with such a set and then
cached::

    index in the table     the code point, 0 for none, of
    0 - 0x7FFF             the single byte
    0x8000 - 0xFFFF        the two bytes lead, trail: lead << 8 | trail
    65536 +                sets of three bytes: 0x8F, lead, trail: lead << 8 | trail
                           sets of four bytes: the number of the code (`gb18030_code`), up to U+FFFF
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import Bytes


class Form(Enum):
    """How a character set encodes characters as bytes."""

    BINARY = auto()
    """Not text: bytes."""
    UTF_8 = auto()
    SINGLE = auto()
    """One byte per character."""
    MULTI = auto()
    """One to four bytes per character; ASCII is unchanged."""
    UTF_16 = auto()
    UTF_32 = auto()


@dataclass(frozen=True, slots=True)
class Charset:
    """A character set.

    Attributes:
        name: MySQL's name for it.
        form: How it encodes characters.
        width: Bytes of its longest character.
        codec: The most similar Python codec.
        changes: Codes that differ from the codec, with the character of each; "" for no character.
    """

    name: str
    form: Form
    width: int
    codec: str
    changes: Mapping[bytes, str] = field(default_factory=dict, compare=False)

    def character(self, code: bytes) -> str | None:
        """Return the character of a code; None if it has none."""
        if code in self.changes:
            return self.changes[code] or None
        try:
            text = code.decode(self.codec)
        except UnicodeDecodeError:
            return None
        return text if len(text) == 1 else None

    def decode(self, content: bytes) -> str:
        """Decode a short text, such as a label.

        Raises:
            ValueError: The bytes are not valid in this character set.
        """
        if not self.changes:
            return content.decode(self.codec)
        text = ""
        while content:
            sizes = range(1, min(self.width, len(content)) + 1)
            size = next((n for n in sizes if self.character(content[:n])), 0)
            if not size:
                raise ValueError
            text += self.character(content[:size]) or ""
            content = content[size:]
        return text


def _upper(characters: str, first: int = 0x80) -> dict[bytes, str]:
    """Return `Charset.changes` for the codes from `first` on; U+FFFD stands for no character."""
    return {
        bytes([code]): "" if character == "\ufffd" else character
        for code, character in enumerate(characters, start=first)
    }


def _without_character(codes: str) -> dict[bytes, str]:
    """Return `Charset.changes` for codes without a character, given in hexadecimal."""
    return {bytes.fromhex(code): "" for code in codes.split()}


def _user_defined(prefix: bytes, first: int) -> dict[bytes, str]:
    """Return EUC's ten user-defined rows, mapped to Unicode's private use area from `first` on."""
    cells = [(row, cell) for row in range(0xF5, 0xFF) for cell in range(0xA1, 0xFF)]
    return {prefix + bytes(code): chr(first + index) for index, code in enumerate(cells)}


def _nec_row_13() -> dict[bytes, str]:
    """Return the special characters of row 13 of `cp932`, by their EUC code."""
    characters = {}
    for cell in range(1, 95):
        code = bytes([0x87, cell + 0x3F if cell < 64 else cell + 0x40])
        try:
            characters[bytes([0xAD, 0xA0 + cell])] = code.decode("cp932")
        except UnicodeDecodeError:
            continue
    return characters


def _ibm_extensions() -> dict[bytes, str]:
    """Return IBM's extensions of `cp932` that EUC has nowhere else, by their code in `eucjpms`."""
    cells = [bytes([row, cell]) for row in (0xFA, 0xFB, 0xFC) for cell in range(0x40, 0xFD)]
    characters = [cell.decode("cp932", errors="replace") for cell in cells]
    added = [c for c in characters if len(c) == 1 and _is_new(c)]
    indexes = range(0x52, 0x52 + len(added))
    return {
        bytes([0x8F, 0xF3 + index // 94, 0xA1 + index % 94]): character
        for index, character in zip(indexes, added, strict=True)
    }


def _is_new(character: str) -> bool:
    if character in "\ufffd\uffe2\uffe4\u2235\u2116":
        return character == "\u2116"  # `eucjpms` has this one twice
    try:
        character.encode("euc_jp")
    except UnicodeEncodeError:
        return True
    return False


# 0xE3AC follows ten rows of 94 codes from 0xE000.
_EUC_USER_DEFINED = {**_user_defined(b"", 0xE000), **_user_defined(b"\x8f", 0xE3AC)}
_EUCJPMS = {
    **_EUC_USER_DEFINED,
    **_nec_row_13(),
    **_ibm_extensions(),
    b"\xa1\xc1": "\uff5e",
    b"\xa1\xc2": "\u2225",
    b"\xa1\xdd": "\uff0d",
    b"\xa1\xf1": "\uffe0",
    b"\xa1\xf2": "\uffe1",
    b"\xa2\xcc": "\uffe2",
    b"\x8f\xa2\xb7": "\uff5e",
    b"\x8f\xa2\xc3": "\uffe4",
}
_BIG5 = {
    **_without_character("a15a a1c3 a1c5 a1fe a240 a2cc a2ce"),
    **{bytes([0xF9, 0xD6 + index]): c for index, c in enumerate("碁銹裏墻恒粧嫺")},
}
_ARMSCII8 = _upper(
    "❁§։)(»«—.՝,-՟…՜՛՞ԱաԲբԳգԴդԵեԶզԷէԸըԹթԺժԻիԼլԽխ"  # noqa: RUF001 - as the server has them
    "ԾծԿկՀհՁձՂղՃճՄմՅյՆնՇշՈոՉչՊպՋջՌռՍսՎվՏտՐրՑցՒւՓփՔքՕօՖֆ\u2019'",
    0xA1,
)
_DEC8 = {
    **_without_character("a4 a6 ac ad ae af b4 b8 be d0 de f0 fe ff"),
    b"\xa8": "¤",
    b"\xd7": "Œ",
    b"\xdd": "Ÿ",
    b"\xf7": "œ",
    b"\xfd": "ÿ",
}
_GEOSTD8 = {
    **_without_character("81 83 88 8a 8c 8d 8e 8f 90 98 99 9a 9c 9d 9e 9f fe ff"),
    **_without_character("e6 e7 e8 e9 ea eb ec ed ee ef f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc"),
    **_upper("აბგდევზჱთიკლმნჲოპჟრსტჳუფქღყშჩცძწჭხჴჯჰჵ", 0xC0),
    b"\xfd": "№",
}
_KEYBCS2 = _upper(
    "ČüéďäĎŤčěĚĹÍľĺÄÁÉžŽôöÓůÚýÖÜŠĽÝŘťáíóúňŇŮÔšřŕŔ¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪"
    "┘┌█▄▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\xa0"
)
_SWE7 = dict(zip(map(bytes, zip(b"@[\\]^`{|}~\x7f")), (*"ÉÄÖÅÜéäöåü", "")))  # noqa: B905

BINARY_COLLATION = 63
BINARY = Charset("binary", Form.BINARY, 1, "ascii")


def _single(name: str, codec: str = "", changes: Mapping[bytes, str] | None = None) -> Charset:
    return Charset(name, Form.SINGLE, 1, codec or name, changes or {})


def _multi(
    name: str, width: int, codec: str = "", changes: Mapping[bytes, str] | None = None
) -> Charset:
    return Charset(name, Form.MULTI, width, codec or name, changes or {})


_COLLATIONS: dict[Charset, tuple[int | tuple[int, int], ...]] = {
    BINARY: (BINARY_COLLATION,),
    Charset("ascii", Form.UTF_8, 1, "ascii"): (11, 65),
    Charset("utf8mb3", Form.UTF_8, 3, "utf-8"): (
        33, 76, 83, (192, 215), 223, (576, 578), (2048, 2303),
    ),
    Charset("utf8mb4", Form.UTF_8, 4, "utf-8"): (
        45, 46, (224, 247), (255, 323), (608, 610), (2304, 2559),
    ),
    Charset("ucs2", Form.UTF_16, 2, "utf_16_be"): (
        35, 90, (128, 151), 159, (640, 642), (2560, 2815),
    ),
    Charset("utf16", Form.UTF_16, 4, "utf_16_be"): (54, 55, (101, 124), (672, 674), (2816, 3071)),
    Charset("utf16le", Form.UTF_16, 4, "utf_16_le"): (56, 62),
    Charset("utf32", Form.UTF_32, 4, "utf_32_be"): (60, 61, (160, 183), (736, 738), (3072, 3327)),
    _single("armscii8", "latin_1", _ARMSCII8): (32, 64),
    _single("cp1250"): (26, 34, 44, 66, 99),
    _single("cp1251"): (14, 23, 50, 51, 52),
    _single("cp1256", changes=_without_character("8a 8f 98 9a 9f aa c0 ff")): (57, 67),
    _single("cp1257"): (29, 58, 59),
    _single("cp850"): (4, 80),
    _single("cp852"): (40, 81),
    _single("cp866", changes={b"\xfc": "ⁿ", b"\xfd": "²"}): (36, 68),
    _single("dec8", "latin_1", _DEC8): (3, 69),
    _single(
        "geostd8", "cp1252", {**_upper("".join(map(chr, range(0xA0, 0xC0))), 0xA0), **_GEOSTD8}
    ): (92, 93),
    _single(
        "greek", "iso8859_7", {**_upper("\u02bd\u02bc", 0xA1), **_without_character("a4 a5 aa")}
    ): (25, 70),
    _single("hebrew", "iso8859_8", {b"\xaf": "‾"}): (16, 71),
    _single("hp8", "hp_roman8"): (6, 72),
    _single("keybcs2", "latin_1", _KEYBCS2): (37, 73),
    _single("koi8r", "koi8_r"): (7, 74),
    _single("koi8u", "koi8_u", {b"\x95": "•"}): (22, 75),
    _single("latin1", "cp1252", {bytes([c]): chr(c) for c in b"\x81\x8d\x8f\x90\x9d"}): (
        5, 8, 15, 31, 47, 48, 49, 94,
    ),
    _single("latin2", "iso8859_2"): (2, 9, 21, 27, 77),
    _single("latin5", "iso8859_9"): (30, 78),
    _single("latin7", "iso8859_13"): (20, 41, 42, 79),
    _single("macce", "mac_latin2"): (38, 43),
    _single("macroman", "mac_roman"): (39, 53),
    _single("swe7", "ascii", _SWE7): (10, 82),
    _single("tis620", "tis_620"): (18, 89),
    _multi("big5", 2, changes=_BIG5): (1, 84),
    _multi("cp932", 2, changes=_without_character("80 a0 fd fe ff")): (95, 96),
    _multi("eucjpms", 3, "euc_jp", _EUCJPMS): (97, 98),
    _multi("euckr", 2, "cp949"): (19, 85),
    _multi("gb18030", 4, changes={b"\xa8\xbc": "\u1e3f", b"\x81\x35\xf4\x37": "\ue7c7"}): (
        (248, 250),
    ),
    _multi("gb2312", 2): (24, 86),
    _multi("gbk", 2): (28, 87),
    _multi("sjis", 2, "shift_jis", {b"\x81\x5f": "\\"}): (13, 88),
    _multi("ujis", 3, "euc_jp", {**_EUC_USER_DEFINED, b"\xa1\xc0": "\\"}): (12, 91),
}  # fmt: skip

CHARSETS = {
    collation: charset
    for charset, numbers in _COLLATIONS.items()
    for number in numbers
    for collation in (
        range(number[0], number[1] + 1) if isinstance(number, tuple) else range(number, number + 1)
    )
}
"""The character set of each collation of MySQL and MariaDB, by number."""
# MariaDB's NO PAD collations: their numbers are 1024 higher than those of the padding ones.
CHARSETS |= {1024 + number: charset for number, charset in CHARSETS.items() if number < 1024}

# `utf8` is another name of `utf8mb3`, whose default collation is 33.
_BY_NAME = {charset.name: number for number, charset in reversed(CHARSETS.items())} | {"utf8": 33}


def any_collation(charset: str) -> int | None:
    """Return the number of some collation of the named character set; None if it is unknown."""
    return _BY_NAME.get(charset)


PLANE = 1 << 16
"""Size of a table; sets with three or four bytes per character have a table of twice this size."""

GB18030_BMP = 39_420
"""Four-byte codes of GB18030 with numbers below this are characters up to U+FFFF."""

_SHORT = {8: b"b", 9: b"t", 10: b"n", 12: b"f", 13: b"r"}

_NAMES = sorted({c.name for c in CHARSETS.values() if c.form is Form.SINGLE})
_CHARSETS = {charset.name: charset for charset in CHARSETS.values()}


def single_line(charset: Charset) -> int:
    """Return the line of `SINGLES` for a single-byte character set."""
    return _NAMES.index(charset.name)


def _singles() -> Bytes:
    """Return each byte's character as it is written in a JSON string, for each single-byte set.

    A character is its size in bytes (0 if the byte has no character), followed by the bytes.
    """
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
    """Return the table of code points of a multi-byte character set."""
    table = np.zeros(PLANE if charset.width == 2 else 2 * PLANE, np.uint16)
    for byte in range(256):
        _set_character(table, byte, charset.character(bytes([byte])))
    for lead in range(0x80, 256):
        if table[lead]:
            continue  # a single-byte code
        for trail in range(256):
            _set_character(table, lead << 8 | trail, charset.character(bytes([lead, trail])))
            if charset.width == 3 and lead > 0xA0 and trail > 0xA0:
                index = PLANE + (lead << 8 | trail)
                _set_character(table, index, charset.character(bytes([0x8F, lead, trail])))
    if charset.width == 4:
        for number in range(GB18030_BMP):
            code = gb18030_code(number)
            _set_character(table, PLANE + number, charset.character(code))
    return table


def gb18030_code(number: int) -> bytes:
    """Return the four-byte code of GB18030 with this number, counted from 81 30 81 30."""
    number, fourth = divmod(number, 10)
    number, third = divmod(number, 126)
    first, second = divmod(number, 10)
    return bytes([0x81 + first, 0x30 + second, 0x81 + third, 0x30 + fourth])


def _set_character(table: npt.NDArray[np.uint16], index: int, character: str | None) -> None:
    if character is not None:
        table[index] = ord(character)
