"""Applies the staged changes of a table, exactly once: a commit that is repeated changes nothing.

``current``    A row replaces the one of the same key that has a smaller version (`rows`), so it
               can be inserted any number of times. A delete is a row that is marked deleted. A
               truncate marks all rows deleted that the table has, in place of TRUNCATE, which would
               also remove rows that were inserted after it was sent.
``changelog``  Before a commit is added, the table is asked for rows of this version or greater
               ones. There are none unless this commit, or a later one, was delivered already; then
               rows with the event ids of those are left out. Each INSERT has a deduplication token,
               which stops one that a killed run has sent and that arrives late.
"""

# ruff: noqa: S608 - names and texts in queries are quoted

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from deltaforge_dagster.errors import PermissionMissing, SinkUnavailable, TableRejected
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.clickhouse.client import ClickhouseClient, literal, quoted
from deltaforge_dagster.sinks.clickhouse.rows import (
    RowMaker,
    VersionMaker,
    VersionSpan,
    has_version,
    insert_batches,
    is_partial,
    place_schema,
    segment_place,
)
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig
from deltaforge_dagster.sinks.clickhouse.staging import Inserts, Staging
from deltaforge_dagster.sinks.clickhouse.target import (
    DELETED,
    EVENT,
    OP,
    TIME,
    VERSION,
    ClickhouseTarget,
    FoundTable,
    TableMark,
    reserved,
    table_label,
)
from deltaforge_dagster.sinks.tables.staged import StagedStep, StagedTable, staged_batches
from deltaforge_dagster.sinks.tables.writer import TableOwner, WrittenTable, check_names, table_gone

_POSITION_BITS = 64


@dataclass(slots=True)
class ClickhouseWriter:
    """Writes the tables of a sink; implements `TableWriter`.

    Args:
        config: The sink.
        owner: Who writes.
    """

    config: ClickhouseSinkConfig
    owner: TableOwner
    _client: ClickhouseClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = ClickhouseClient(self.config, self.config.send_timeout_secs)

    def commit(
        self,
        table: StagedTable,
        through: int,  # noqa: ARG002 - the rows' versions tell commits apart
        guard: SendGuard,
        *,
        exists: bool = False,
    ) -> WrittenTable:
        """Apply the changes of a table, unless it has them; see `TableWriter.commit`.

        Raises:
            TableRejected: The table cannot take the changes.
            AuthFailed: The server refuses the user or the password.
            SinkUnavailable: The server cannot be reached, or refuses for now.
        """
        target = self._target(table, guard)
        try:
            return _TableCommit(target, self.config).apply(exists=exists)
        except PermissionMissing as error:
            raise TableRejected(str(error)) from None
        finally:
            self._client.close()  # servers end connections that are idle

    def recreate(self, table: StagedTable, guard: SendGuard) -> Sequence[tuple[str, str]]:
        """Replace a table by one without rows; see `TableWriter.recreate`.

        If the sink may not make tables, the table is only emptied.
        """
        target = self._target(table, guard)
        try:
            existing = target.find()
            if existing is not None:
                target.check_owned(existing)
            if target.makes:
                target.create(replace=existing is not None)
            elif existing is not None:
                target.execute(f"TRUNCATE TABLE {target.name}")
            else:
                raise TableRejected(f"{target.label} does not exist, and `auto_create` is false")
            created = target.find()
            return [] if created is None else list(created.columns.items())
        except PermissionMissing as error:
            raise TableRejected(str(error)) from None
        finally:
            self._client.close()

    def close(self) -> None:
        """Disconnect, and end what another thread waits for."""
        self._client.end()

    def _target(self, table: StagedTable, guard: SendGuard) -> ClickhouseTarget:
        config = self.config
        label = table_label(self.owner, table.destination)
        names = (column.name for column in table.columns.columns)
        check_names(names, label, reserved(config.mode))
        return ClickhouseTarget(
            self._client, self.owner, table, config.mode, config.auto_create, guard
        )


