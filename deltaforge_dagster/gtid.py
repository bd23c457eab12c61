"""GTID sets: which transactions a server has executed, or a reader has seen.

A GTID is `<uuid of the server>:<number>`. A set is written as MySQL writes it (manual: "GTID
Format and Storage"), with `,` between servers and no white space::

    3e11fa47-71ca-11e1-9e33-c80aa9429562:1-57:60,4d2e...:1

and, in PREVIOUS_GTIDS events and in COM_BINLOG_DUMP_GTID, as little-endian bytes::

    number of servers, 8 | for each: uuid, 16 | number of intervals, 8 | for each: first, 8
                                                                        | last + 1, 8

MySQL 8.3 and later allow a tag between UUID and number, and write the bytes in another form: such
sets are refused, not misread.
"""

from __future__ import annotations

import bisect
import re
import struct
import uuid
from typing import Self

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent

MAX_NUMBER = (1 << 63) - 2
"""The largest number of a GTID."""

_INTERVAL = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?\Z", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_TAGGED_FORM = 1 << 56  # the last byte of the count of servers says how the set is written


class GtidSet:
    """A set of GTIDs that grows: per server, disjoint intervals that do not touch, in order."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        # Per UUID: the first numbers of the intervals, and the last ones.
        self._intervals: dict[str, tuple[list[int], list[int]]] = {}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the set that `text` writes; white space and letter case do not matter.

        Raises:
            CorruptLog: The text is not a GTID set.
            UnsupportedEvent: It has a GTID with a tag.
        """
        made = cls()
        for part in "".join(text.lower().split()).split(","):
            server, *intervals = part.split(":")
            if not part:
                continue
            if not _UUID.match(server) or not intervals:
                raise CorruptLog(f"not a GTID set: {text[:80]!r}")
            for interval in intervals:
                match = _INTERVAL.match(interval)
                if match is None:
                    if interval[:1].isalpha() or interval.startswith("_"):
                        raise _tagged()
                    raise CorruptLog(f"not a GTID set: {text[:80]!r}")
                made.add(server, int(match[1]), int(match[2] or match[1]))
        return made

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Return the set that `data` encodes.

        Raises:
            CorruptLog: The bytes are not a GTID set.
            UnsupportedEvent: It has GTIDs with tags.
        """
        made = cls()
        try:
            (servers,) = struct.unpack_from("<Q", data)
            if servers >= _TAGGED_FORM:
                raise _tagged()
            at = 8
            for _ in range(servers):
                sid, intervals = struct.unpack_from("<16sQ", data, at)
                at += 24
                for _ in range(intervals):
                    first, end = struct.unpack_from("<qq", data, at)
                    at += 16
                    made.add(str(uuid.UUID(bytes=sid)), first, end - 1)
        except struct.error:
            raise CorruptLog("a GTID set that is shorter than it says") from None
        if at != len(data):
            raise CorruptLog("a GTID set that is longer than it says")
        return made

    def add(self, server: str, first: int, last: int) -> None:
        """Add the GTIDs `server:first` to `server:last`; `server` is a UUID in lower case.

        Raises:
            CorruptLog: There are no such GTIDs.
        """
        if not 1 <= first <= last <= MAX_NUMBER:
            raise CorruptLog(f"not an interval of GTIDs: {server}:{first}-{last}")
        firsts, lasts = self._intervals.setdefault(server, ([], []))
        # All intervals that the new one overlaps or touches become one.
        begin = bisect.bisect_left(lasts, first - 1)
        end = bisect.bisect_right(firsts, last + 1)
        if begin < end:
            first, last = min(first, firsts[begin]), max(last, lasts[end - 1])
        firsts[begin:end], lasts[begin:end] = [first], [last]

    def contains(self, server: str, number: int) -> bool:
        """Say whether `server:number` is in the set."""
        firsts, lasts = self._intervals.get(server, ([], []))
        at = bisect.bisect_right(firsts, number) - 1
        return at >= 0 and number <= lasts[at]

    def copy(self) -> GtidSet:
        """Return a set of its own with the same GTIDs."""
        made = GtidSet()
        made._intervals = {s: (f.copy(), e.copy()) for s, (f, e) in self._intervals.items()}
        return made

    def to_bytes(self) -> bytes:
        """Return the set as COM_BINLOG_DUMP_GTID carries it."""
        parts = [struct.pack("<Q", len(self._intervals))]
        for server in sorted(self._intervals):
            firsts, lasts = self._intervals[server]
            parts.append(struct.pack("<16sQ", uuid.UUID(server).bytes, len(firsts)))
            parts += [struct.pack("<qq", f, e + 1) for f, e in zip(firsts, lasts, strict=True)]
        return b"".join(parts)

    def __le__(self, other: GtidSet) -> bool:
        """Say whether every GTID of this set is in the other one."""
        for server, (firsts, lasts) in self._intervals.items():
            theirs = other._intervals.get(server, ([], []))
            for first, last in zip(firsts, lasts, strict=True):
                at = bisect.bisect_right(theirs[0], first) - 1
                if at < 0 or last > theirs[1][at]:
                    return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GtidSet) and self._intervals == other._intervals

    __hash__ = None  # type: ignore[assignment] # a set that grows

    def __str__(self) -> str:
        """Return the set in MySQL's notation, servers in order; empty for no GTID at all."""
        return ",".join(
            ":".join(
                (
                    server,
                    *(
                        str(f) if f == e else f"{f}-{e}"
                        for f, e in zip(*self._intervals[server], strict=True)
                    ),
                )
            )
            for server in sorted(self._intervals)
        )


def _tagged() -> UnsupportedEvent:
    return UnsupportedEvent(
        "GTIDs with tags (uuid:tag:number) are not supported by this version; "
        "set gtid_next to AUTOMATIC, without a tag, in every session that writes"
    )
