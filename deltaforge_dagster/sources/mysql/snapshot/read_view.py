"""Read views of MySQL: which transactions a read of a table could see.

With GTIDs it is `gtid_executed`, queried *before* the snapshot began. The server adds a transaction
to it only after the storage engine has committed it, while the log contains it earlier. Without
GTIDs, and in MariaDB, it is the log position up to which the read saw everything, and after which
it saw nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.mysql.gtid import GtidSet
from deltaforge_dagster.sources.mysql.position import BinlogPosition, covers
from deltaforge_dagster.sources.snapshot import Mask, by_transaction, codes, column_of

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class GtidReadView:
    """The read view of a read that began after a MySQL server had executed a GTID set."""

    gtid_set: str

    def to_json(self) -> str:
        """Return `{"gtid_set": "..."}`."""
        return json.dumps({"gtid_set": self.gtid_set})

    def covers(self, position: Position) -> bool:
        """Return whether the read certainly saw every transaction up to a position."""
        return (
            isinstance(position, BinlogPosition)
            and position.gtid_set is not None
            and covers(self.gtid_set, position.gtid_set)
        )

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Mark changes that the read may not have seen; also all of transactions without GTID."""
        anonymous = pc.and_(
            pc.is_null(column_of(rows, "tx_id")), pc.is_valid(column_of(rows, "file"))
        )
        return pc.or_(by_transaction(rows, self._not_visible), anonymous)

    def _not_visible(self, texts: Sequence[str]) -> Mask:
        seen = GtidSet.parse(self.gtid_set)
        hidden = []
        for text in texts:
            server, *tag, number = text.split(":")
            hidden.append(not seen.contains(server, int(number), *tag))
        return np.array(hidden, np.bool_)


@dataclass(frozen=True, slots=True)
class PositionReadView:
    """The read view of a read that saw exactly the transactions before a position of the log."""

    place: BinlogPosition

    def to_json(self) -> str:
        """Return `{"file": "...", "pos": n}`."""
        return json.dumps({"file": self.place.file, "pos": self.place.pos})

    def covers(self, position: Position) -> bool:
        """Return whether the read saw every transaction up to a position."""
        return isinstance(position, BinlogPosition) and position <= self.place

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Mark the changes after that position."""
        file = column_of(rows, "file")
        assert isinstance(file, pa.DictionaryArray)
        # Up to which offset the read saw the changes of each file: it saw all of an older file
        # (_NEVER), none of a newer one (-1). Rows without a file are not changes from the log.
        begins = BinlogPosition(self.place.file, 0)
        limits = [
            self.place.pos
            if name == self.place.file
            else -1
            if BinlogPosition(name, 0) > begins
            else _NEVER
            for name in map(str, file.dictionary.to_pylist())
        ]
        limit = np.array([*limits, _NEVER], np.int64)[codes(file)]
        pos = column_of(rows, "pos").fill_null(0).to_numpy(zero_copy_only=False)
        return pa.array(pos > limit)


def read_view(fields: Mapping[str, Any]) -> GtidReadView | PositionReadView | None:
    """Parse a read view that `to_json` wrote; return None if it is of another kind of source."""
    if "gtid_set" in fields:
        return GtidReadView(str(fields["gtid_set"]))
    if "file" in fields:
        return PositionReadView(BinlogPosition(str(fields["file"]), int(fields["pos"])))
    return None
