"""What was proven about tables of sinks, and which tables are being compared.

Keys of the namespace `reconcile/{pipeline}` are `{sink}/{full name of the source's table}`. In the
`Kv` the value is a `TableProof`. In the `Slot` it is a `TableClaim`: who compares the table, until
when, and when it was compared before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson

from deltaforge_dagster.state.database.database import Database
from deltaforge_dagster.state.database.primitives import Kv, Slot


@dataclass(frozen=True, slots=True)
class TableProof:
    """A table of a sink that was compared as a whole and found equal.

    Attributes:
        sink: The sink.
        table: Full name of the source's table.
        verified_through: Position up to which the sink had everything, JSON text.
        verified_at: When the comparison ended, in seconds since 1970 by the store's clock.
        rows: Number of rows that were compared.
    """

    sink: str
    table: str
    verified_through: str
    verified_at: float
    rows: int

    def to_json(self) -> dict[str, Any]:
        """Return the proof as JSON values, with the position as an object."""
        return {**asdict(self), "verified_through": orjson.loads(self.verified_through)}


@dataclass(frozen=True, slots=True)
class TableClaim:
    """Who compares a table of a sink now, and when it was compared; seconds by the store's clock.

    Attributes:
        holder: Who compares it, empty for nobody.
        until: When the claim expires, as the claim of a process that has died does.
        begun: When the newest comparison began.
        ended: When a comparison of all of the table ended, or one found that it cannot be compared;
            0 for never.
    """

    holder: str = ""
    until: float = 0.0
    begun: float = 0.0
    ended: float = 0.0


class ReconciliationRepository:
    """The proofs of all pipelines: `StateStore.reconciliations`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def proofs(self, name: str) -> list[TableProof]:
        """Return the newest proof of each table of a pipeline's sinks, by sink and table."""
        stored = Kv(self._database, _namespace(name)).items()
        return [TableProof(**orjson.loads(value)) for value in stored.values()]

    def prove(self, name: str, proof: TableProof) -> None:
        """Store a proof in place of the table's earlier one."""
        value = orjson.dumps(asdict(proof))
        Kv(self._database, _namespace(name)).put(_key(proof.sink, proof.table), value)

    def claim(self, name: str, sink: str, table: str, holder: str, seconds: float) -> bool:
        """Claim a table for a comparison, or prolong the claim; return False if another has it.

        Args:
            name: The pipeline.
            sink: The sink.
            table: Full name of the source's table.
            holder: Who compares it.
            seconds: How long the claim lasts.
        """
        version, before = self._claim(name, sink, table)
        now = self._database.now()
        if before.holder not in {"", holder} and before.until > now:
            return False
        begun = before.begun if before.holder == holder else now
        claim = TableClaim(holder, now + seconds, begun, before.ended)
        slot = Slot(self._database, _namespace(name))
        return slot.compare_and_swap(_key(sink, table), version, orjson.dumps(asdict(claim)))

    def release(self, name: str, sink: str, table: str, holder: str, *, compared: bool) -> None:
        """End the claim of a table; do nothing if it expired and another has the table now.

        Args:
            name: The pipeline.
            sink: The sink.
            table: Full name of the source's table.
            holder: Who claimed it.
            compared: Whether the comparison came to its end.
        """
        version, before = self._claim(name, sink, table)
        if before.holder != holder:
            return
        ended = self._database.now() if compared else before.ended
        value = orjson.dumps(asdict(TableClaim(begun=before.begun, ended=ended)))
        slot = Slot(self._database, _namespace(name))
        slot.compare_and_swap(_key(sink, table), version, value)

    def last(self, name: str, sink: str, table: str) -> TableClaim:
        """Return when a table was compared, and who compares it now."""
        return self._claim(name, sink, table)[1]

    def _claim(self, name: str, sink: str, table: str) -> tuple[int, TableClaim]:
        """Return the version and the value of a table's slot."""
        stored = Slot(self._database, _namespace(name)).get(_key(sink, table))
        if stored is None:
            return 0, TableClaim()
        return stored.version, TableClaim(**orjson.loads(stored.value))


def _key(sink: str, table: str) -> str:
    return f"{sink}/{table}"


def _namespace(pipeline: str) -> str:
    return f"reconcile/{pipeline}"
