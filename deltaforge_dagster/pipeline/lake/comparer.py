"""Has Spark compare a table with the rows of the source, and repair it.

A view is a version of the table (`FigureReader.version_through`): the newest one without commits
after the front, so that it has exactly the commits up to the front, however fast others follow. Its
pending changes are read at their version of the same front, which is looked up first: changes that
are folded in between are found in both, and that changes nothing.

The rows that the source has are views of the session, made of the staged files by the expressions
that apply commits (`Statements.applied`). Nothing but counts and the first differences leaves
Spark. The keys of all windows are read from the windows' files once more, for the extra rows.

A repair is one statement, stamped as one more step of the front's commit. A later commit, or one
that is made meanwhile, and the repair exclude each other by what makes commits apply exactly once
(`writer`). So the repair takes effect at the version that was compared, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.lake.recorded_commits import CommittedVersion, FigureReader
from deltaforge_dagster.pipeline.lake.spark_failures import (
    PASSING,
    failure_of,
    is_not_found,
    translated,
)
from deltaforge_dagster.pipeline.lake.target import (
    Ownership,
    configure,
    table_label,
    table_properties,
)
from deltaforge_dagster.pipeline.lake.writer import branch_name, read_staged
from deltaforge_dagster.pipeline.run_context import SessionProvider
from deltaforge_dagster.sinks.lake.comparison import RowRepair, WindowComparison, alive
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.dialect import KEY, OWNER, PENDING, LakeDialect, writer_settings
from deltaforge_dagster.sinks.lake.pending import PendingRows, pending_name
from deltaforge_dagster.sinks.lake.statements import (
    Statements,
    WrittenColumn,
    holds,
    pending_columns,
    quoted,
    sql_type,
)
from deltaforge_dagster.sinks.tables.comparer import (
    MOST_LISTED,
    ComparedRows,
    ComparedView,
    DifferenceKind,
    RowDifference,
)
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sinks.tables.writer import PREFIX, TableOwner

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.sql import Row

    from deltaforge_dagster.pipeline.spark_client import SparkSession

_WINDOW_ROWS = 250_000
"""Rows of a window: each costs Spark some jobs, however few rows it has."""

_FIRST_REPAIR = 1 << 19
"""Number of the first statement of a repair; those of a commit have smaller ones."""

_KINDS: Sequence[DifferenceKind] = ("missing", "extra", "different", "duplicate")


@dataclass(slots=True)
class LakeComparer:
    """Compares one table of a sink; implements `TableComparer`.

    Args:
        lend: Lends a session.
        dialect: Format of the table.
        config: Options of the sink.
        owner: Who writes the table.
        destination: Name of the table.
    """

    lend: Callable[[], AbstractContextManager[SessionProvider]]
    dialect: LakeDialect
    config: LakeSinkConfig
    owner: TableOwner
    destination: tuple[str, ...]
    window_rows: int = field(default=_WINDOW_ROWS, init=False)
    exact: bool = field(default=True, init=False)
    keeps_windows: bool = field(default=True, init=False)
    seen: SeenKeys = field(init=False)
    _sessions: SessionProvider | None = field(default=None, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self.seen = SeenKeys()

    @property
    def label(self) -> str:
        """What messages call the table."""
        return table_label(self.dialect, self.owner, self.destination)

    @contextmanager
    def view(self, front: int, *, locked: bool = False) -> Iterator[ComparedView]:  # noqa: ARG002
        """Provide the version of the table with the commits up to `front`.

        See `TableComparer.view`; a change is made only if no commit came before it.
        """
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        if self._sessions is None:
            self._sessions = self._stack.enter_context(self.lend())
            session = self._sessions.session()
            configure(session, writer_settings(self.dialect, self.config))
        sessions = self._sessions
        try:
            yield self._begin(sessions, front)
        except PySparkException as error:
            if is_not_found(error):
                raise TableRejected(f"there is no {self.label}") from None
            raise translated(error, failure_of(error, sessions), self.label) from None

    def close(self) -> None:
        """End the session, and forget the windows."""
        self.seen = SeenKeys()
        self._sessions = None
        self._stack.close()

    def _begin(self, sessions: SessionProvider, front: int) -> LakeView:
        session = sessions.session()
        figures = FigureReader(session, self.dialect)
        properties = table_properties(session, self.dialect.table(self.destination))
        ownership = Ownership.from_json(properties.get(OWNER, ""))
        if not ownership.is_of(self.owner):
            raise TableRejected(f"{self.label} is written by another sink")
        pending = self._pending(session, figures, properties, front)
        version = figures.version_through(self.destination, self.owner.name, front)
        if version is None:
            raise TableRejected(f"{self.label} does not say which commits its versions have")
        view = LakeView(self, sessions, figures, front, ownership.base, pending)
        view.version = version
        return view

    def _pending(
        self,
        session: SparkSession,
        figures: FigureReader,
        properties: Mapping[str, str],
        front: int,
    ) -> PendingRows | None:
        """Return the pending changes of commits up to `front`; None if there are none."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        token, destination = properties.get(PENDING), pending_name(self.destination)
        name = self.dialect.table(destination)
        try:
            own = {} if token is None else table_properties(session, name)
        except PySparkException as error:
            if not is_not_found(error):
                raise
            own = {}
        if token is None or own.get(PENDING) != token or figures.newest(name) is None:
            return None
        version = figures.version_through(destination, self.owner.name, front)
        if version is None:
            raise TableRejected(f"{self.label}: which changes are pending is not known")
        rows = _at(name, version.version)
        if not session.sql(f"SELECT 1 FROM {rows} LIMIT 1").collect():
            return None
        names, own_columns = session.sql(f"SELECT * FROM {rows}").columns, pending_columns()
        columns = [column for column in names if column.lower() not in own_columns]
        return PendingRows(rows, columns, tuple(orjson.loads(own[KEY])))


