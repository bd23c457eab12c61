"""Positions in MySQL's binary log, and the GTIDs in them: sets of MySQL, one per domain of MariaDB.

As JSON: `{"file": "mysql-bin.000003", "pos": 12345, "gtid_set": "3e11fa47-...:1-57"}`.

A position is the end of a transaction, with all GTIDs executed up to that point. For MariaDB it has
the last GTID of each domain instead: `"gtid_set": "0-1-57"`.

A GTID of MySQL is `<uuid of the server>:<number>` or, since MySQL 8.3, `<uuid>:<tag>:<number>`.
Sets are written in MySQL's notation (manual: "GTID Sets", "GTID Format and Storage"), with `,`
between servers, tagged intervals after those without a tag, and no white space::

    3e11fa47-71ca-11e1-9e33-c80aa9429562:1-57:60:batch:1-3,4d2e...:1

In PREVIOUS_GTIDS events and in COM_BINLOG_DUMP_GTID a set is little-endian bytes. Without tags::

    Int64 number of servers | for each: Byte16 uuid | Int64 number of intervals
                            | for each: Int64 first | Int64 last + 1

With tags (`Gtid_set::encode` in the server's source code), each pair of server and tag is an
entry::

    Int8 1 | Int48 number of entries | Int8 1
    | for each: Byte16 uuid | Int8 2 * size of tag | tag | Int64 number of intervals | ...

A GTID of MariaDB is `domain-server-number` (MariaDB's manual: "Global Transaction ID"). Within a
domain the numbers increase, whichever server writes, so one GTID implies all before it. A position
has one GTID per domain, as in the variables `gtid_binlog_pos` and `gtid_slave_pos`::

    0-1-100,7-3-25
"""

from __future__ import annotations

import bisect
import functools
import json
import re
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deltaforge_dagster.errors import CorruptLog

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


MAX_NUMBER = (1 << 63) - 2
"""The largest number of a GTID of MySQL."""

_INTERVAL = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?\Z", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_TAG = re.compile(r"[a-z_][a-z0-9_]{0,31}\Z")
_FORMAT_SHIFT = 56
"""How many bits are below the first number's highest byte, which is the format: 0 without tags, 1
with tags."""

Source = tuple[str, str]
"""The source of a sequence of GTIDs: a server's UUID and a tag, "" for none."""


class GtidSet:
    """A growing set of GTIDs: sorted, disjoint intervals for each server and tag."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        # Per source: the first and the last numbers of the intervals, which do not touch each
        # other.
        self._intervals: dict[Source, tuple[list[int], list[int]]] = {}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a set in MySQL's notation; white space and letter case do not matter.

        Raises:
            CorruptLog: The text is not a GTID set.
        """
        gtids = cls()
        for part in "".join(text.lower().split()).split(","):
            server, *rest = part.split(":")
            if not part:
                continue
            if not _UUID.match(server) or not rest:
                raise _invalid_set(text)
            tag, empty = "", True
            for word in rest:
                interval = _INTERVAL.match(word)
                if interval is not None:
                    gtids.add(server, int(interval[1]), int(interval[2] or interval[1]), tag)
                    empty = False
                elif _TAG.match(word) and not (tag and empty):
                    tag, empty = word, True
                else:
                    raise _invalid_set(text)
            if empty:
                raise _invalid_set(text)
        return gtids

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Return the set that `data` encodes.

        Raises:
            CorruptLog: The bytes are not a GTID set.
        """
        gtids = cls()
        try:
            (entries,) = struct.unpack_from("<Q", data)
            tagged = entries >> _FORMAT_SHIFT
            if tagged not in (0, 1):
                raise CorruptLog(f"a GTID set that is written in an unknown form, {tagged}")
            if tagged:
                entries = entries >> 8 & ((1 << 48) - 1)
            at = 8
            for _ in range(entries):
                (sid,) = struct.unpack_from("<16s", data, at)
                at += 16
                tag = ""
                if tagged:
                    (size,) = struct.unpack_from("<B", data, at)
                    tag = bytes(data[at + 1 : at + 1 + size // 2]).decode("ascii", "replace")
                    at += 1 + size // 2
                    if size % 2 or not (not tag or _TAG.match(tag)):
                        raise CorruptLog("a GTID set with an invalid tag")
                (intervals,) = struct.unpack_from("<Q", data, at)
                at += 8
                for _ in range(intervals):
                    first, end = struct.unpack_from("<qq", data, at)
                    at += 16
                    gtids.add(str(uuid.UUID(bytes=sid)), first, end - 1, tag)
        except struct.error:
            raise CorruptLog("a truncated GTID set") from None
        if at != len(data):
            raise CorruptLog("a GTID set with extra bytes at its end")
        return gtids

    def add(self, server: str, first: int, last: int, tag: str = "") -> None:
        """Add the GTIDs with numbers `first` to `last`; UUID and tag are in lower case.

        Raises:
            CorruptLog: The interval is not valid.
        """
        if not 1 <= first <= last <= MAX_NUMBER:
            raise CorruptLog(f"not an interval of GTIDs: {server}:{first}-{last}")
        firsts, lasts = self._intervals.setdefault((server, tag), ([], []))
        # All intervals that the new one overlaps or touches become one.
        begin = bisect.bisect_left(lasts, first - 1)
        end = bisect.bisect_right(firsts, last + 1)
        if begin < end:
            first, last = min(first, firsts[begin]), max(last, lasts[end - 1])
        firsts[begin:end], lasts[begin:end] = [first], [last]

    def contains(self, server: str, number: int, tag: str = "") -> bool:
        """Return whether a GTID is in the set."""
        firsts, lasts = self._intervals.get((server, tag), ([], []))
        at = bisect.bisect_right(firsts, number) - 1
        return at >= 0 and number <= lasts[at]

    def copy(self) -> GtidSet:
        """Return an independent copy of the set."""
        duplicate = GtidSet()
        duplicate._intervals = {s: (f.copy(), e.copy()) for s, (f, e) in self._intervals.items()}
        return duplicate

    def to_bytes(self) -> bytes:
        """Return the set in the binary form of COM_BINLOG_DUMP_GTID.

        The form with tags is used only if there are tags: servers before MySQL 8.3 do not know it.
        """
        tagged = any(tag for _, tag in self._intervals)
        count = len(self._intervals)
        parts = [struct.pack("<Q", 1 << _FORMAT_SHIFT | count << 8 | 1 if tagged else count)]
        for server, tag in sorted(self._intervals):
            firsts, lasts = self._intervals[server, tag]
            parts.append(uuid.UUID(server).bytes)
            if tagged:
                parts.append(bytes([2 * len(tag)]) + tag.encode())
            parts.append(struct.pack("<Q", len(firsts)))
            parts += [struct.pack("<qq", f, e + 1) for f, e in zip(firsts, lasts, strict=True)]
        return b"".join(parts)

    def __le__(self, other: GtidSet) -> bool:
        """Return whether every GTID of this set is in the other one."""
        for source, (firsts, lasts) in self._intervals.items():
            theirs = other._intervals.get(source, ([], []))
            for first, last in zip(firsts, lasts, strict=True):
                at = bisect.bisect_right(theirs[0], first) - 1
                if at < 0 or last > theirs[1][at]:
                    return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GtidSet) and self._intervals == other._intervals

    __hash__ = None  # type: ignore[assignment] # a set that grows

    def __str__(self) -> str:
        """Return the set in MySQL's notation, sorted by server and tag; empty for the empty set."""
        texts: dict[str, str] = {}
        for server, tag in sorted(self._intervals):
            intervals = ":".join(
                str(f) if f == e else f"{f}-{e}"
                for f, e in zip(*self._intervals[server, tag], strict=True)
            )
            texts.setdefault(server, server)
            texts[server] += f":{tag}:{intervals}" if tag else f":{intervals}"
        return ",".join(texts.values())


