"""Positions: where a source's log stands, as ordered values and as JSON text.

The state store, the journal and Dagster's metadata carry a position as JSON text. Only the source
that made it looks inside; everything else compares two positions of one source with `<`.
PostgreSQL: `{"lsn": "0/16B6C50", "tx_id": 731}`, the `end_lsn` of a commit (Streaming
Replication Protocol, section "Logical Replication Message Formats").
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Protocol, Self

from deltaforge_dagster.errors import CorruptLog

_LSN = re.compile(r"^([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})$")


class Position(Protocol):
    """A place in one source's log; totally ordered among positions of that source."""

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
    """A PostgreSQL position; `tx_id` says which transaction ended there and is not compared."""

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


def parse_position(text: str) -> LsnPosition:
    """Return the position that `to_json` wrote.

    Raises:
        CorruptLog: The text is not a position of any kind this version knows.
    """
    try:
        fields = json.loads(text)
        tx_id = fields.get("tx_id")
        return LsnPosition(parse_lsn(fields["lsn"]), None if tx_id is None else int(tx_id))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLog(f"not a position: {text[:80]!r}") from error
