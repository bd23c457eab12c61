"""Detect numbers in row images that another language would spell differently.

`1.10`, `2e3` and `12345678901234567890` are valid JSON, but a program that reads them as doubles
and writes them again changes them to `1.1`, `2000` and `12345678901234567000`. Code that passes
images to such a program checks here whether it has to preserve the spelling.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.kernels.json_fields import string_end
from deltaforge_dagster.kernels.message_text import layout
from deltaforge_dagster.kernels.runtime import MINUS, QUOTE, Bytes, kernel

_SAFE_DIGITS = 15
"""Every integer of up to this many digits is exact as a double (IEEE 754: 53 bits)."""


def has_unusual_numbers(documents: pa.Array[pa.Scalar[pa.DataType]]) -> bool:
    """Return whether a number in JSON texts is anything but an integer of at most 15 digits.

    Args:
        documents: A column of valid JSON texts; null has no numbers.
    """
    if documents.null_count == len(documents):
        return False
    ends, data = layout(cast("pa.StringArray", documents))
    return bool(_unusual(data, ends))


# A number (RFC 8259, section 6) begins with `-` or a digit outside a string:
#
#   [-] digits [. digits] [e|E [+|-] digits]


@kernel
def _unusual(source: Bytes, ends: npt.NDArray[np.int32]) -> bool:
    for row in range(len(ends) - 1):
        at, stop = int(ends[row]), int(ends[row + 1])
        while at < stop:
            byte = source[at]
            if byte == QUOTE:
                at = string_end(source, at, stop)
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
