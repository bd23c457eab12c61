"""Read views of Turso and SQLite: up to which change, or row of each table, a read could see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.snapshot import codes, column_of
from deltaforge_dagster.sources.turso.position import TursoPosition


@dataclass(frozen=True, slots=True)
class TursoReadView:
    """The read view of a session: it sees rows and changes as of one moment, that of `position`."""

    position: TursoPosition

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Parse the fields that `to_json` wrote; None if they belong to another kind of source."""
        position = TursoPosition.from_fields(fields)
        return None if position is None else cls(position)

    def to_json(self) -> str:
        """Return the JSON text of the position."""
        return self.position.to_json()

    def covers(self, position: Position) -> bool:
        """Return whether the read saw every transaction up to a position."""
        return isinstance(position, TursoPosition) and position <= self.position

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Mark changes with larger numbers; in mode `polling`, rowids of the table in `file`."""
        file = column_of(rows, "file")
        assert isinstance(file, pa.DictionaryArray)
        seen = dict(self.position.table_positions)
        lowest = np.iinfo(np.int64).min
        by_table = [seen.get(str(name), lowest) for name in file.dictionary.to_pylist()]
        limit = np.array([*by_table, self.position.last_change_id or 0], np.int64)[codes(file)]
        column = column_of(rows, "pos")
        pos = column.fill_null(lowest).to_numpy(zero_copy_only=False)
        return pa.array(pos > limit)
