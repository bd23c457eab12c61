"""The asset of a pipeline's table versions: one partition is one table.

A run or a tick writes a materialization for each new version (`publish_versions`), with its columns
as Dagster's column schema. Materializing a table in the UI approves its newest version, if that
waits for approval (`engine.schemas.on_schema_change: pause_table`).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from deltaforge_dagster.assets.descriptions import schemas_spec
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    dagster_name,
    schemas_key,
    table_of,
    table_partition,
    tables_name,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.resources.platform import Platform

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.schemas.views import SchemaDifference
    from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
    from deltaforge_dagster.state.store import StateStore

_SEQUENCE = "sequence"
_DATA_VERSION = "dagster/data_version"


def build_schemas_asset(loaded: LoadedPipeline, platform: Platform) -> dg.AssetsDefinition:
    """Return the asset of a pipeline's table versions."""

    @dg.multi_asset(
        name=f"{dagster_name(loaded.name)}_tables",
        specs=[schemas_spec(loaded)],
        partitions_def=dg.DynamicPartitionsDefinition(name=tables_name(loaded.name)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,  # else Dagster would write its own materialization at the end
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        try:
            with platform.open() as opened:
                _approve(context, opened.store, loaded.name)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield from ()

    return tables


def publish_versions(
    instance: dg.DagsterInstance,
    store: "StateStore",
    pipeline: str,
    emit: Callable[[dg.AssetMaterialization], None],
) -> int:
    """Write a materialization of each version that has none; return how many were written.

    The event is written first, then the version is marked as published; if the event is already
    there, only the mark is written.
    """
    written = 0
    for history, version in store.schemas.unpublished(pipeline):
        partition = table_partition(history.name)
        instance.add_dynamic_partitions(tables_name(pipeline), [partition])
        if not _is_recorded(instance, pipeline, partition, version):
            emit(materialization(pipeline, history, version))
            written += 1
        store.schemas.mark_published(pipeline, version)
    return written


def materialization(
    pipeline: str, history: "TableHistory", version: "SchemaVersion", approved: int | None = None
) -> dg.AssetMaterialization:
    """Return the event of a table's version.

    Args:
        pipeline: The pipeline.
        history: The versions of the table.
        version: The version.
        approved: How many waiting changes were released if it was approved just now, else None.
    """
    from deltaforge_dagster.pipeline.schemas.views import changes_of  # noqa: PLC0415 - see below

    table, stamp = version.table, version.stamp
    changes = changes_of(history, version)
    metadata: dict[str, Any] = {
        "dagster/column_schema": column_schema(version, changes),
        "version": stamp.version,
        _SEQUENCE: stamp.sequence,
        "fingerprint": stamp.fingerprint,
        "columns": len(table.columns),
        "primary_key": ", ".join(table.primary_key) or "none",
        "since": version.position,
        "first_seen": dg.MetadataValue.timestamp(version.registered_at),
        "waits_for_approval": stamp.sequence in history.pending,
    }
    if changes:
        lines = [f"- `{str(change).replace('`', '')}`" for change in changes]
        metadata["changes"] = dg.MetadataValue.md("\n".join(lines))
    if approved is not None:
        metadata["approved_changes"] = approved
    return dg.AssetMaterialization(
        schemas_key(pipeline),
        partition=table_partition(history.name),
        description=f"{history.name}, version {stamp.version}",
        metadata=metadata,
        tags={_DATA_VERSION: stamp.fingerprint},
    )


def column_schema(version: "SchemaVersion", changes: "list[SchemaDifference]") -> dg.TableSchema:
    """Return the columns of a version as Dagster's column schema, with what it changed in each."""
    # In words, because Dagster renders a description as Markdown, where a `+` begins a list.
    notes = {
        change.name: f"{change.kind}; was {change.before}"
        for change in changes
        if change.kind == "changed"
    }
    notes |= {change.name: "added" for change in changes if change.kind == "added"}
    table = version.table
    return dg.TableSchema(
        [
            dg.TableColumn(
                column.name,
                column.data_type or "unknown",
                description=notes.get(column.name),
                constraints=dg.TableColumnConstraints(
                    nullable=column.nullable,
                    other=["primary key"] if column.name in table.primary_key else [],
                ),
            )
            for column in table.columns
        ]
    )


def _approve(context: dg.AssetExecutionContext, store: "StateStore", pipeline: str) -> None:
    """Approve the chosen tables, and log a materialization of their current versions."""
    # Imported here, because every load of a code location pays for what definitions import.
    from deltaforge_dagster.pipeline.schemas.views import waiting_tables  # noqa: PLC0415

    if not (context.has_partition_key or context.has_partition_key_range):
        raise NotAllowed(f"{pipeline}: choose the tables whose newest form to approve")
    waiting = set(waiting_tables(store, pipeline))
    for partition in context.partition_keys:
        name = table_of(partition)
        approved = store.holds.approve_table(pipeline, name) if name in waiting else None
        history = store.schemas.history(pipeline, name)
        shown = history.current if approved is None else history.newest
        context.log_event(materialization(pipeline, history, shown, approved))
        if approved is None:
            context.log.info("%s: nothing waits for approval", name)
        else:
            context.log.info("%s: approved; the next run delivers %s changes", name, approved)


def _is_recorded(
    instance: dg.DagsterInstance, pipeline: str, partition: str, version: "SchemaVersion"
) -> bool:
    page = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=schemas_key(pipeline), asset_partitions=[partition]),
        limit=1,
    )
    event = page.records[0].asset_materialization if page.records else None
    if event is None or "fingerprint" not in event.metadata:
        return False
    shown = event.metadata[_SEQUENCE].value, event.metadata["fingerprint"].value
    return shown == (version.stamp.sequence, version.stamp.fingerprint)
