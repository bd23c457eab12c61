"""What a read of a table could see in Turso and SQLite: the newest change, or the newest row of each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.snapshot.base import codes, column_of
from deltaforge_dagster.sources.turso.position import TursoPosition


@dataclass(frozen=True, slots=True)
class TursoReadView:
    """What a read sees of a Turso or SQLite database: it is one moment for rows and changes."""

    position: TursoPosition

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Return what `to_json` wrote, None for another kind's."""
        position = TursoPosition.from_fields(fields)
        return None if position is None else cls(position)

    def to_json(self) -> str:
        """Return the position."""
        return self.position.to_json()

    def covers(self, position: Position) -> bool:
        """Say whether every transaction up to a position was seen for certain."""
        return isinstance(position, TursoPosition) and position <= self.position

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say which changes have larger numbers; those by table have the table in `file`."""
        file = column_of(rows, "file")
        assert isinstance(file, pa.DictionaryArray)
        seen = dict(self.position.table_positions)
        lowest = np.iinfo(np.int64).min
        by_table = [seen.get(str(name), lowest) for name in file.dictionary.to_pylist()]
        limit = np.array([*by_table, self.position.last_change_id or 0], np.int64)[codes(file)]
        column = column_of(rows, "pos")
        pos = column.fill_null(lowest).to_numpy(zero_copy_only=False)
        return pa.array(pos > limit)
