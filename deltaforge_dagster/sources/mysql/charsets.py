"""MySQL's character sets: which collation numbers mean which, and how Python reads them.

The log names a column's character set by the number of its collation
(`information_schema.collations.id`; these numbers never change). UTF-8, ASCII and Latin 1 are read
by the kernels, most others by Python's codecs. A character set that Python has no codec for stops
the pipeline instead of being guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Charset:
    """A character set.

    Attributes:
        name: As MySQL calls it.
        codec: As Python calls it, "" when it has none.
        width: Bytes of its longest character.
    """

    name: str
    codec: str
    width: int


BINARY = Charset("binary", "", 1)
LATIN_1 = Charset("latin1", "", 1)
"""MySQL's `latin1` is cp1252, whose five free places are the control characters of ISO 8859-1; no
codec of Python's is that."""
UTF_8 = (
    Charset("ascii", "ascii", 1),
    Charset("utf8mb3", "utf-8", 3),
    Charset("utf8mb4", "utf-8", 4),
)

_COLLATIONS: dict[Charset, tuple[int | tuple[int, int], ...]] = {
    BINARY: (63,),
    LATIN_1: (5, 8, 15, 31, 47, 48, 49, 94),
    UTF_8[0]: (11, 65),
    UTF_8[1]: (33, 76, 83, (192, 215), 223),
    UTF_8[2]: (45, 46, (224, 247), (255, 323)),
    Charset("big5", "big5", 2): (1, 84),
    Charset("cp1250", "cp1250", 1): (26, 34, 44, 66, 99),
    Charset("cp1251", "cp1251", 1): (14, 23, 50, 51, 52),
    Charset("cp1256", "cp1256", 1): (57, 67),
    Charset("cp1257", "cp1257", 1): (29, 58, 59),
    Charset("cp850", "cp850", 1): (4, 80),
    Charset("cp852", "cp852", 1): (40, 81),
    Charset("cp866", "cp866", 1): (36, 68),
    Charset("cp932", "cp932", 2): (95, 96),
    Charset("eucjpms", "euc_jp", 3): (97, 98),
    Charset("euckr", "euc_kr", 2): (19, 85),
    Charset("gb18030", "gb18030", 4): ((248, 250),),
    Charset("gb2312", "gb2312", 2): (24, 86),
    Charset("gbk", "gbk", 2): (28, 87),
    Charset("greek", "iso8859_7", 1): (25, 70),
    Charset("hebrew", "iso8859_8", 1): (16, 71),
    Charset("koi8r", "koi8_r", 1): (7, 74),
    Charset("koi8u", "koi8_u", 1): (22, 75),
    Charset("latin2", "iso8859_2", 1): (2, 9, 21, 27, 77),
    Charset("latin5", "iso8859_9", 1): (30, 78),
    Charset("latin7", "iso8859_13", 1): (20, 41, 42, 79),
    Charset("macce", "mac_latin2", 1): (38, 43),
    Charset("macroman", "mac_roman", 1): (39, 53),
    Charset("sjis", "shift_jis", 2): (13, 88),
    Charset("tis620", "tis_620", 1): (18, 89),
    Charset("ucs2", "utf_16_be", 2): (35, 90, (128, 151), 159),
    Charset("ujis", "euc_jp", 3): (12, 91),
    Charset("utf16", "utf_16_be", 4): (54, 55, (101, 124)),
    Charset("utf16le", "utf_16_le", 4): (56, 62),
    Charset("utf32", "utf_32_be", 4): (60, 61, (160, 183)),
    Charset("armscii8", "", 1): (32, 64),
    Charset("dec8", "", 1): (3, 69),
    Charset("geostd8", "", 1): (92, 93),
    Charset("hp8", "hp_roman8", 1): (6, 72),
    Charset("keybcs2", "", 1): (37, 73),
    Charset("swe7", "", 1): (10, 82),
}

CHARSETS = {
    collation: charset
    for charset, numbers in _COLLATIONS.items()
    for number in numbers
    for collation in (
        range(number[0], number[1] + 1) if isinstance(number, tuple) else range(number, number + 1)
    )
}
"""The character set of each collation, by number."""
