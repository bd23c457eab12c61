"""Where a reader stands: file and offset, and the GTIDs of everything it has read.

A GTID counts when its transaction has ended, never when its first event is seen: a position inside
a transaction that already claimed the transaction would lose the rest of it after a restart.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from deltaforge_dagster.gtid import GtidSet
from deltaforge_dagster.positions import BinlogPosition
from deltaforge_dagster.sources.mysql.decoder import GtidRun


class Progress:
    """The position of one reader, from `start` on; told of every transaction of the log."""

    def __init__(self, start: BinlogPosition) -> None:
        self._executed = None if start.gtid_set is None else GtidSet.parse(start.gtid_set)
        self._text = start.gtid_set

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> BinlogPosition:
        """Take in transactions in log order; return the position after the last of them."""
        if self._executed is not None and gtids:
            for run in gtids:
                self._executed.add(str(uuid.UUID(bytes=run.sid)), run.first, run.last, run.tag)
            self._text = str(self._executed)
        return BinlogPosition(file, pos, self._text)

    def within(self, file: str, pos: int) -> BinlogPosition:
        """Return a position with the GTIDs so far, inside or between transactions."""
        return BinlogPosition(file, pos, self._text)
