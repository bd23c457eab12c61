"""Why a table of a sink cannot be compared with the source."""

from __future__ import annotations

from collections.abc import Iterator

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.snapshot import SnapshotSource
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import Destination
from deltaforge_dagster.tables import TableSchema


def obstacle(
    store: StateStore,
    spec: PipelineSpec,
    config: TableSinkConfig,
    source: Source,
    table: TableSchema,
) -> str | None:
    """Return why a table cannot be compared now, in one sentence; None if it can.

    Args:
        store: The state store.
        spec: The pipeline.
        config: The sink.
        source: The pipeline's source.
        table: The newest version of the source's table.
    """
    reasons = (_of_file(spec, config, source, table), _of_state(store, spec, config, table))
    return next((reason for found in reasons for reason in found), None)


def _of_file(
    spec: PipelineSpec, config: TableSinkConfig, source: Source, table: TableSchema
) -> Iterator[str]:
    """Yield what the pipeline file decides: the table does not have what the source's rows say."""
    if not isinstance(source, SnapshotSource):
        yield f"sources of type {spec.spec.source.type} are not read in snapshots"
    if config.mode == "changelog":
        yield "the sink's mode is changelog: the table has every change, not the source's rows"
    if spec.spec.processors:
        kinds = ", ".join(sorted({processor.type for processor in spec.spec.processors}))
        yield (
            f"the pipeline has processors ({kinds}): they decide change by change, so the "
            "source's rows do not say what the table should have"
        )
    if config.filter is not None or set(config.skipped_operations) - {"r"}:
        yield "the sink leaves out changes (filter, skipped_operations)"
    if not table.primary_key:
        yield "it has no primary key"
    declared = config.keys_of(table.db, table.schema, table.table)
    if declared is not None and set(declared) != set(table.primary_key):
        yield "the sink's key of it (keys) is not its primary key"


def _of_state(
    store: StateStore, spec: PipelineSpec, config: TableSinkConfig, table: TableSchema
) -> Iterator[str]:
    """Yield what may be over later."""
    pipeline, name = spec.metadata.name, table.full_name
    checkpoint = store.checkpoints.read(pipeline).get(config.id)
    commits = store.table_commits.read(pipeline, config.id)
    if checkpoint is None or commits is None:
        yield "the sink has delivered nothing yet"
        return
    if checkpoint.state != "attached":
        yield f"the sink is {checkpoint.state}"
    if any(
        hold.subject == name and hold.state != "journaled" for hold in store.holds.read(pipeline)
    ):
        yield f"changes of it are held (deltaforge hold list {pipeline})"
    destination: Destination = config.name_of(table.db, table.schema, table.table)
    resyncs = {resync.destination for resync in store.table_commits.resyncs(pipeline, config.id)}
    suspended = commits.suspended.get(destination)
    if destination in resyncs or (suspended is not None and suspended.recreate):
        yield "it is being loaded again"
    elif suspended is not None:
        yield f"the sink cannot write it: {suspended.error}"
    snapshot = store.snapshots.unfinished(pipeline)
    if (
        snapshot is not None
        and name in (snapshot.tables or [name])
        and config.id in (snapshot.sinks or [config.id])
    ):
        yield f"snapshot {snapshot.snapshot} of it is not finished"