def _invalid_set(text: str) -> CorruptLog:
    return CorruptLog(f"not a GTID set: {text[:80]!r}")


MAX_MARIADB_NUMBER = (1 << 64) - 1
"""The largest number of a GTID of MariaDB."""

_GTID = re.compile(r"(\d{1,10})-(\d{1,10})-(\d{1,20})", re.ASCII)
_MAX_ID = (1 << 32) - 1  # domain ids and server ids have 32 bits


class DomainGtids:
    """A GTID position of MariaDB: the last GTID of each domain. It is mutable."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # by domain: number, server

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a list of GTIDs; white space does not matter.

        Raises:
            CorruptLog: The text is not such a list.
        """
        gtids = cls()
        for part in filter(None, "".join(text.split()).split(",")):
            match = _GTID.fullmatch(part)
            domain, server, number = map(int, match.groups()) if match else (0, 0, 0)
            if not number or domain in gtids._last:
                raise CorruptLog(f"not a GTID per domain of MariaDB: {text[:80]!r}")
            gtids.advance(domain, server, number)
        return gtids

    def advance(self, domain: int, server: int, number: int) -> None:
        """Advance to the next transaction of a domain.

        Raises:
            CorruptLog: The GTID is invalid, or its number does not increase.
        """
        before, by = self._last.get(domain, (0, server))
        if not (before < number <= MAX_MARIADB_NUMBER and max(domain, server) <= _MAX_ID):
            raise CorruptLog(
                f"GTID {domain}-{server}-{number} after {domain}-{by}-{before}: numbers of a "
                "domain must rise; set gtid_strict_mode = ON, and give servers that write "
                "independently a gtid_domain_id each"
            )
        self._last[domain] = (number, server)

    def __le__(self, other: DomainGtids) -> bool:
        """Return whether `other` has the same or a later GTID in every domain of this position."""
        for domain, (number, server) in self._last.items():
            theirs, by = other._last.get(domain, (0, server))
            if theirs < number or (theirs == number and by != server):
                return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainGtids) and self._last == other._last

    __hash__ = None  # type: ignore[assignment] # mutable

    def __str__(self) -> str:
        """Return the list in MariaDB's notation, sorted by domain; empty without GTIDs."""
        return ",".join(
            f"{domain}-{server}-{number}" for domain, (number, server) in sorted(self._last.items())
        )


def is_of_mariadb(text: str) -> bool:
    """Return whether the text is a GTID position of MariaDB; an empty text is not."""
    return _GTID.fullmatch("".join(text.split()).split(",")[0]) is not None
