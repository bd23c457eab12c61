"""The position of a reader: file and offset, and the GTIDs of all transactions that it has read.

A GTID is added when its transaction has ended, not when its first event is seen: with a position
that contains the GTID of an unfinished transaction, the rest of it would be lost after a restart.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence

from deltaforge_dagster.sources.mysql.decode.transaction_assembler import GtidRun
from deltaforge_dagster.sources.mysql.gtid import DomainGtids, GtidSet, is_of_mariadb
from deltaforge_dagster.sources.mysql.position import BinlogPosition


class StreamProgress:
    """The position of one reader that began at `start`.

    It must be told of every transaction of the log.
    """

    def __init__(self, start: BinlogPosition) -> None:
        self._text = start.gtid_set
        self._executed: GtidSet | DomainGtids | None = None
        if self._text:
            kind = DomainGtids if is_of_mariadb(self._text) else GtidSet
            self._executed = kind.parse(self._text)

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> BinlogPosition:
        """Add the GTIDs of transactions, in log order; return the position after the last of them.

        Raises:
            CorruptLog: The number of a GTID of MariaDB does not increase in its domain.
        """
        if self._text is not None and gtids:
            for run in gtids:
                self._add(run)
            self._text = str(self._executed)
        return BinlogPosition(file, pos, self._text)

    def within(self, file: str, pos: int) -> BinlogPosition:
        """Return a position inside or between transactions, with the GTIDs of those that ended."""
        return BinlogPosition(file, pos, self._text)

    def _add(self, run: GtidRun) -> None:
        if self._executed is None:  # the set was empty: the first GTID says whether it is MariaDB's
            self._executed = DomainGtids() if run.of_mariadb else GtidSet()
        if isinstance(self._executed, GtidSet):
            self._executed.add(str(uuid.UUID(bytes=run.sid)), run.first, run.last, run.tag)
            return
        domain, server = struct.unpack(">QQ", run.sid)
        for number in sorted({run.first, run.last}):
            self._executed.advance(domain, server, number)
