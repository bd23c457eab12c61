"""Compares a table of PostgreSQL with rows of the source.

The rows of the source are applied to a temporary table with the columns of the sink's table, by the
statements that apply commits (`statements`). So they get the same types, by the same casts. Then
the server compares the columns' texts, not the values: 1.0 and 1.00 are equal in `numeric`, as are
0 and -0 in `real`, but they are not the same.

Each window is one transaction, REPEATABLE READ, that changes only temporary tables. A repair locks
the table's row in `commits` first, as every commit does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from deltaforge_dagster.errors import DeltaforgeError, TableRejected
from deltaforge_dagster.sinks.postgres import commits
from deltaforge_dagster.sinks.postgres.server import (
    NAME_BYTES,
    TargetServer,
    quoted,
    schema_and_table,
    translated,
)
from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.statements import PostgresStatements, TargetColumn
from deltaforge_dagster.sinks.postgres.target import PostgresTarget
from deltaforge_dagster.sinks.postgres.types import staged_type, takes
from deltaforge_dagster.sinks.postgres.writer import StepApplication
from deltaforge_dagster.sinks.tables.comparer import (
    MOST_LISTED,
    ComparedRows,
    ComparedView,
    RowDifference,
)
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sinks.tables.writer import TableOwner

_WINDOW_ROWS = 20_000
_EXPECTED = "deltaforge_expected"
_WINDOW = "deltaforge_window"
_SEEN = "deltaforge_seen"
"""Temporary tables: the rows that the source has, and the keys of this window and of all."""

_LONGEST_SECONDS = 600


class PostgresComparer:
    """Compares one table of a sink; implements `TableComparer`.

    The keys of all windows are in a temporary table, which lasts as long as the connection.

    Args:
        config: Options of the sink.
        owner: Who writes the table.
        destination: Name of the table.
    """

    window_rows = _WINDOW_ROWS
    exact = True
    keeps_windows = False

    def __init__(
        self, config: PostgresSinkConfig, owner: TableOwner, destination: Sequence[str]
    ) -> None:
        self._config = config
        self._owner = owner
        self._name = schema_and_table(destination)
        # Not the name of the writer's sessions: a run ends sessions of that name.
        name = f"deltaforge reconcile:{owner.pipeline}:{owner.sink_id}"[:NAME_BYTES]
        self._server = TargetServer.from_dsn(config.dsn.get_secret_value(), owner.sink_id, name)
        self._connection: psycopg.Connection | None = None

    @property
    def _label(self) -> str:
        return f"PostgreSQL table {'.'.join(self._name)} of sink {self._owner.sink_id}"

    @contextmanager
    def view(self, front: int, *, locked: bool = False) -> Iterator[ComparedView]:
        """Provide the table as one transaction sees it; see `TableComparer.view`."""
        if self._connection is None:
            self._connection = self._server.connect()
        connection, problem = self._connection, None
        try:
            with connection.transaction():
                yield self._begin(connection, front, locked=locked)
        except psycopg.Error as error:
            problem = self._problem(error)
        if problem is not None:
            raise problem  # not chained: the server's text may quote a value of a row

    def close(self) -> None:
        """Disconnect, and forget the windows."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _begin(self, connection: psycopg.Connection, front: int, *, locked: bool) -> PostgresView:
        if not locked:  # a lock alone would leave the snapshot from before it
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        # The changes of a window are staged within the transaction.
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(f"SET LOCAL {name} = '{_LONGEST_SECONDS}s'")
        relation = commits.relation(connection, self._name)
        if relation is None or not commits.exists(connection):
            raise TableRejected(f"there is no {self._label}")
        row = (commits.lock if locked else commits.read)(connection, self._name)
        if row.pipeline is not None and not row.is_of(self._owner):
            raise TableRejected(f"{self._label} is written by another sink")
        # A table without changes in the last commits does not say that it has them.
        through = max(front, row.through) if row.owner == self._owner.uid else front
        return PostgresView(connection, self._config, self._owner, self._name, relation[0], through)

    def _problem(self, error: psycopg.Error) -> DeltaforgeError:
        server = self._server
        return translated(error, server.where, server.user, self._label, self._name)


