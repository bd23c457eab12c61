"""Learning from segments: what was known of each table, and the rows that come after it.

This is what a Spark task runs. It has what was known up to a segment, takes the rows of the next
segments in order, a row group at a time, and gives back what is known then of the tables that had rows. The
result depends on the rows alone, not on how they were divided.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.sensing.coded import coded
from deltaforge_dagster.sensing.schema import DocumentSchema
from deltaforge_dagster.sensing.table import TableSense, Versions, selected
from deltaforge_dagster.sources.kernel import Longs

COLUMNS = ("op", "ts_us", "db", "schema", "table", "after", "schema_version", "headers")
"""The columns of the change frame that are read."""

_OPS = {"c", "u", "r"}


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of a table after some segments.

    Attributes:
        table: Its full name.
        state: For the next segments; compressed.
        evolutions: How its schemas changed, in order; each with the `subject`, the table or `table:column`.
        counts: How many `events` were there, were `sampled`, how many documents were `hits` and
            `misses` among the structures remembered, and how many rows `drifted`.
        facts: What Dagster is told of the table, by names of metadata.
    """

    table: str
    state: bytes
    evolutions: list[dict[str, Any]]
    counts: dict[str, int]
    facts: dict[str, int | str]


class Tables:
    """The tables of a pipeline while segments are taken.

    Args:
        options: The pipeline's `schema_sensing`.
        versions: The registered versions of tables, by full names.
        states: What was known of tables before.
    """

    def __init__(
        self,
        options: SchemaSensing,
        versions: Mapping[str, Versions],
        states: Mapping[str, bytes],
    ) -> None:
        self._options = options
        self._versions = versions
        self._states = states
        self._tables: dict[str, TableSense] = {}
        self._before: dict[str, dict[str, int]] = {}

    def take(self, batch: pa.RecordBatch) -> None:
        """Take the next rows of the change frame, as far as they are of selected tables."""
        codes, names = _tables(batch)
        for number, (full, bare) in enumerate(names):
            at = np.flatnonzero(codes == number)
            if len(at) and selected(self._options.tables, bare):
                self._table(full).take(batch, at, self._versions.get(full, {}))

    def learned(self) -> list[Learned]:
        """Return what is known now of the tables that had rows."""
        return [
            Learned(
                name,
                zlib.compress(table.state(), 1),
                _evolutions(name, table),
                self._gained(name),
                _facts(name, table),
            )
            for name, table in self._tables.items()
        ]

    def _table(self, name: str) -> TableSense:
        if name not in self._tables:
            state = self._states.get(name)
            table = TableSense(self._options) if state is None else restored(self._options, state)
            self._tables[name] = table
            self._before[name] = _counts(table)
        return self._tables[name]

    def _gained(self, name: str) -> dict[str, int]:
        before = self._before[name]
        return {one: count - before[one] for one, count in _counts(self._tables[name]).items()}


def restored(options: SchemaSensing, state: bytes) -> TableSense:
    """Return what is known of a table."""
    return TableSense.restored(options, zlib.decompress(state))


def named_schemas(name: str, table: TableSense) -> dict[str, DocumentSchema]:
    """Return the schemas of a table by their names: the table's, or `table:column`."""
    whole = {} if table.whole is None else {name: table.whole}
    columns = {f"{name}:{column}": one for column, one in sorted(table.columns.items())}
    return whole | columns


def _facts(name: str, table: TableSense) -> dict[str, int | str]:
    """Return which schemas the table has, and how many rows differed from what it declares."""
    known: dict[str, int | str] = {
        f"sensing/{key}": f"{schema.sequence} {schema.fingerprint}"
        for key, schema in named_schemas(name, table).items()
    }
    return known | ({f"drift/{name}": table.drift.drifted} if table.drift.analyzed else {})


def _evolutions(name: str, table: TableSense) -> list[dict[str, Any]]:
    return [
        {"subject": key, **one}
        for key, schema in named_schemas(name, table).items()
        for one in schema.evolutions
    ]


def _counts(table: TableSense) -> dict[str, int]:
    return {
        "events": table.events,
        "sampled": table.drift.analyzed + (table.whole.sampled if table.whole else 0),
        "hits": sum(one.hits for one in table.schemas),
        "misses": sum(one.misses for one in table.schemas),
        "drifted": table.drift.drifted,
    }


def _tables(batch: pa.RecordBatch) -> tuple[Longs, list[tuple[str, str]]]:
    """Return for each row the number of its table, -1 for what has no new row; and their names, full and bare.

    The names are in dictionaries of a few entries, so no row's name is looked at.
    """
    ops, kinds = coded(batch, "op")
    place = np.zeros(batch.num_rows, np.int64)
    entries: list[list[str | None]] = []
    for name in ("db", "schema", "table"):
        indices, known = coded(batch, name)
        place = place * len(known) + indices
        entries.append(known)
    used, codes = np.unique(place, return_inverse=True)
    names = []
    for one in used.tolist():
        rest, table = divmod(one, len(entries[2]))
        db, schema = divmod(rest, len(entries[1]))
        bare = str(entries[2][table])
        names.append((f"{entries[1][schema] or entries[0][db]}.{bare}", bare))
    wanted = np.array([one in _OPS for one in kinds], np.bool_)[ops]
    return np.where(wanted, codes, -1), names
