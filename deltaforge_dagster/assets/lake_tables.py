"""The assets of lake tables: the tables in which a sink keeps each table of the source.

Spark writes the tables, so Dagster cannot materialize them; a run or a tick reports the commits
that have reached a table (`publish_writes`). A table may get a commit every second, so the commits
of a minute are one event: a materialization, or an observation if `engine.dagster.events` says so,
on which nothing waits. The data version is the position that the table has reached, so that
assets which depend on a table can be materialized whenever it has new data. Its rows come from a
table of the source, which is an asset as well.

The event of a commit has the lineage of those columns for which it is certain. A column is the
source's column of the same name, unless a rule or a processor makes something else of it. So there
is no lineage of columns that a rule masks or a processor computes, and none at all behind a
processor whose effect on rows is not known from the pipeline file, such as a script.

Dagster shows a table that the pipeline file names from the first load on, and one that matches a
pattern once definitions are loaded after its first change. No load connects to the source.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dagster as dg

from deltaforge_dagster.assets.descriptions import lake_table_spec, source_table_spec
from deltaforge_dagster.assets.maintenance import maintained_sinks
from deltaforge_dagster.assets.names import lake_table_key, maintenance_key, source_table_key
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.config.model import Spec
from deltaforge_dagster.config.processors import FilterProcessor, SqlProcessor
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.errors import DeltaforgeError, SourceMisconfigured
from deltaforge_dagster.resources.platform import AnySettings, existing_store
from deltaforge_dagster.sinks.registry import TableSinkType, sink_types
from deltaforge_dagster.sources.registry import parse_position, source_types
from deltaforge_dagster.sources.rows.columns import MASK, ColumnRules
from deltaforge_dagster.tables import TableSchema

if TYPE_CHECKING:
    from deltaforge_dagster.state.schemas import TableHistory
    from deltaforge_dagster.state.store import StateStore
    from deltaforge_dagster.state.table_commits import StoredWrite, TableFigures, TableWrite

EVENT_SECONDS = 60.0
"""At most one event of a table is written in so many seconds."""

_DATA_VERSION = "dagster/data_version"
_ROWS = "dagster/row_count"
_COLUMN_SCHEMA = "dagster/column_schema"
_COLUMN_LINEAGE = "dagster/column_lineage"


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table in which a sink keeps a table of the source, written or not.

    Attributes:
        sink: The sink.
        source: Schema (the database if there are no schemas) and name of the source's table.
        destination: Name of the sink's table; None before the first commit.
        columns: Its columns; None before the first commit.
    """

    sink: str
    source: tuple[str, str]
    destination: Sequence[str] | None = None
    columns: dg.TableSchema | None = None

    @property
    def name(self) -> str:
        """Full name of the source's table."""
        return ".".join(self.source)


def known_tables(
    settings: AnySettings, pipelines: Iterable[LoadedPipeline]
) -> Mapping[str, Sequence[KnownTable]]:
    """Return the tables of each pipeline that writes tables, as far as file and state store tell.

    While the state store cannot be read, they are those that the files name.
    """
    writing = [loaded for loaded in pipelines if _table_sinks(loaded)]
    if not writing:
        return {}
    with suppress(DeltaforgeError), existing_store(settings) as store:
        return {loaded.name: _known(loaded, store) for loaded in writing}
    return {loaded.name: _known(loaded, None) for loaded in writing}


def _known(loaded: LoadedPipeline, store: StateStore | None) -> Sequence[KnownTable]:
    """Return the tables that are named in the file, captured, or written."""
    sources, patterns = _captured(loaded)
    if patterns and store is not None:
        captured = [(Globs([schema]), Globs([table])) for schema, table in patterns]
        histories = store.schemas.histories(loaded.name)
        sources += [
            (schema, version.table)
            for version in (history.newest.table for history in histories)
            for schema in [version.schema or version.db]
            if any(of.match([schema]) and tables.match([version.table]) for of, tables in captured)
        ]
    sinks = _table_sinks(loaded)
    known = {(sink, source): KnownTable(sink, source) for sink in sinks for source in sources}
    for written in () if store is None else store.table_commits.tables(loaded.name):
        sink, write = written.sink, written.write
        if sink in sinks:
            columns = column_schema(written)
            known[sink, write.source] = KnownTable(sink, write.source, write.destination, columns)
    return [known[key] for key in sorted(known)]