@dataclass(slots=True)
class _TableCommit:
    """A commit to one table."""

    target: ClickhouseTarget
    config: ClickhouseSinkConfig
    _rows: RowMaker = field(init=False)
    _versions: VersionMaker = field(init=False)
    _inserts: Inserts = field(init=False)
    _floor: int = field(default=0, init=False)

    def apply(self, *, exists: bool) -> WrittenTable:
        target, table = self.target, self.target.table
        by_time = self.config.version_source == "ts_ms"
        places = {number: segment_place(segment) for number, segment in table.segments.items()}
        self._versions = VersionMaker(places, by_time)
        self._inserts = Inserts(target)
        if self._versions.unknown:
            raise TableRejected(
                f"{target.label}: the positions of this source have no numbers to make versions "
                "of; set `version_source: ts_ms`"
            )
        span = self._span()
        existing, mark = self._find_or_create(exists=exists)
        changelog = self.config.mode == "changelog"
        self._floor = self._versions.floor(span) if changelog else span.first
        newest = self._newest()
        if newest is not None and not by_time:
            self._check_log(newest, span, mark, exists=exists)
        existing = target.rename(existing, mark)
        existing = target.claim(existing)
        types = target.fit(existing)
        target.claim(replace(existing, columns=types))  # what identifies those that were added
        self._rows = RowMaker(target.label, table, self.config.mode, types, self._versions)
        if changelog:
            for step in table.steps:
                self._append(step, again=newest is not None)
            if newest is None and not exists:
                self._check_appended(span)
        else:
            current = CurrentRows(target, self._rows)
            for step in table.steps:
                current.apply(step)
        return WrittenTable(list(types.items()), target.figures())

    def _find_or_create(self, *, exists: bool) -> tuple[FoundTable, TableMark | None]:
        """Return the table, created if it did not exist, and the mark that it had before."""
        target = self.target
        existing = target.find()
        if existing is not None:
            mark = target.check_owned(existing)
            if exists and mark is None and target.makes:
                raise table_gone(target.label, target.resync_command)
            return existing, mark
        if exists:
            raise table_gone(target.label, target.resync_command)
        if not target.makes:
            raise TableRejected(
                f"{target.label} does not exist, and `auto_create` is false: create it"
            )
        target.create()
        existing = target.find()
        if existing is None:
            raise SinkUnavailable(f"{target.label} was created and is not there; try again")
        return existing, None

    def _span(self) -> VersionSpan:
        """Return the smallest and the greatest version of the changes."""
        span = VersionSpan()
        for step in self.target.table.steps:
            if step.kind == "truncate":
                span.add(self._versions.version(step.last, step.event_time_us))
            for batch in staged_batches(step, place_schema()):
                span.add_all(self._versions.versions(batch))
        return span

    def _newest(self) -> int | None:
        """Return the greatest version that the table has.

        Return None if that is below all that the commit can have had.
        """
        rows = self.target.client.rows(
            self.target.label,
            f"SELECT toString(max({VERSION})) AS newest, count() > 0 AS known"
            f" FROM {self.target.name} WHERE {VERSION} >= {_number(self._floor)}",
        )
        return int(rows[0]["newest"]) if rows[0]["known"] else None

    def _check_log(
        self, newest: int, span: VersionSpan, mark: TableMark | None, *, exists: bool
    ) -> None:
        """Check that later changes have greater versions than what the table has.

        A commit that is delivered again has smaller versions, and changes nothing. But if the table
        has everything before the commit, if the positions are of another server, or if a new series
        of commits begins with a snapshot, then the commit is not a repeated one: the source's
        positions have started over, and the new rows would lose against older ones.

        Raises:
            TableRejected: The source's positions have started over.
        """
        table, owner = self.target.table, self.target.owner
        other_log = mark is not None and bool(mark.log) and mark.log != owner.log
        begins = (
            mark is not None and mark.uid != owner.uid and any(step.reads for step in table.steps)
        )
        backwards = newest >> _POSITION_BITS > span.first >> _POSITION_BITS
        if backwards and (exists or other_log or begins) and not self._has_version(newest):
            raise TableRejected(
                f"{self.target.label} has rows of a later position in the source's log than "
                "changes that follow them: the log has begun again, as on another server after a "
                "failover. Have the table loaded again",
                remedy=self.target.resync_command,
            )

    def _has_version(self, version: int) -> bool:
        """Return whether one of the commit's changes has this version."""
        for step in self.target.table.steps:
            if step.kind == "truncate":
                if self._versions.version(step.last, step.event_time_us) == version:
                    return True
                continue
            for batch in staged_batches(step, place_schema()):
                if has_version(self._versions.versions(batch), version):
                    return True
        return False

    def _append(self, step: StagedStep, *, again: bool) -> None:
        """Add the changes of a step to a changelog.

        Args:
            step: The changes.
            again: Whether the table may have some of them; those are left out.
        """
        schema = self._rows.staged_schema(rekey=False)
        for part in insert_batches(map(self._rows.made, staged_batches(step, schema))):
            if again:
                self._insert_new(part)
                continue
            first = int.from_bytes(part.column(VERSION)[0].as_py(), "little")
            token = f"{self.target.owner.name}:{first}:{part.num_rows}"
            self._inserts.insert(self.target.name, part, token)

    def _insert_new(self, part: pa.Table) -> None:
        """Insert those changes whose event ids the table does not have."""
        types = self._rows.types
        names = part.schema.names
        structure = ", ".join(f"{quoted(name)} {types[name]}" for name in names)
        columns = ", ".join(map(quoted, names))
        query = (
            f"INSERT INTO {self.target.name} ({columns})"
            f" SELECT {columns} FROM input({literal(structure)})"
            f" WHERE {EVENT} NOT IN (SELECT {EVENT} FROM {self.target.name}"
            f" WHERE {VERSION} >= {_number(self._floor)}) FORMAT ArrowStream"
        )
        self._inserts.send(query, part)

    def _check_appended(self, span: VersionSpan) -> None:
        """Check that ClickHouse skipped no INSERT as a repeated one whose rows were deleted since.

        Raises:
            TableRejected: It skipped one.
        """
        rows = sum(step.rows for step in self.target.table.steps)
        counted = self.target.client.rows(
            self.target.label,
            f"SELECT toString(count()) AS rows FROM {self.target.name}"
            f" WHERE {VERSION} BETWEEN {_number(span.first)} AND {_number(span.last)}",
        )
        if int(counted[0]["rows"]) < rows:
            raise TableRejected(
                f"{self.target.label} has had changes that were deleted from it, and ClickHouse "
                "does not add them again while it remembers their INSERT; "
                "have the table loaded again",
                remedy=self.target.resync_command,
            )


