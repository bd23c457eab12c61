"""What a read of a table could see, and which captured changes that leaves out.

Each database says it in its own words. All of them err on one side: a transaction that may not have
been visible counts as not visible, because the stream delivers its changes.

PostgreSQL: the snapshot of the read, `xmin:xmax:xip` (manual: "Transaction ID and Snapshot Information
Functions"). A transaction was seen if its number is below `xmax` and not in `xip`, wherever its commit
stands in the log: the log has a commit before others can see it, long before it while a synchronous
standby does not answer. The log's numbers are those of top-level transactions, as are those of `xip`;
they have 32 bits, the snapshot's 64.

MySQL with GTIDs: `gtid_executed`, read *before* the snapshot. The server counts a transaction there only
after the storage engine has committed it, while the log shows it earlier.

Turso and SQLite: the newest change that the read could see, or the newest row of each table.

MySQL without GTIDs, and MariaDB: the place in the log up to which the read saw everything, and nothing
after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.gtid import GtidSet
from deltaforge_dagster.positions import (
    BinlogPosition,
    LsnPosition,
    Position,
    TursoPosition,
    covers,
    format_lsn,
    parse_lsn,
    parse_position,
)
from deltaforge_dagster.sources.snapshot.base import ReadView

Mask = npt.NDArray[np.bool_]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class XidReadView:
    """What a PostgreSQL snapshot sees.

    Attributes:
        xmax: The number after the last one that had ended, as 64 bits. Later ones may have been running.
        running: Those below it that had not ended.
        since: Everything that is not visible was committed after this position.
    """

    xmax: int
    running: tuple[int, ...]
    since: LsnPosition

    @classmethod
    def of(cls, snapshot: str, since: LsnPosition) -> XidReadView:
        """Return what a snapshot in PostgreSQL's notation sees.

        Raises:
            CorruptLog: It is none.
        """
        try:
            _, xmax, running = snapshot.split(":")
            return cls(int(xmax), tuple(int(xid) for xid in running.split(",") if xid), since)
        except ValueError:
            raise CorruptLog("not a snapshot of PostgreSQL") from None

    def sees(self, xids: Sequence[str]) -> bool:
        """Say whether all of these transactions were seen, if they were committed."""
        return not xids or not self._not_visible(xids).any()

    def to_json(self) -> str:
        """Return `{"xmax": n, "running": [...], "since": "X/Y"}`."""
        since = format_lsn(self.since.lsn)
        return json.dumps({"xmax": self.xmax, "running": self.running, "since": since})

    def covers(self, position: Position) -> bool:
        """Say whether every transaction up to a position was seen for certain."""
        return isinstance(position, LsnPosition) and position <= self.since

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say which changes were perhaps not seen; messages outside of transactions always were."""
        return _by_transaction(rows, self._not_visible)

    def _not_visible(self, texts: Sequence[str]) -> Mask:
        numbers = np.array([int(text) for text in texts], np.uint32)
        # The 64 bits of a number are the nearest to xmax that end in these 32.
        distance = (numbers - np.uint32(self.xmax & 0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        whole = self.xmax + distance.astype(np.int64)
        return (whole >= self.xmax) | np.isin(whole, np.array(self.running, np.int64))


@dataclass(frozen=True, slots=True)
class GtidReadView:
    """What a read sees that began after a MySQL server had executed a set of GTIDs."""

    gtid_set: str

    def to_json(self) -> str:
        """Return `{"gtid_set": "..."}`."""
        return json.dumps({"gtid_set": self.gtid_set})

    def covers(self, position: Position) -> bool:
        """Say whether every transaction up to a position was seen for certain."""
        return (
            isinstance(position, BinlogPosition)
            and position.gtid_set is not None
            and covers(self.gtid_set, position.gtid_set)
        )

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say which changes were perhaps not seen: also those of transactions without a GTID."""
        anonymous = pc.and_(pc.is_null(_array(rows, "tx_id")), pc.is_valid(_array(rows, "file")))
        return pc.or_(_by_transaction(rows, self._not_visible), anonymous)

    def _not_visible(self, texts: Sequence[str]) -> Mask:
        seen = GtidSet.parse(self.gtid_set)
        found = []
        for text in texts:
            server, *tag, number = text.split(":")
            found.append(not seen.contains(server, int(number), *tag))
        return np.array(found, np.bool_)


@dataclass(frozen=True, slots=True)
class PositionReadView:
    """What a read sees that stands exactly between two transactions of a binary log."""

    place: BinlogPosition

    def to_json(self) -> str:
        """Return `{"file": "...", "pos": n}`."""
        return json.dumps({"file": self.place.file, "pos": self.place.pos})

    def covers(self, position: Position) -> bool:
        """Say whether every transaction up to a position was seen for certain."""
        return isinstance(position, BinlogPosition) and position <= self.place

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say which changes stand behind the place."""
        file = _array(rows, "file")
        assert isinstance(file, pa.DictionaryArray)
        # Where in each file the place is: before all of it, in it, or behind all of it. What is in no
        # file is no change of the log.
        begins = BinlogPosition(self.place.file, 0)
        limits = [
            self.place.pos
            if name == self.place.file
            else -1
            if BinlogPosition(name, 0) > begins
            else _NEVER
            for name in map(str, file.dictionary.to_pylist())
        ]
        limit = np.array([*limits, _NEVER], np.int64)[_codes(file)]
        pos = _array(rows, "pos").fill_null(0).to_numpy(zero_copy_only=False)
        return _mask(pos > limit)


@dataclass(frozen=True, slots=True)
class TursoReadView:
    """What a read sees of a Turso or SQLite database: it is one moment for rows and changes."""

    position: TursoPosition

    def to_json(self) -> str:
        """Return the position."""
        return self.position.to_json()

    def covers(self, position: Position) -> bool:
        """Say whether every transaction up to a position was seen for certain."""
        return isinstance(position, TursoPosition) and position <= self.position

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say which changes have larger numbers; those by table have the table in `file`."""
        file = _array(rows, "file")
        assert isinstance(file, pa.DictionaryArray)
        seen = dict(self.position.table_positions)
        lowest = np.iinfo(np.int64).min
        by_table = [seen.get(str(name), lowest) for name in file.dictionary.to_pylist()]
        limit = np.array([*by_table, self.position.last_change_id or 0], np.int64)[_codes(file)]
        column = _array(rows, "pos")
        pos = column.fill_null(lowest).to_numpy(zero_copy_only=False)
        return _mask(pos > limit)


def parse_read_view(text: str) -> ReadView:
    """Return what `to_json` wrote.

    Raises:
        CorruptLog: The text is not a read view.
    """
    try:
        fields = json.loads(text)
        if "mode" in fields:
            position = parse_position(text)
            assert isinstance(position, TursoPosition)
            return TursoReadView(position)
        if "gtid_set" in fields:
            return GtidReadView(str(fields["gtid_set"]))
        if "file" in fields:
            return PositionReadView(BinlogPosition(str(fields["file"]), int(fields["pos"])))
        return XidReadView(
            int(fields["xmax"]),
            tuple(int(xid) for xid in fields["running"]),
            LsnPosition(parse_lsn(fields["since"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptLog("not what a snapshot's read saw") from error


def _by_transaction(
    rows: pa.RecordBatch | pa.Table, not_visible: Callable[[Sequence[str]], Mask]
) -> pa.BooleanArray:
    """Ask of each transaction among the rows once; rows of none are no changes."""
    ids = _array(rows, "tx_id")
    assert isinstance(ids, pa.DictionaryArray)
    texts = [str(text) for text in ids.dictionary.to_pylist()]
    found = not_visible(texts) if texts else np.zeros(0, np.bool_)
    return _mask(np.append(found, False)[_codes(ids)])


def _array(rows: pa.RecordBatch | pa.Table, name: str) -> pa.Array[Any]:
    column = rows.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    return column


def _codes(column: pa.DictionaryArray[Any, Any]) -> npt.NDArray[np.int64]:
    """Return each row's place in the dictionary, that behind its end for null."""
    codes = column.indices.fill_null(len(column.dictionary))
    return codes.to_numpy(zero_copy_only=False).astype(np.int64)


def _mask(found: Mask) -> pa.BooleanArray:
    return pa.array(found)
