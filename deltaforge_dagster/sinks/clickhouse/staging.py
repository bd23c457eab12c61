"""Sends rows to a table, and completes before those that lack values with what the table has.

Rows lack unchanged TOAST values. Some of these rows are updates that change the key as well.

The rows are first inserted into a staging table, and from there into the table, joined with the
table's rows of the same keys (or of the old keys). Rows that the table already has in this version
or a greater one are left out: when a commit is repeated, the row of the old key may be gone.
"""

# ruff: noqa: S608 - names and texts in queries are quoted

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from deltaforge_dagster.sinks.clickhouse.client import literal, quoted, table_name
from deltaforge_dagster.sinks.clickhouse.rows import ABSENT, arrow_stream
from deltaforge_dagster.sinks.clickhouse.target import (
    DELETED,
    ROW_COLUMNS,
    TIME,
    VERSION,
    ClickhouseTarget,
    plain,
)
from deltaforge_dagster.sinks.tables.staged import OLD_KEY

_NO_DEDUPLICATION = {"insert_deduplicate": "0"}
"""Settings of INSERTs without a token: rows that are sent twice are inserted twice.

They may have been deleted in between.
"""


@dataclass(slots=True)
class Staging:
    """A temporary staging table for rows that lack values.

    Args:
        target: The table.
        types: The types of its columns.
        rekey: Whether the rows change their keys.
    """

    target: ClickhouseTarget
    types: Mapping[str, str]
    rekey: bool
    _name: str = field(init=False)
    _inserts: Inserts = field(init=False)

    def __post_init__(self) -> None:
        target = self.target
        self._inserts = Inserts(target)
        *outer, table = target.table.destination
        digest = hashlib.sha256(f"{target.owner.name}/{table}".encode()).hexdigest()[:16]
        self._name = table_name((*outer, f"_deltaforge_{digest}"))

    @property
    def _keys(self) -> list[str]:
        return list(self.target.table.key)

    def begin(self) -> None:
        """Make the table."""
        types = self.types
        columns = {name: types[name] for name in [*self._columns, *ROW_COLUMNS]}
        if self.rekey:
            columns |= {OLD_KEY + name: types[name] for name in self._keys}
        columns[ABSENT] = "Array(String)"
        described = ", ".join(f"{quoted(name)} {type_}" for name, type_ in columns.items())
        self._drop()
        self.target.execute(f"CREATE TABLE {self._name} ({described}) ENGINE = Memory")

    def add(self, rows: pa.Table) -> None:
        """Add rows."""
        self._inserts.insert(self._name, rows)

    def finish(self) -> None:
        """Insert the completed rows into the table, and then the deletes of old keys.

        A delete that came first would leave no row from which to complete the rows.
        """
        target = self.target
        absent = sorted(target.table.absent)
        names = [*self._columns, *ROW_COLUMNS]
        values = [
            (
                f"if(has(s.{ABSENT}, {literal(name)}),"
                f" t.{quoted(f'value_{absent.index(name)}')}, s.{quoted(name)})"
            )
            if name in absent
            else f"s.{quoted(name)}"
            for name in names
        ]
        looked_up = [OLD_KEY + name if self.rekey else name for name in self._keys]
        lacked = [f"{quoted(name)} AS {quoted(f'value_{at}')}" for at, name in enumerate(absent)]
        joined = self._join("t", looked_up, lacked)
        newer = "t"
        if self.rekey:
            joined += self._join("n", self._keys, [])
            newer = "n"
        columns = ", ".join(map(quoted, names))
        self._inserts.execute(
            f"INSERT INTO {target.name} ({columns}) SELECT {', '.join(values)}"
            f" FROM {self._name} AS s{joined} WHERE {newer}.known < s.{VERSION}"
        )
        if self.rekey:
            keys = ", ".join(map(quoted, self._keys))
            old = ", ".join(quoted(OLD_KEY + name) for name in self._keys)
            self._inserts.execute(
                f"INSERT INTO {target.name} ({keys}, {', '.join(ROW_COLUMNS)})"
                f" SELECT {old}, 'd', {VERSION}, 1, {TIME} FROM {self._name}"
            )
        self._drop()

    def _join(self, alias: str, looked_up: list[str], values: list[str]) -> str:
        """Return the join with the table's rows whose keys are in columns of the staging table.

        Args:
            alias: Name of the joined rows; their column `known` is their version.
            looked_up: The columns of the staging table with the keys.
            values: Further columns to select from the table, in SQL.
        """
        target = self.target
        keys = [self._comparable(name, quoted(name)) for name in self._keys]
        columns = [f"{key} AS key_{at}" for at, key in enumerate(keys)]
        columns += [f"{VERSION} AS known", *values]
        searched = dict(zip(looked_up, self._keys, strict=True))
        wanted = ", ".join(self._comparable(key, quoted(name)) for name, key in searched.items())
        match = " AND ".join(
            f"{self._comparable(key, f's.{quoted(name)}')} = {alias}.key_{at}"
            for at, (name, key) in enumerate(searched.items())
        )
        return (
            f" LEFT ANY JOIN (SELECT {', '.join(columns)} FROM {target.name} FINAL"
            f" WHERE {DELETED} = 0"
            f" AND ({', '.join(keys)}) IN (SELECT {wanted} FROM {self._name})) AS {alias}"
            f" ON {match}"
        )

    def _comparable(self, key: str, value: str) -> str:
        """Return a value of a key column as joins and IN compare it.

        Unlike the table, they take 0 and -0 for two keys.
        """
        return f"{value} + 0" if plain(self.types[key]).startswith("Float") else value

    @property
    def _columns(self) -> list[str]:
        return [column.name for column in self.target.table.columns.columns]

    def _drop(self) -> None:
        self.target.execute(f"DROP TABLE IF EXISTS {self._name}")


@dataclass(frozen=True, slots=True)
class Inserts:
    """The INSERTs of a commit to one table.

    Args:
        target: The table.
    """

    target: ClickhouseTarget

    def insert(self, name: str, rows: pa.Table, token: str | None = None) -> None:
        """Insert rows.

        Args:
            name: The table's name as it is written in queries.
            rows: The rows.
            token: Deduplication token: an INSERT with one that the table remembers adds nothing.
                None for none.
        """
        columns = ", ".join(map(quoted, rows.schema.names))
        query = f"INSERT INTO {name} ({columns}) FORMAT ArrowStream"
        self.send(query, rows, None if token is None else {"insert_deduplication_token": token})

    def send(self, query: str, rows: pa.Table, settings: Mapping[str, str] | None = None) -> None:
        """Send an INSERT with its rows.

        If the server still executes an INSERT into the same table that a killed run has sent, that
        one is ended first (`replace_running_query`).
        """
        target = self.target
        target.guard()
        table = ".".join(target.table.destination)
        only = {
            "query_id": f"deltaforge/{target.owner.name}/{table}",
            "replace_running_query": "1",
        }
        target.client.execute(
            target.label, query, {**(settings or _NO_DEDUPLICATION), **only}, arrow_stream(rows)
        )

    def execute(self, query: str) -> None:
        """Execute an `INSERT ... SELECT`, or another statement without data."""
        self.target.guard()
        self.target.client.execute(self.target.label, query, _NO_DEDUPLICATION)
