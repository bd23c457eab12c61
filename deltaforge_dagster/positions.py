"""Positions in a source's log, as ordered values and as JSON text.

The state store, the journal and Dagster's metadata contain positions as JSON text. Only the source
that created a position interprets it; everything else only compares positions of the same source with `<`.

PostgreSQL: `{"lsn": "0/16B6C50", "tx_id": 731}`, the `end_lsn` of a commit (Streaming
Replication Protocol, section "Logical Replication Message Formats").
MySQL: `{"file": "mysql-bin.000003", "pos": 12345, "gtid_set": "3e11fa47-...:1-57"}`, the end of a
transaction in the binary log and every GTID executed up to there (manual: "GTID Sets"). MariaDB: the
same with the last GTID of each domain, `"gtid_set": "0-1-57"`.

Turso and SQLite: `{"mode": "native", "last_change_id": 57, "table_positions": {}}`, the newest row of the
change table or, in mode `polling`, the newest row of each table.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol, Self

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.gtid import GtidSet
from deltaforge_dagster.mariadb_gtid import DomainGtids, is_of_mariadb

_LSN = re.compile(r"^([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})$")
_BINLOG_FILE = re.compile(r"(?s).*\.[0-9]{1,18}\Z")


class Position(Protocol):
    """A position in a source's log, comparable with positions of the same source."""

    def to_json(self) -> str:
        """Return the text that `parse_position` reads back."""
        ...

    def __lt__(self, other: Self, /) -> bool: ...

    def __le__(self, other: Self, /) -> bool: ...


def parse_lsn(text: str) -> int:
    """Return the 64-bit value of PostgreSQL's `X/Y` notation (manual: type `pg_lsn`).

    Raises:
        CorruptLog: The text is not an LSN.
    """
    match = _LSN.match(text)
    if match is None:
        raise CorruptLog(f"not an LSN: {text[:40]!r} (expected hexadecimal X/Y)")
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """Return `lsn` as `X/YYYYYYYY`, the form of the event's `source.lsn`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}"


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class LsnPosition:
    """A PostgreSQL position; `tx_id` is the transaction that ended there and is not compared."""

    lsn: int
    tx_id: int | None = None

    def to_json(self) -> str:
        """Return `{"lsn": "X/YYYYYYYY", "tx_id": n|null}`."""
        return json.dumps({"lsn": format_lsn(self.lsn), "tx_id": self.tx_id})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LsnPosition) and self.lsn == other.lsn

    def __hash__(self) -> int:
        return hash(self.lsn)

    def __lt__(self, other: LsnPosition) -> bool:
        return self.lsn < other.lsn


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class BinlogPosition:
    """A MySQL position, between two transactions of the binary log.

    Of two positions with GTIDs, the one whose set contains the other's is later: this holds on every
    server that has the transactions, whatever the names of its files. Otherwise the file decides,
    by the number at the end of its name (which gets a seventh digit after `.999999`), and then the
    offset.

    Attributes:
        file: Name of the binary log file.
        pos: Offset in it, in bytes.
        gtid_set: Every GTID executed up to here, in MySQL's notation, or the last one of each
            domain in MariaDB's; None on a server without GTIDs.
    """

    file: str
    pos: int
    gtid_set: str | None = None

    def __post_init__(self) -> None:
        if not _BINLOG_FILE.match(self.file) or self.pos < 0:
            raise CorruptLog(f"not a binary log position: {self.file[:80]!r}, {self.pos}")

    def to_json(self) -> str:
        """Return `{"file": "...", "pos": n, "gtid_set": "..."|null}`."""
        return json.dumps({"file": self.file, "pos": self.pos, "gtid_set": self.gtid_set})

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BinlogPosition)
            and self._place == other._place
            and self._compare_gtids(other) in (None, (True, True))
        )

    def __hash__(self) -> int:
        return hash(self._place)

    def __lt__(self, other: BinlogPosition) -> bool:
        match self._compare_gtids(other):
            case (True, False):
                return True
            case (False, True):
                return False
            case _:
                return self._place < other._place

    @property
    def _place(self) -> tuple[int, int, str]:
        name, _, number = self.file.rpartition(".")
        return int(number), self.pos, name

    def _compare_gtids(self, other: BinlogPosition) -> tuple[bool, bool] | None:
        if self.gtid_set is None or other.gtid_set is None:
            return None
        return _compare(self.gtid_set, other.gtid_set)


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class TursoPosition:
    """A position in a Turso or SQLite database.

    In mode `polling`, a position is earlier than another one if it is not ahead of it in any table.
    Positions of different modes are not comparable.

    Attributes:
        mode: `native`, `triggers` or `polling`.
        last_change_id: The number of the newest change in the change table; None before the first.
        table_positions: `polling`: the rowid of the newest row of each table.
        change_time: `native`: the time of that change, by which it is recognized; not compared.
    """

    mode: str
    last_change_id: int | None = None
    table_positions: tuple[tuple[str, int], ...] = ()
    change_time: int | None = None

    def to_json(self) -> str:
        """Return `{"mode": "...", "last_change_id": n|null, "table_positions": {"...": n}}`."""
        fields: dict[str, object] = {
            "mode": self.mode,
            "last_change_id": self.last_change_id,
            "table_positions": dict(self.table_positions),
        }
        if self.change_time is not None:
            fields["change_time"] = self.change_time
        return json.dumps(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TursoPosition) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __lt__(self, other: TursoPosition) -> bool:
        theirs = dict(other.table_positions)
        return (
            self != other
            and self.mode == other.mode
            and (self.last_change_id or 0) <= (other.last_change_id or 0)
            and all(at <= theirs.get(table, at - 1) for table, at in self.table_positions)
        )

    @property
    def _place(self) -> tuple[str, int, frozenset[tuple[str, int]]]:
        return self.mode, self.last_change_id or 0, frozenset(self.table_positions)


def covers(whole: str, part: str) -> bool:
    """Return whether `whole` contains every GTID of `part`; false for a MySQL and a MariaDB set.

    Raises:
        CorruptLog: One of the texts is not a set of GTIDs.
    """
    found = _compare(part, whole)
    return found is not None and found[0]


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
    one, other = GtidSet.parse(mine), GtidSet.parse(theirs)
    return one <= other, other <= one


KnownPosition = LsnPosition | BinlogPosition | TursoPosition


def parse_position(text: str) -> KnownPosition:
    """Return the position that `to_json` wrote.

    Raises:
        CorruptLog: The text is not a position that this version knows.
    """
    try:
        fields = json.loads(text)
        if "mode" in fields:
            return _turso_position(fields)
        if "file" in fields:
            gtid_set = fields.get("gtid_set")
            return BinlogPosition(
                str(fields["file"]), int(fields["pos"]), None if gtid_set is None else str(gtid_set)
            )
        tx_id = fields.get("tx_id")
        return LsnPosition(parse_lsn(fields["lsn"]), None if tx_id is None else int(tx_id))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLog(f"not a position: {text[:80]!r}") from error


def _turso_position(fields: dict[str, Any]) -> TursoPosition:
    if fields["mode"] not in {"native", "triggers", "polling"}:
        raise ValueError
    last, time = fields.get("last_change_id"), fields.get("change_time")
    tables = fields.get("table_positions") or {}
    return TursoPosition(
        str(fields["mode"]),
        None if last is None else int(last),
        tuple(sorted((str(table), int(at)) for table, at in tables.items())),
        None if time is None else int(time),
    )
