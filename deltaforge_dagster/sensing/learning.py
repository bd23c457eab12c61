"""Learn from segments: update what is known about each table with the rows of the next segments.

A Spark task runs this. It starts with the state after some segment, reads the rows of the next
segments in order, one row group at a time, and returns the new state of the tables that had rows.
The result depends only on the rows, not on how they are divided.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.sensing.groups import coded
from deltaforge_dagster.sensing.schema import DocumentSchema
from deltaforge_dagster.sensing.table import TableSense, Versions, selected

COLUMNS = ("op", "ts_us", "db", "schema", "table", "after", "schema_version", "headers")
"""The columns of the change frame that are read."""

_OPS = {"c", "u", "r"}


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned about a table from some segments.

    Attributes:
        table: Its full name.
        state: The state with which to continue, compressed.
        evolutions: The changes of its schemas, by schema; each with the `subject`, the table or
            `table:column`.
        counts: What these segments added: the numbers of `events`, of `sampled` events, of `hits`
            and `misses` of the structure cache, and of rows that `drifted`.
        facts: Dagster metadata of the table, by name.
    """

    table: str
    state: bytes
    evolutions: list[dict[str, Any]]
    counts: dict[str, int]
    facts: dict[str, int | str]


class SensedTables:
    """The tables of a pipeline while segments are processed.

    Args:
        options: The pipeline's `schema_sensing`.
        versions: The registered versions of tables, by full name.
        states: The previous states of tables, by full name.
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

    def accept(self, batch: pa.RecordBatch) -> None:
        """Learn from the next rows of the change frame that belong to selected tables."""
        codes, names = _tables(batch)
        for number, (full, bare) in enumerate(names):
            at = np.flatnonzero(codes == number)
            if len(at) and selected(self._options.tables, bare):
                self._table(full).accept(batch, at, self._versions.get(full, {}))

    def learned(self) -> list[Learned]:
        """Return what was learned about the tables that had rows."""
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
        return {
            counter: count - before[counter]
            for counter, count in _counts(self._tables[name]).items()
        }


def restored(options: SchemaSensing, state: bytes) -> TableSense:
    """Return a table from its compressed state."""
    return TableSense.restored(options, zlib.decompress(state))


def named_schemas(name: str, table: TableSense) -> dict[str, DocumentSchema]:
    """Return the schemas of a table by name: the table's name, or `table:column`."""
    whole = {} if table.whole is None else {name: table.whole}
    columns = {f"{name}:{column}": schema for column, schema in sorted(table.columns.items())}
    return whole | columns


def _facts(name: str, table: TableSense) -> dict[str, int | str]:
    """Return a table's metadata: its schemas, and how many rows differed from their declaration."""
    facts: dict[str, int | str] = {
        f"sensing/{key}": f"{schema.sequence} {schema.fingerprint}"
        for key, schema in named_schemas(name, table).items()
    }
    return facts | ({f"drift/{name}": table.drift.drifted} if table.drift.analyzed else {})


def _evolutions(name: str, table: TableSense) -> list[dict[str, Any]]:
    return [
        {"subject": key, **evolution}
        for key, schema in named_schemas(name, table).items()
        for evolution in schema.evolutions
    ]


def _counts(table: TableSense) -> dict[str, int]:
    return {
        "events": table.events,
        "sampled": table.drift.analyzed + (table.whole.sampled if table.whole else 0),
        "hits": sum(schema.hits for schema in table.schemas),
        "misses": sum(schema.misses for schema in table.schemas),
        "drifted": table.drift.drifted,
    }


def _tables(batch: pa.RecordBatch) -> tuple[Longs, list[tuple[str, str]]]:
    """Return for each row the index of its table, and the full and bare names of the tables.

    The index is -1 for rows without a new row image (deletes, truncates, DDL). Only dictionary
    entries are inspected, not the name of each row.
    """
    ops, kinds = coded(batch, "op")
    numbers = np.zeros(batch.num_rows, np.int64)
    entries: list[list[str | None]] = []
    for name in ("db", "schema", "table"):
        indices, values = coded(batch, name)
        numbers = numbers * len(values) + indices
        entries.append(values)
    used, codes = np.unique(numbers, return_inverse=True)
    names = []
    for number in used.tolist():
        rest, table = divmod(number, len(entries[2]))
        db, schema = divmod(rest, len(entries[1]))
        bare = str(entries[2][table])
        names.append((f"{entries[1][schema] or entries[0][db]}.{bare}", bare))
    wanted = np.array([op in _OPS for op in kinds], np.bool_)[ops]
    return np.where(wanted, codes, -1), names