@dataclass(slots=True)
class PostgresView:
    """The table as a transaction sees it; implements `ComparedView`."""

    connection: psycopg.Connection
    config: PostgresSinkConfig
    owner: TableOwner
    name: tuple[str, str]
    relation: int
    through: int
    _columns: Sequence[TargetColumn] = ()
    _keys: Sequence[str] = ()

    def load(self, rows: StagedTable) -> None:
        """Apply the rows of a window; see `ComparedView.load`."""
        self._apply(rows)
        keys = _names("e", self._keys)
        self.connection.execute(
            f"CREATE TEMPORARY TABLE {_WINDOW} ON COMMIT DROP AS"
            f" SELECT {keys} FROM pg_temp.{_EXPECTED} AS e WHERE {self._alive('e')}"
        )

    def change(self, changes: StagedTable) -> None:
        """Apply changes after the window was read; see `ComparedView.change`."""
        columns, keys = self._columns, self._keys
        self._apply(changes)
        if columns:  # the columns of the window count: changes may have older versions of the table
            self._columns, self._keys = columns, keys

    def differences(self) -> ComparedRows:
        """Compare the rows with the keys of the window; see `ComparedView.differences`."""
        count = self.connection.execute(f"SELECT count(*) FROM pg_temp.{_WINDOW}").fetchone()
        assert count is not None
        with self.connection.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(self._compared()).fetchall()
        keys = _names("w", self._keys)
        self.connection.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {_SEEN} AS"
            f" SELECT {keys} FROM pg_temp.{_WINDOW} AS w WITH NO DATA"
        )
        self.connection.execute(
            f"INSERT INTO pg_temp.{_SEEN} SELECT {keys} FROM pg_temp.{_WINDOW} AS w"
        )
        differences: dict[tuple[Any, ...], RowDifference] = {}
        for row in found:
            key = tuple(row[f"k{number}"] for number in range(len(self._keys)))
            differences.setdefault(key, self._difference(row))
        return ComparedRows.counted(count[0], list(differences.values()))

    def repair(self) -> bool:
        """Give the keys of the window the rows that they should have; see `ComparedView.repair`."""
        self._check_repairable()
        table, keys = quoted(*self.name), self._keys
        window = f"SELECT FROM pg_temp.{_WINDOW} AS w WHERE {_equal('w', 't', keys)}"
        other = (
            f"SELECT FROM {table} AS o WHERE {_equal('o', 't', keys)}"
            " AND (o.tableoid, o.ctid) < (t.tableoid, t.ctid)"
        )
        row = (
            f"SELECT FROM pg_temp.{_EXPECTED} AS e"
            f" WHERE {_equal('e', 't', keys)} AND {self._alive('e')}"
        )
        execute = self.connection.execute
        # Of several rows of one key, one stays.
        execute(f"DELETE FROM {table} AS t WHERE EXISTS ({window}) AND EXISTS ({other})")
        execute(self._merge())
        execute(f"{self._removal} WHERE EXISTS ({window}) AND NOT EXISTS ({row})")
        return True

    def remove_extra_rows(self) -> bool:
        """Delete the rows whose keys no window had; see `ComparedView.remove_extra_rows`."""
        self._check_repairable()
        self.connection.execute(f"{self._removal} WHERE {self._extra()}")
        return True

    def extra_rows(self) -> ComparedRows:
        """Return the rows whose keys no window had; see `ComparedView.extra_rows`."""
        source = f"FROM {quoted(*self.name)} AS t WHERE {self._extra()}"
        count = self.connection.execute(f"SELECT count(*) {source}").fetchone()
        assert count is not None
        shown = ", ".join(f"t.{quoted(name)}::text" for name in self._keys)
        rows = self.connection.execute(f"SELECT {shown} {source} LIMIT {MOST_LISTED}").fetchall()
        differences = [
            RowDifference("extra", dict(zip(self._keys, row, strict=True))) for row in rows
        ]
        return ComparedRows(kinds={"extra": count[0]}, listed=differences)

    def _extra(self) -> str:
        """Return the condition that no window had a row's key, and no change has added it."""
        seen = self.connection.execute(
            "SELECT to_regclass(%s) IS NOT NULL", [f"pg_temp.{_SEEN}"]
        ).fetchone()
        known = [_SEEN] if seen is not None and seen[0] else []
        known += [_EXPECTED] if self._columns else []  # there were changes
        if not self._keys:
            self._keys = self._seen_keys() if known else ()
        unknown = [self._alive("t")]
        for table in known:
            alive = f" AND {self._alive('s')}" if table == _EXPECTED else ""
            unknown.append(
                f"NOT EXISTS (SELECT FROM pg_temp.{table} AS s"
                f" WHERE {_equal('t', 's', self._keys)}{alive})"
            )
        return " AND ".join(unknown)

    def _check_repairable(self) -> None:
        if self.config.mode == "history":
            raise TableRejected(
                f"PostgreSQL table {'.'.join(self.name)} of sink {self.owner.sink_id} cannot be "
                "repaired: with mode history, nobody knows since when its rows were to be valid; "
                "load it again (deltaforge resync)"
            )

    def _apply(self, table: StagedTable) -> None:
        """Apply staged rows to the temporary table of expected rows."""
        self.connection.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {_EXPECTED} ON COMMIT DROP AS"
            f" SELECT * FROM {quoted(*self.name)} WITH NO DATA"
        )
        target = PostgresTarget(self.connection, self.config, self.owner, table)
        self._columns = self._fitting(target)
        self._keys = [column.name for column in self._columns if column.staged in table.key]
        statements = PostgresStatements(
            f"pg_temp.{_EXPECTED}", self._columns, table.key, table.absent, 0
        )
        for step in table.steps:
            StepApplication(target, statements).apply(step)

    def _fitting(self, target: PostgresTarget) -> Sequence[TargetColumn]:
        """Return where columns of staged rows go; the table is not altered.

        Raises:
            TableRejected: The table lacks a column, or a column has a type without these values.
        """
        existing = {column.name: column for column in target.columns(self.relation)}
        fitting: list[TargetColumn] = []
        for number, column in enumerate(target.table.columns.columns):
            own = existing.get(column.name)
            if own is None:
                raise TableRejected(f"{target.label} has no column {column.name}")
            if not takes(own.type, column, enum=own.enum):
                raise TableRejected(
                    f"{target.label}: its column {column.name} has the type {own.type}, which does "
                    "not hold the values of the source's column"
                )
            sent = staged_type(column.type)
            fitting.append(
                TargetColumn(number, column.name, column.name, sent, own.type, own.collation)
            )
        return fitting

    def _alive(self, row: str) -> str:
        """Return the condition that a row of the table is one that the source has now."""
        if self.config.mode == "history":
            return f"{row}.df_is_current"
        return f"{row}.df_deleted IS NOT TRUE" if self.config.soft_deletes else "true"

    @property
    def _removal(self) -> str:
        """The beginning of the statement that deletes rows `t`, or marks them deleted."""
        table = quoted(*self.name)
        if self.config.soft_deletes:
            return f"UPDATE {table} AS t SET df_deleted = true"
        return f"DELETE FROM {table} AS t"

    def _merge(self) -> str:
        """Return the statement that inserts and updates the rows of the window."""
        names = [column.name for column in self._columns]
        differs = [_differ(f"s.{quoted(name)}", f"t.{quoted(name)}") for name in names]
        values = {name: f"s.{quoted(name)}" for name in names}
        if self.config.soft_deletes:
            values["df_deleted"] = "false"
            differs.append("t.df_deleted IS NOT FALSE")
        changes = ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())
        return (
            f"MERGE INTO {quoted(*self.name)} AS t USING (SELECT e.* FROM pg_temp.{_EXPECTED} AS e"
            f" JOIN pg_temp.{_WINDOW} AS w ON {_equal('w', 'e', self._keys)}"
            f" WHERE {self._alive('e')}) AS s ON {_equal('t', 's', self._keys)}"
            f" WHEN MATCHED AND ({' OR '.join(differs)}) THEN UPDATE SET {changes}"
            f" WHEN NOT MATCHED THEN INSERT ({', '.join(map(quoted, values))})"
            f" VALUES ({', '.join(values.values())})"
        )

    def _compared(self) -> str:
        """Return the query of the rows of the window that differ."""
        compared = [column.name for column in self._columns if column.name not in self._keys]
        fields = [f"w.{quoted(name)}::text AS k{n}" for n, name in enumerate(self._keys)]
        fields += ["e.ctid IS NOT NULL AS expected", "t.ctid IS NOT NULL AS present"]
        own_key = _names("w", self._keys)
        fields.append(f"count(t.ctid) OVER (PARTITION BY {own_key}) AS copies")
        differs = []
        for number, name in enumerate(compared):
            ours, theirs = (f'({row}.{quoted(name)})::text COLLATE "C"' for row in ("e", "t"))
            differs.append(f"c.e{number} IS DISTINCT FROM c.t{number}")
            fields += [f"{ours} AS e{number}", f"{theirs} AS t{number}"]
        anything = " OR ".join(["c.expected <> c.present", "c.copies > 1", *differs])
        return (
            f"SELECT * FROM (SELECT {', '.join(fields)} FROM pg_temp.{_WINDOW} AS w"
            f" LEFT JOIN pg_temp.{_EXPECTED} AS e"
            f" ON {_equal('w', 'e', self._keys)} AND {self._alive('e')}"
            f" LEFT JOIN {quoted(*self.name)} AS t"
            f" ON {_equal('w', 't', self._keys)} AND {self._alive('t')}) AS c WHERE {anything}"
        )

    def _difference(self, row: dict[str, Any]) -> RowDifference:
        key = {name: row[f"k{number}"] for number, name in enumerate(self._keys)}
        if row["copies"] > 1:
            return RowDifference("duplicate", key)
        if not row["present"]:
            return RowDifference("missing", key)
        if not row["expected"]:
            return RowDifference("extra", key)
        compared = [column.name for column in self._columns if column.name not in self._keys]
        pairs = {name: (row[f"e{n}"], row[f"t{n}"]) for n, name in enumerate(compared)}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        return RowDifference(
            "different",
            key,
            list(differing),
            {name: pair[0] for name, pair in differing.items()},
            {name: pair[1] for name, pair in differing.items()},
        )

    def _seen_keys(self) -> Sequence[str]:
        """Return the names of the key columns that windows had."""
        rows = self.connection.execute(
            "SELECT attname FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 ORDER BY attnum",
            [f"pg_temp.{_SEEN}"],
        )
        return [row[0] for row in rows]


def _differ(left: str, right: str) -> str:
    """Return the condition that two values have different texts."""
    return f'({left})::text COLLATE "C" IS DISTINCT FROM ({right})::text COLLATE "C"'


def _names(row: str, names: Sequence[str]) -> str:
    return ", ".join(f"{row}.{quoted(name)}" for name in names)


def _equal(left: str, right: str, names: Sequence[str]) -> str:
    """Return the condition that two rows have the same key."""
    return " AND ".join(f"{left}.{quoted(name)} = {right}.{quoted(name)}" for name in names)