def _captured(
    loaded: LoadedPipeline,
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return schema and name of the tables that the file names, and of the patterns in it."""
    source = loaded.spec.spec.source
    kind = source_types()[source.type]
    variables = [kind.table_variables(pattern) for pattern in source.config.tables] or [{}]
    pairs = [
        (
            values.get("source.schema", values.get("source.db", "*")),
            values.get("source.table", "*"),
        )
        for values in variables
    ]
    patterns = [pair for pair in pairs if any({"*", "%"} & {*name} for name in pair)]
    return [pair for pair in pairs if pair not in patterns], patterns


def lake_table_specs(loaded: LoadedPipeline, tables: Iterable[KnownTable]) -> list[dg.AssetSpec]:
    """Return the specs of tables of a pipeline's sinks, and of the source's from which rows come.

    Args:
        loaded: The pipeline.
        tables: Its tables.
    """
    sinks = _table_sinks(loaded)
    shown = [table for table in tables if table.sink in sinks]
    return [
        *(
            source_table_spec(loaded, source)
            for source in sorted({table.source for table in shown})
        ),
        *(
            lake_table_spec(
                loaded, sinks[table.sink], table.source, table.destination, table.columns
            )
            for table in shown
        ),
    ]


def _table_sinks(loaded: LoadedPipeline) -> Mapping[str, SinkBlock]:
    """Return the sinks that write tables, by id."""
    kinds = sink_types()
    return {
        sink.config.id: sink
        for sink in loaded.spec.spec.sinks
        if isinstance(kinds[sink.type], TableSinkType)
    }


def column_schema(stored: StoredWrite) -> dg.TableSchema:
    """Return the columns of a table as Dagster's column schema."""
    return dg.TableSchema([dg.TableColumn(*column) for column in stored.write.columns])


def publish_writes(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    emit: Callable[[dg.AssetMaterialization | dg.AssetObservation], None],
) -> int:
    """Report the commits to tables that are not reported yet; return how many events were written.

    All of them to one table are one event. A table whose newest event is younger than
    `EVENT_SECONDS` waits for a later call. The event is written first, then its commits are marked
    as published; if the event is already there, only the marks are written.
    """
    writes = store.table_commits.unpublished(loaded.name)
    histories = (
        {history.name: history for history in store.schemas.histories(loaded.name)}
        if writes
        else {}
    )
    observes = loaded.spec.spec.engine.dagster.events == "observations"
    unreported: defaultdict[dg.AssetKey, list[StoredWrite]] = defaultdict(list)
    for stored in writes:
        unreported[lake_table_key(loaded.name, stored.sink, stored.write.source)].append(stored)
    written = 0
    for key, commits in unreported.items():
        newest = _newest_event(instance, key, observes=observes)
        reported = 0 if newest is None else _reported(newest, commits)
        if reported:
            store.table_commits.mark_published(loaded.name, commits[reported - 1])
        if reported == len(commits):
            continue
        if newest is not None and 0 <= time.time() - newest.timestamp < EVENT_SECONDS:
            continue
        commit = _joined(commits[reported:])
        history = histories.get(".".join(commit.write.source))
        event = materialization(loaded, commit, history)
        emit(_observation(event) if observes else event)
        written += 1
        store.table_commits.mark_published(loaded.name, commit)
    for sink, maintenance in maintained_sinks(loaded).items():
        key = maintenance_key(loaded.name, sink)
        if any(
            stored.sink == sink for stored in writes
        ) and not instance.get_latest_materialization_event(key):
            # Without an event the UI counts the asset as missing until its schedule first runs.
            metadata = {"maintenance": "not due yet", "schedule": maintenance.schedule}
            emit(dg.AssetMaterialization(key, metadata=metadata))
    return written


def materialization(
    loaded: LoadedPipeline, stored: StoredWrite, history: TableHistory | None
) -> dg.AssetMaterialization:
    """Return the event of a commit, or of consecutive ones joined, that has reached a table.

    Args:
        loaded: The pipeline.
        stored: The commit.
        history: The versions of the source's table, None if it has none.
    """
    write = stored.write
    name = ".".join(write.destination)
    lineage = None if history is None else column_lineage(loaded, history, write)
    return dg.AssetMaterialization(
        lake_table_key(loaded.name, stored.sink, write.source),
        description=f"{name} has everything up to segment {stored.segment}",
        metadata={
            "lag_seconds": round(max(0.0, stored.written_at - write.changed_at), 3),
            "changes": write.changes,
            **_figures(write.figures),
            "table": name,
            "segment": str(stored.segment),
            "position": write.position,
            "written_at": dg.MetadataValue.timestamp(stored.written_at),
            _COLUMN_SCHEMA: column_schema(stored),
            **({} if lineage is None else {_COLUMN_LINEAGE: lineage}),
        },
        # Segments of a snapshot have the same position in the source.
        tags=_data_version(stored),
    )


def _data_version(stored: StoredWrite) -> dict[str, str]:
    return {_DATA_VERSION: f"{stored.segment}:{stored.write.position}"}


def _figures(figures: TableFigures | None) -> dict[str, int | str]:
    """Return what a table consists of, as far as its format or database knows, as metadata."""
    if figures is None:
        return {}
    # As text, because JavaScript programs would round the id of a snapshot.
    version = None if figures.version is None else str(figures.version)
    counts = {"version": version, "files": figures.files, "bytes": figures.bytes}
    counts[_ROWS] = figures.rows
    if figures.estimated:
        counts["rows_and_bytes"] = "estimated by the database"
    return {name: count for name, count in counts.items() if count is not None}


def _observation(event: dg.AssetMaterialization) -> dg.AssetObservation:
    """Return an observation with what a materialization has."""
    return dg.AssetObservation(
        event.asset_key, description=event.description, metadata=event.metadata, tags=event.tags
    )


def _newest_event(
    instance: dg.DagsterInstance, table: dg.AssetKey, *, observes: bool
) -> dg.EventLogRecord | None:
    fetch = instance.fetch_observations if observes else instance.fetch_materializations
    page = fetch(table, limit=1)
    return page.records[0] if page.records else None


def _reported(newest: dg.EventLogRecord, commits: Sequence[StoredWrite]) -> int:
    """Return how many of these commits, the first ones, the newest event of their table covers.

    These are there if a publisher was killed between the event and its mark.
    """
    event = newest.asset_materialization or newest.asset_observation
    version = None if event is None else event.tags
    covered = (n for n, commit in enumerate(commits, 1) if _data_version(commit) == version)
    return next(covered, 0)


def _joined(commits: Sequence[StoredWrite]) -> StoredWrite:
    """Return the last of these commits to one table, with the changes of all."""
    changes = sum(commit.write.changes for commit in commits)
    return replace(commits[-1], write=replace(commits[-1].write, changes=changes))


def column_lineage(
    loaded: LoadedPipeline, history: TableHistory, write: TableWrite
) -> dg.TableColumnLineage | None:
    """Return the lineage of a lake table's columns after a commit, None if nothing is certain.

    Columns that the source's table did not have at the end of the commit have none.

    Args:
        loaded: The pipeline.
        history: The versions of the source's table.
        write: The commit.
    """
    version = history.at_position(parse_position(write.position))
    computed = _computed(loaded.spec.spec)
    if version is None or computed is None:
        return None
    masked = _masked(loaded.spec.spec, version.table)
    if masked is None:
        return None
    # Spark compares names without case, so a table may have kept an earlier spelling.
    names = {column.name.lower(): column.name for column in version.table.columns}
    certain = {name: names[name] for name in names.keys() - computed - masked}
    source = source_table_key(loaded.name, loaded.spec.spec.source.config.id, write.source)
    dependencies = {
        name: [dg.TableColumnDep(source, certain[name.lower()])]
        for name, _ in write.columns
        if name.lower() in certain
    }
    return dg.TableColumnLineage(dependencies) if dependencies else None


def _computed(spec: Spec) -> set[str] | None:
    """Return the lower-case names of the columns that processors compute; None if any may be."""
    computed: set[str] = set()
    for processor in spec.processors:
        if isinstance(processor, SqlProcessor):
            computed |= {target.partition(".")[2].lower() for target in processor.set}
        elif not isinstance(processor, FilterProcessor):
            return None
    return computed


def _masked(spec: Spec, table: TableSchema) -> set[str] | None:
    """Return the lower-case names of the columns that rules mask; None if rules do not fit."""
    try:
        rules = ColumnRules(spec.engine.columns).of(table)
    except SourceMisconfigured:
        return None
    ruled = zip(table.columns, rules or (), strict=False)
    return {column.name.lower() for column, rule in ruled if rule.action == MASK}