@dataclass(slots=True)
class SeenKeys:
    """The keys of all windows, which stay in the windows' files.

    Attributes:
        columns: The key columns.
        files: The files of windows, by the columns that the key has in them.
    """

    columns: Sequence[WrittenColumn] = ()
    files: dict[tuple[WrittenColumn, ...], set[str]] = field(default_factory=dict)

    def add(self, columns: Sequence[WrittenColumn], rows: StagedTable) -> None:
        """Add the keys of a window."""
        self.columns = columns
        files = self.files.setdefault(tuple(columns), set())
        files.update(file for step in rows.steps for file in step.files)

    def views(self, session: SparkSession) -> Sequence[str]:
        """Return the view of all of them; none if there are no keys."""
        parts = []
        for number, (columns, files) in enumerate(self.files.items()):
            schema = ", ".join(f"{quoted(key.staged)} {key.staged_type}" for key in columns)
            view = f"deltaforge_seen_{number}"
            session.read.schema(schema).parquet(*sorted(files)).createOrReplaceTempView(view)
            values = ", ".join(f"{key.value('s')} AS {quoted(key.name)}" for key in columns)
            parts.append(f"SELECT {values} FROM {view} AS s")
        if not parts:
            return []
        session.sql(" UNION ALL ".join(parts)).createOrReplaceTempView("deltaforge_seen")
        return ["deltaforge_seen"]


