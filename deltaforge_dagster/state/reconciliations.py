"""What was proven about tables of sinks, and which tables are being compared.

Keys of the namespace `reconcile/{pipeline}` are `{sink}/{full name of the source's table}`. In the
`Kv` the value is a `TableProof`. In the `Slot` it is who compares the table, and until when: a
process that dies leaves a claim that expires.
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
        slot, key = Slot(self._database, _namespace(name)), _key(sink, table)
        before, now = slot.get(key), self._database.now()
        if before is not None:
            claimed = orjson.loads(before.value)
            if claimed["holder"] != holder and claimed["until"] > now:
                return False
        value = orjson.dumps({"holder": holder, "until": now + seconds})
        return slot.compare_and_swap(key, 0 if before is None else before.version, value)

    def release(self, name: str, sink: str, table: str) -> None:
        """End the claim of a table."""
        value = orjson.dumps({"holder": "", "until": 0.0})
        Slot(self._database, _namespace(name)).upsert(_key(sink, table), value)


def _key(sink: str, table: str) -> str:
    return f"{sink}/{table}"


def _namespace(pipeline: str) -> str:
    return f"reconcile/{pipeline}"
