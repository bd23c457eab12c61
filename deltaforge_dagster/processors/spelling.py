"""Numbers in row images that another language writes otherwise than the source did.

`1.10`, `2e3` and `12345678901234567890` are valid JSON, but a program that reads them as doubles and
writes them again changes them to `1.1`, `2000` and `12345678901234567000`. Whoever hands images to
such a program asks here whether it has to take care.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.processors.json_fields import string_end
from deltaforge_dagster.processors.text import layout
from deltaforge_dagster.sources.characters import MINUS, QUOTE
from deltaforge_dagster.sources.kernel import Bytes, kernel

_SAFE_DIGITS = 15
"""Every integer of so many digits is a double (IEEE 754: 53 bits)."""


def has_unusual_numbers(documents: pa.Array[pa.Scalar[pa.DataType]]) -> bool:
    """Say whether a number in JSON texts is not an integer of at most 15 digits.

    Args:
        documents: A column of JSON texts, valid ones; null has no numbers.
    """
    if documents.null_count == len(documents):
        return False
    ends, data = layout(cast("pa.StringArray", documents))
    return bool(_unusual(data, ends))


# A number (RFC 8259, section 6), which begins where no string, name or bracket does:
#
#   [-] digits [. digits] [e|E [+|-] digits]


@kernel
def _unusual(source: Bytes, ends: npt.NDArray[np.int32]) -> bool:
    for row in range(len(ends) - 1):
        at, stop = int(ends[row]), int(ends[row + 1])
        while at < stop:
            byte = source[at]
            if byte == QUOTE:
                at = string_end(source, at)
                continue
            if byte != MINUS and (byte < 48 or byte > 57):
                at += 1
                continue
            start = at
            if byte == MINUS:
                at += 1
            digits = at
            while at < stop and 48 <= source[at] <= 57:
                at += 1
            if at - digits > _SAFE_DIGITS or (byte == MINUS and source[digits] == 48):
                return True
            if at < stop and (source[at] == 46 or source[at] == 101 or source[at] == 69):  # . e E
                return True
            at = max(at, start + 1)
    return False