@dataclass(frozen=True, slots=True)
class CurrentRows:
    """Applies steps to a table of current rows.

    Args:
        target: The table.
        rows: Makes its rows.
    """

    target: ClickhouseTarget
    rows: RowMaker

    def apply(self, step: StagedStep) -> None:
        """Apply a step."""
        if step.kind == "truncate":
            self._truncate(step)
        elif step.kind == "rekey":
            schema = self.rows.staged_schema(rekey=True)
            batches = staged_batches(step, schema)
            self._complete((self.rows.made(batch, partial=True) for batch in batches), rekey=True)
        else:
            self._replace(step)

    def _replace(self, step: StagedStep) -> None:
        """Insert rows, and then those that lack values."""
        schema = self.rows.staged_schema(rekey=False)
        lacking = False

        def whole() -> Iterator[pa.RecordBatch]:
            nonlocal lacking
            for batch in staged_batches(step, schema):
                mask = is_partial(batch)
                lacking |= bool(mask.any())
                yield self.rows.made(batch.filter(pa.array(~mask)) if mask.any() else batch)

        for part in insert_batches(whole()):
            Inserts(self.target).insert(self.target.name, part)
        if lacking:
            rows = (
                batch.filter(pa.array(is_partial(batch))) for batch in staged_batches(step, schema)
            )
            self._complete((self.rows.made(batch, partial=True) for batch in rows), rekey=False)

    def _complete(self, rows: Iterable[pa.RecordBatch], *, rekey: bool) -> None:
        """Insert rows that lack values."""
        staging = Staging(self.target, self.rows.types, rekey)
        staging.begin()
        for part in insert_batches(rows):
            staging.add(part)
        staging.finish()

    def _truncate(self, step: StagedStep) -> None:
        version = _number(self.rows.versions.version(step.last, step.event_time_us))
        keys = ", ".join(map(quoted, self.target.table.key))
        time = f"fromUnixTimestamp64Micro(toInt64({step.event_time_us}), 'UTC')"
        Inserts(self.target).execute(
            f"INSERT INTO {self.target.name} ({keys}, {OP}, {VERSION}, {DELETED}, {TIME})"
            f" SELECT {keys}, 't', {version}, 1, {time} FROM {self.target.name} FINAL"
            f" WHERE {DELETED} = 0 AND {VERSION} < {version}"
        )


def _number(version: int) -> str:
    return f"toUInt128('{version}')"
