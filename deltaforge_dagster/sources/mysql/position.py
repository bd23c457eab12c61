"""Positions in MySQL's binary log.

As JSON: `{"file": "mysql-bin.000003", "pos": 12345, "gtid_set": "3e11fa47-...:1-57"}`.

A position is the end of a transaction, with all GTIDs executed up to that point (manual: "GTID
Sets"). For MariaDB it has the last GTID of each domain instead: `"gtid_set": "0-1-57"`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.gtid import DomainGtids, GtidSet, is_of_mariadb

_BINLOG_FILE = re.compile(r"(?s).*\.[0-9]{1,18}\Z")


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class BinlogPosition:
    """A MySQL position, between two transactions of the binary log.

    Of two positions with GTIDs, the one whose set contains the other's is later; this holds across
    servers, whatever their files are called. Otherwise the file decides, by the number at the end
    of its name (which gets a seventh digit after `.999999`), and then the offset.

    Attributes:
        file: Name of the binary log file.
        pos: Offset in it, in bytes.
        gtid_set: Every GTID executed up to this position, in MySQL's notation, or the last one of
            each domain in MariaDB's; None on a server without GTIDs.
    """

    file: str
    pos: int
    gtid_set: str | None = None

    def __post_init__(self) -> None:
        if not _BINLOG_FILE.match(self.file) or self.pos < 0:
            raise CorruptLog(f"not a binary log position: {self.file[:80]!r}, {self.pos}")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Parse the fields that `to_json` wrote; return None if another kind of source has them."""
        if "file" not in fields:
            return None
        gtid_set = fields.get("gtid_set")
        return cls(
            str(fields["file"]), int(fields["pos"]), None if gtid_set is None else str(gtid_set)
        )

    def to_json(self) -> str:
        """Return `{"file": "...", "pos": n, "gtid_set": "..."|null}`."""
        return json.dumps({"file": self.file, "pos": self.pos, "gtid_set": self.gtid_set})

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BinlogPosition)
            and self._sort_key == other._sort_key
            and self._compare_gtids(other) in (None, (True, True))
        )

    def __hash__(self) -> int:
        return hash(self._sort_key)

    def __lt__(self, other: BinlogPosition) -> bool:
        match self._compare_gtids(other):
            case (True, False):
                return True
            case (False, True):
                return False
            case _:
                return self._sort_key < other._sort_key

    @property
    def _sort_key(self) -> tuple[int, int, str]:
        name, _, number = self.file.rpartition(".")
        return int(number), self.pos, name

    def _compare_gtids(self, other: BinlogPosition) -> tuple[bool, bool] | None:
        if self.gtid_set is None or other.gtid_set is None:
            return None
        return _compare(self.gtid_set, other.gtid_set)


def covers(whole: str, part: str) -> bool:
    """Return whether `whole` contains every GTID of `part`; false for a MySQL and a MariaDB set.

    Raises:
        CorruptLog: One of the texts is not a set of GTIDs.
    """
    comparison = _compare(part, whole)
    return comparison is not None and comparison[0]


def _compare(mine: str, theirs: str) -> tuple[bool, bool] | None:
    """Return whether `theirs` contains all GTIDs of `mine`, and vice versa.

    None if one is a MySQL set and the other one a MariaDB set.
    """
    if mine == theirs:
        return True, True
    of_mariadb = {is_of_mariadb(text) for text in (mine, theirs) if text}
    if len(of_mariadb) > 1:
        return None
    if of_mariadb == {True}:
        ours, others = DomainGtids.parse(mine), DomainGtids.parse(theirs)
        return ours <= others, others <= ours
    my_set, their_set = GtidSet.parse(mine), GtidSet.parse(theirs)
    return my_set <= their_set, their_set <= my_set
