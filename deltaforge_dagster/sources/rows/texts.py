"""Scratch memory for what kernels write of rows: their images and keys, used again for each batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.rows.arrays import text_column
from deltaforge_dagster.sources.rows.hiding import Shown

_ROOM = 16 << 20
"""Bytes of JSON per text column and batch; a single row may have more."""

_NAMES = ("before", "after", "key")


class RowTexts:
    """Three texts, each of one row after the other: the images before and after, and the key.

    Args:
        max_rows: Rows at most.

    Attributes:
        texts: The memory of the three.
        ends: A line for each text: where those of each row end in it.
        valid: In the same form, 0 for null.
    """

    def __init__(self, max_rows: int) -> None:
        self.texts = _texts(_ROOM)
        self.ends = np.empty((3, max_rows), np.int64)
        self.valid = np.empty((3, max_rows), np.uint8)

    def make_room(self, room: int) -> None:
        """Have so many bytes for each text: a single row needs more than there are.

        Raises:
            MemoryError: This machine has not so much.
        """
        self.texts = _texts(room)

    def columns(self, shown: Shown, count: int) -> dict[str, pa.Array[Any]]:
        """Return columns of the change frame with what the first rows show, copied out.

        What a large row took is given back.
        """
        columns = {
            name: text_column(shown.texts[text], shown.ends[text, :count], self.valid[text, :count])
            for text, name in enumerate(_NAMES)
        }
        if self.texts[0].size > _ROOM:
            self.texts = _texts(_ROOM)
        return columns


def _texts(room: int) -> tuple[Bytes, Bytes, Bytes]:
    """Return memory for the three texts; pages that are never written cost nothing."""
    return np.empty(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint8)
