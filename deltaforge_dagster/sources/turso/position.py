"""Positions in a Turso or SQLite database.

For example `{"mode": "native", "last_change_id": 57, "table_positions": {}}`.

A position is the newest row of the change table or, in mode `polling`, the newest row of each
table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class TursoPosition:
    """A position in a Turso or SQLite database.

    In mode `polling`, a position is earlier than another one if they differ and it is not ahead in
    any table. Positions of different modes are not comparable.

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

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Parse the fields that `to_json` wrote; None if they belong to another kind of source."""
        if "mode" not in fields:
            return None
        if fields["mode"] not in {"native", "triggers", "polling"}:
            raise ValueError
        last, time = fields.get("last_change_id"), fields.get("change_time")
        tables = fields.get("table_positions") or {}
        return cls(
            str(fields["mode"]),
            None if last is None else int(last),
            tuple(sorted((str(table), int(at)) for table, at in tables.items())),
            None if time is None else int(time),
        )

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
        return isinstance(other, TursoPosition) and self._compared_fields == other._compared_fields

    def __hash__(self) -> int:
        return hash(self._compared_fields)

    def __lt__(self, other: TursoPosition) -> bool:
        theirs = dict(other.table_positions)
        return (
            self != other
            and self.mode == other.mode
            and (self.last_change_id or 0) <= (other.last_change_id or 0)
            and all(at <= theirs.get(table, at - 1) for table, at in self.table_positions)
        )

    @property
    def _compared_fields(self) -> tuple[str, int, frozenset[tuple[str, int]]]:
        return self.mode, self.last_change_id or 0, frozenset(self.table_positions)
