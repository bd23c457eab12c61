"""MariaDB GTID positions: the last transaction of each domain that a server, or a reader, has reached.

A GTID is `domain-server-number` (MariaDB's manual: "Global Transaction ID"). Within a domain the
numbers increase, whichever server writes, so one GTID implies all before it. A position has one GTID
per domain, as in the variables `gtid_binlog_pos` and `gtid_slave_pos`::

    0-1-100,7-3-25
"""

from __future__ import annotations

import re
from typing import Self

from deltaforge_dagster.errors import CorruptLog

MAX_NUMBER = (1 << 64) - 1
"""The largest number of a GTID."""

_GTID = re.compile(r"(\d{1,10})-(\d{1,10})-(\d{1,20})", re.ASCII)
_MAX_ID = (1 << 32) - 1


class DomainGtids:
    """The last GTID of each domain; mutable."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # by domain: number, server

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a list of GTIDs; white space does not matter.

        Raises:
            CorruptLog: The text is not such a list.
        """
        made = cls()
        for part in filter(None, "".join(text.split()).split(",")):
            match = _GTID.fullmatch(part)
            domain, server, number = map(int, match.groups()) if match else (0, 0, 0)
            if not number or domain in made._last:
                raise CorruptLog(f"not a GTID per domain of MariaDB: {text[:80]!r}")
            made.advance(domain, server, number)
        return made

    def advance(self, domain: int, server: int, number: int) -> None:
        """Advance to the next transaction of a domain.

        Raises:
            CorruptLog: The GTID is invalid, or its number does not increase.
        """
        before, by = self._last.get(domain, (0, server))
        if not (before < number <= MAX_NUMBER and max(domain, server) <= _MAX_ID):
            raise CorruptLog(
                f"GTID {domain}-{server}-{number} after {domain}-{by}-{before}: numbers of a domain "
                "must rise; set gtid_strict_mode = ON, and give servers that write independently"
                " a gtid_domain_id each"
            )
        self._last[domain] = (number, server)

    def __le__(self, other: DomainGtids) -> bool:
        """Return whether the other one is at the same GTID or a later one in every domain of this one."""
        for domain, (number, server) in self._last.items():
            theirs, by = other._last.get(domain, (0, server))
            if theirs < number or (theirs == number and by != server):
                return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainGtids) and self._last == other._last

    __hash__ = None  # type: ignore[assignment] # it moves

    def __str__(self) -> str:
        """Return the list in MariaDB's notation, sorted by domain; empty without GTIDs."""
        return ",".join(
            f"{domain}-{server}-{number}" for domain, (number, server) in sorted(self._last.items())
        )


def is_of_mariadb(text: str) -> bool:
    """Return whether text is in MariaDB's notation, rather than in MySQL's or empty."""
    return _GTID.fullmatch("".join(text.split()).split(",")[0]) is not None
