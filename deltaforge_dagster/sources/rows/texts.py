"""Scratch memory into which kernels write the images and keys of rows; reused for each batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.rows.arrays import text_column
from deltaforge_dagster.sources.rows.hiding import Shown

_ROOM = 16 << 20
"""Bytes of JSON per text column and batch; one larger row makes the memory grow for a while."""

_NAMES = ("before", "after", "key")


class RowTexts:
    """Three text columns: image before, image after, key.

    Each has the texts of all rows one after the other.

    Args:
        max_rows: The largest number of rows in a batch.

    Attributes:
        texts: The memory of each column.
        ends: `ends[column, row]` is the offset at which the row's text ends.
        valid: `valid[column, row]` is 0 if the row's text is null.
    """

    def __init__(self, max_rows: int) -> None:
        self.texts = _texts(_ROOM)
        self.ends = np.empty((3, max_rows), np.int64)
        self.valid = np.empty((3, max_rows), np.uint8)

    def make_room(self, room: int) -> None:
        """Replace the memory by `room` bytes for each column, for a row above the usual size.

        Raises:
            MemoryError: The machine does not have that much memory.
        """
        self.texts = _texts(room)

    def columns(self, shown: Shown, count: int) -> dict[str, pa.Array[Any]]:
        """Copy the first `count` rows, after column rules, into columns of the change frame.

        If the memory has grown for a large row, it is replaced by memory of the usual size.
        """
        columns = {
            name: text_column(shown.texts[text], shown.ends[text, :count], self.valid[text, :count])
            for text, name in enumerate(_NAMES)
        }
        if self.texts[0].size > _ROOM:
            self.texts = _texts(_ROOM)
        return columns


def _texts(room: int) -> tuple[Bytes, Bytes, Bytes]:
    """Return memory for the three columns; pages that are never written cost nothing."""
    return np.empty(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint8)