@dataclass(slots=True)
class LakeView:
    """A version of a table; implements `ComparedView`."""

    comparer: LakeComparer
    sessions: SessionProvider
    figures: FigureReader
    through: int
    base: int
    pending: PendingRows | None
    version: CommittedVersion = field(init=False)
    _columns: Sequence[WrittenColumn] = ()
    _keys: Sequence[str] = ()
    _window: StagedTable | None = None
    _expected: str = ""
    _views: int = 0

    @property
    def _session(self) -> SparkSession:
        return self.sessions.session()

    def load(self, rows: StagedTable) -> None:
        """Apply the rows of a window; see `ComparedView.load`."""
        self._apply(rows)
        self._window = rows
        self._expect(
            f"SELECT * EXCEPT (df_window), df_is_current AS df_window FROM {self._expected}"
        )

    def change(self, changes: StagedTable) -> None:
        """Apply changes after the window was read; see `ComparedView.change`."""
        self._apply(changes)

    def differences(self) -> ComparedRows:
        """Compare the rows with the keys of the window; see `ComparedView.differences`."""
        assert self._window is not None
        keys = [column for column in self._columns if column.name in self._keys]
        self.comparer.seen.add(keys, self._window)
        comparison, compared = self._compared()
        count = self._rows(comparison.counts(compared))[0]
        kinds = {kind: count[kind] for kind in _KINDS if count[kind]}
        columns = {
            column.name: count[f"c{number}"]
            for number, column in enumerate(comparison.values)
            if count[f"c{number}"]
        }
        listed = self._rows(comparison.listed(compared, MOST_LISTED)) if kinds else []
        differences = [self._difference(comparison, row) for row in listed]
        return ComparedRows(count["rows"], kinds, columns, differences)

    def repair(self) -> bool:
        """Give the keys of the window the rows that they should have; see `ComparedView.repair`."""
        comparison, compared = self._compared()
        return self._execute(lambda repair: repair.window(compared, comparison.values))

    def extra_rows(self) -> ComparedRows:
        """Return the rows whose keys no window had; see `ComparedView.extra_rows`."""
        extra = self._extra()
        count = self._rows(f"SELECT count(*) AS rows FROM {extra}")[0]["rows"]
        if not count:
            return ComparedRows()
        texts = [f"CAST({quoted(name)} AS STRING) AS {quoted(name)}" for name in self._keys]
        order = f" ORDER BY {', '.join(map(quoted, self._keys))}" if self._keys else ""
        query = f"SELECT {', '.join(texts) or '1'} FROM {extra}{order} LIMIT {MOST_LISTED}"
        listed = [
            RowDifference("extra", {name: row[name] for name in self._keys})
            for row in self._rows(query)
        ]
        return ComparedRows(kinds={"extra": count}, listed=listed)

    def remove_extra_rows(self) -> bool:
        """Delete the rows whose keys no window had; see `ComparedView.remove_extra_rows`."""
        extra = self._extra()
        return self._execute(lambda repair: repair.removal(extra))

    def _rows(self, query: str) -> Sequence[Row]:
        return self._session.sql(query).collect()

    def _expect(self, query: str) -> None:
        """Make the rows that the table should have those of a query."""
        self._views += 1
        self._expected = f"deltaforge_expected_{self._views}"
        self._session.sql(query).createOrReplaceTempView(self._expected)

    def _apply(self, table: StagedTable) -> None:
        """Apply staged rows to the rows that the table should have."""
        columns = self._fitting(table)
        if not self._columns:  # those of the window count: changes may have older ones
            self._columns = columns
            self._keys = [column.name for column in columns if column.staged in table.key]
            self._expect(_nothing(columns))
        names = [column.name for column in self._columns]
        mode = self.comparer.config.mode
        for step in table.steps:
            if step.kind == "truncate":
                self._expect(
                    f"SELECT * EXCEPT (df_is_current), false AS df_is_current FROM {self._expected}"
                )
                continue
            read_staged(self._session, table, step, mode)
            statements = Statements(self._expected, columns, table.key, table.absent, self.base)
            rekey, history = step.kind == "rekey", mode == "history"
            self._expect(statements.applied(names, rekey=rekey, history=history))

    def _fitting(self, table: StagedTable) -> Sequence[WrittenColumn]:
        """Return where columns of staged rows go; the table is not altered.

        Raises:
            TableRejected: The table lacks a column, or a column has a type without these values.
        """
        existing = self._existing()
        fitting: list[WrittenColumn] = []
        for column in table.columns.columns:
            own, type_ = existing.get(column.name.lower()), sql_type(column.type)
            if own is None:
                raise TableRejected(f"{self.comparer.label} has no column {column.name}")
            if not holds(own[1], self.comparer.dialect.stored(type_)):
                raise TableRejected(
                    f"{self.comparer.label}: its column {own[0]} has the type {own[1]}, which does "
                    "not hold the values of the source's column"
                )
            fitting.append(WrittenColumn(column.name, own[0], type_, own[1]))
        return fitting

    def _existing(self) -> Mapping[str, tuple[str, str]]:
        """Return name and type of each column of the version, by the name in lower case."""
        fields = self._session.sql(f"SELECT * FROM {self._table}").schema.fields
        return {field.name.lower(): (field.name, field.dataType.simpleString()) for field in fields}

    @property
    def _table(self) -> str:
        """The version in SQL."""
        comparer = self.comparer
        return _at(comparer.dialect.table(comparer.destination), self.version.version)

    def _alive(self, within: str = "") -> str:
        """Return the view of the table's rows that are alive, within bounds of keys."""
        config, rows = self.comparer.config, f"SELECT * FROM {self._table}"
        if self.pending is not None:
            existing = self._existing().values()
            own = [name for name, _ in existing if not name.lower().startswith(PREFIX)]
            rows = self.pending.view(self._table, own)
        condition = alive("t", config.mode, soft_deletes=config.soft_deletes)
        query = f"SELECT * FROM ({rows}) AS t WHERE {condition}{within}"
        self._session.sql(query).createOrReplaceTempView("deltaforge_alive")
        return "deltaforge_alive"

    def _compared(self) -> tuple[WindowComparison, str]:
        """Return the comparison of the window, and the view with its result."""
        own = [
            WrittenColumn(column.name, column.name, column.type, column.type)
            for column in self._columns
        ]
        keys = Statements(self._expected, own, self._keys, frozenset(), 0)
        bounds = keys.bounds(f"(SELECT * FROM {self._expected} WHERE df_window)")
        within = "" if bounds is None else keys.within(self._rows(bounds)[0])
        comparison = WindowComparison(
            self._expected, self._alive(within), self._columns, self._keys
        )
        self._session.sql(comparison.compared()).createOrReplaceTempView("deltaforge_compared")
        return comparison, "deltaforge_compared"

    def _extra(self) -> str:
        """Return the view of the keys of rows that no window had."""
        seen = self.comparer.seen
        if not self._columns:
            self._columns, self._keys = seen.columns, [column.name for column in seen.columns]
            self._expect(_nothing(self._columns))
        comparison = WindowComparison(self._expected, self._alive(), self._columns, self._keys)
        query = (
            comparison.extra_keys(seen.views(self._session))
            if self._keys
            else "SELECT * FROM deltaforge_alive"
        )
        self._session.sql(query).createOrReplaceTempView("deltaforge_extra")
        return "deltaforge_extra"

    def _execute(self, statement: Callable[[RowRepair], str]) -> bool:
        """Execute a statement that repairs rows of this version; return whether it was first."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        self._check_repairable()
        branches, session = self.comparer.dialect.branches, self._session
        branch = None if branches is None else branch_name(self.comparer.owner)
        name = self.comparer.dialect.table(self.comparer.destination)
        try:
            if branches is not None and branch is not None:
                session.sql(branches.create(name, branch, self.version.version))
            return self._publish(statement, name, branch)
        except PySparkException as error:
            if failure_of(error, self.sessions) in PASSING:
                return False
            raise
        finally:
            if branches is not None and branch is not None:
                session.sql(branches.drop(name, branch))

    def _publish(
        self, statement: Callable[[RowRepair], str], name: str, branch: str | None
    ) -> bool:
        """Execute a statement on the table, or on a branch of it that is published afterwards."""
        comparer, branches = self.comparer, self.comparer.dialect.branches
        written = name if branches is None or branch is None else branches.part(name, branch)
        repeated = self.version.number == self.through
        step = max(_FIRST_REPAIR, self.version.step + 1 if repeated else 0)
        configure(self._session, comparer.dialect.stamp(comparer.owner.name, self.through, step))
        self.figures.forget_version()
        place, soft = self.base + self.through, comparer.config.soft_deletes
        self._rows(statement(RowRepair(written, self._columns, self._keys, place, soft)))
        if branches is None or branch is None:
            version = self.figures.last_version()
        else:
            published = self._rows(branches.publish(comparer.destination, branch))
            version = published[0]["updated_ref"]
        if version is None:  # a commit came first, so the statement was skipped
            return False
        self.version = CommittedVersion(version, self.through, step)
        return True

    def _check_repairable(self) -> None:
        config, label = self.comparer.config, self.comparer.label
        if config.mode == "history":
            raise TableRejected(
                f"{label} cannot be repaired: with mode history, nobody knows since when its rows "
                "were to be valid; load it again (deltaforge resync)"
            )
        if config.pending is not None or self.pending is not None:
            raise TableRejected(
                f"{label} cannot be repaired while changes are kept beside it: take `pending` out "
                "of the file, repair the table after its next commit, and put `pending` back"
            )
        if not self._keys:
            raise TableRejected(
                f"{label} has rows, and the source has none and never had any since the journal "
                "begins; load the table again (deltaforge resync)"
            )

    def _difference(self, comparison: WindowComparison, row: Row) -> RowDifference:
        differing = [
            (number, column.name)
            for number, column in enumerate(comparison.values)
            if row["df_kind"] == "different" and row[f"d{number}"]
        ]
        return RowDifference(
            row["df_kind"],
            {name: row[f"k{number}"] for number, name in enumerate(self._keys)},
            [name for _, name in differing],
            {name: row[f"e{number}"] for number, name in differing},
            {name: row[f"t{number}"] for number, name in differing},
        )


def _at(table: str, version: int) -> str:
    """Return a version of a table in SQL."""
    return f"{table} VERSION AS OF {version}"


def _nothing(columns: Sequence[WrittenColumn]) -> str:
    """Return a query without rows, with the columns that `Statements.applied` describes."""
    chosen = [f"CAST(NULL AS {column.type}) AS {quoted(column.name)}" for column in columns]
    chosen += [
        "CAST(NULL AS TIMESTAMP) AS df_event_time",
        "false AS df_is_current",
        "false AS df_window",
    ]
    return f"SELECT {', '.join(chosen)} WHERE false"
