"""Positions in PostgreSQL's log: `{"lsn": "0/16B6C50", "tx_id": 731}`.

A position is the `end_lsn` of a commit (Streaming Replication Protocol, section "Logical
Replication Message Formats").
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.positions import Position, format_lsn

_LSN = re.compile(r"^([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})$")


def parse_lsn(text: str) -> int:
    """Return the 64-bit value of PostgreSQL's `X/Y` notation (manual: type `pg_lsn`).

    Raises:
        CorruptLog: The text is not an LSN.
    """
    match = _LSN.match(text)
    if match is None:
        raise CorruptLog(f"not an LSN: {text[:40]!r} (expected hexadecimal X/Y)")
    return int(match[1], 16) << 32 | int(match[2], 16)


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class LsnPosition:
    """A PostgreSQL position; `tx_id` is the transaction that ended there and is not compared."""

    lsn: int
    tx_id: int | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Parse the fields that `to_json` wrote; return None if another kind of source has them."""
        if "lsn" not in fields:
            return None
        tx_id = fields.get("tx_id")
        return cls(parse_lsn(fields["lsn"]), None if tx_id is None else int(tx_id))

    def to_json(self) -> str:
        """Return `{"lsn": "X/YYYYYYYY", "tx_id": n|null}`."""
        return json.dumps({"lsn": format_lsn(self.lsn), "tx_id": self.tx_id})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LsnPosition) and self.lsn == other.lsn

    def __hash__(self) -> int:
        return hash(self.lsn)

    def __lt__(self, other: LsnPosition) -> bool:
        return self.lsn < other.lsn


def lsn_of(position: Position) -> int:
    """Return the LSN of a position.

    Raises:
        CorruptLog: It is a position of another kind of source.
    """
    if not isinstance(position, LsnPosition):
        raise CorruptLog(f"not a PostgreSQL position: {position.to_json()}")
    return position.lsn
