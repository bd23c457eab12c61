"""Deletes history that Dagster's storage would keep forever: runs, ticks, events without a run.

Dagster can delete runs and purges ticks after days, but it keeps events that were reported without
a run, every evaluation of a check, and the output of deleted runs. The newest event of each kind
stays, because the UI shows it.

Dagster has no function to delete events without a run, so they are deleted directly from its
tables, in the way in which its storage deletes those of a run
(`SqlEventLogStorage.delete_events_for_run`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import sqlalchemy as sa

from deltaforge_dagster.assets.names import keys_of
from deltaforge_dagster.dagster_private import RUNLESS_RUN_ID
from deltaforge_dagster.dagster_private.storage import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    SqlEventLogStorage,
    SqlEventLogStorageTable,
    SqliteEventLogStorage,
    TickStatus,
)

SKIPPED_SECONDS = 3600.0
"""How long a skipped tick is kept: with fifty pipelines there are twenty ticks per second."""

TICK_SECONDS = 7 * 86400.0
"""How long any other tick is kept."""

KEPT_EVALUATIONS = 500
"""Maximum number of evaluations that are kept of a check.

Dagster reads all of them at each tick to find the newest.
"""

_MATERIALIZATION = dg.DagsterEventType.ASSET_MATERIALIZATION.value
_FORGOTTEN = (_MATERIALIZATION, dg.DagsterEventType.ASSET_OBSERVATION.value)

_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


def forget_assets(instance: dg.DagsterInstance, pipelines: Iterable[str]) -> int:
    """Delete Dagster's records of the assets of removed pipelines.

    Otherwise its Catalog would list these assets forever.

    Returns:
        The number of assets.
    """
    gone = [key for name in pipelines for key in keys_of(name, instance.get_asset_keys([name]))]
    if gone:
        instance.wipe_assets(gone)
    return len(gone)


def delete_runs(
    instance: dg.DagsterInstance,
    before: datetime,
    limit: int,
    *,
    tags: Mapping[str, str] | None = None,
    job: str | None = None,
) -> int:
    """Delete ended runs with their events and output, oldest first; return how many were deleted.

    Args:
        instance: The Dagster instance.
        before: Runs that were updated later are kept.
        limit: The maximum number of runs to delete.
        tags: Delete only runs with these tags.
        job: Delete only runs of this job.
    """
    ended = dg.RunsFilter(tags=tags, job_name=job, statuses=_ENDED, updated_before=before)
    records = instance.get_run_records(ended, limit=limit, ascending=True)
    for record in records:
        run_id = record.dagster_run.run_id
        # The record last, but for the file, which deleting it would make again: a crash in between
        # leaves the run to the next turn.
        instance.compute_log_manager.delete_logs(prefix=[run_id])
        instance.delete_run(run_id)
        storage = instance.event_log_storage
        if isinstance(storage, SqliteEventLogStorage):  # a file for each run
            Path(storage.path_for_shard(run_id)).unlink(missing_ok=True)
    return len(records)


def forget_ticks(instance: dg.DagsterInstance, names: Collection[str]) -> None:
    """Delete old ticks of these sensors and schedules."""
    now = time.time()
    for state in instance.all_instigator_state():
        if state.instigator_name not in names:
            continue
        for seconds, statuses in (
            (SKIPPED_SECONDS, [TickStatus.SKIPPED]),
            (TICK_SECONDS, [TickStatus.SUCCESS, TickStatus.FAILURE]),
        ):
            instance.purge_ticks(
                state.instigator_origin_id, state.selector_id, now - seconds, statuses
            )


def forget_events(
    instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey], partition: str, before: float
) -> int:
    """Delete old events of assets that were reported without a run, and old check evaluations.

    Args:
        instance: The Dagster instance.
        assets: The assets; the newest event of each is kept.
        partition: Materializations and observations of earlier partitions, and those without a
            partition, are deleted.
        before: Evaluations of checks before this time are deleted, except the newest one of each
            check. Of the later ones, at most `KEPT_EVALUATIONS` of each check are kept.

    Returns:
        How many materializations and observations were deleted.
    """
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return 0
    gone = 0
    for asset in (key.to_string() for key in assets):
        with storage.index_connection() as connection:
            gone += sum(_forget(connection, asset, kind, partition) for kind in _FORGOTTEN)
            _forget_evaluations(connection, asset, datetime.fromtimestamp(before, UTC))
        if isinstance(storage, SqliteEventLogStorage):  # SQLite stores them twice
            with storage.run_connection(RUNLESS_RUN_ID) as connection:
                for kind in _FORGOTTEN:
                    _forget(connection, asset, kind, partition)
    return gone


def forget_partitions(
    instance: dg.DagsterInstance, asset: dg.AssetKey, kept: Collection[str]
) -> int:
    """Delete an asset's events without a run, except the newest of each of these partitions.

    Returns:
        How many were deleted.
    """
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return 0
    with storage.index_connection() as connection:
        gone = _forget_partitions(connection, asset.to_string(), kept)
    if isinstance(storage, SqliteEventLogStorage):  # SQLite stores them twice
        with storage.run_connection(RUNLESS_RUN_ID) as connection:
            _forget_partitions(connection, asset.to_string(), kept)
    return gone


def _forget_partitions(connection: sa.Connection, asset: str, kept: Collection[str]) -> int:
    events = SqlEventLogStorageTable.c
    of_asset = (events.asset_key == asset) & (events.dagster_event_type == _MATERIALIZATION)
    of_asset &= events.run_id == RUNLESS_RUN_ID
    newest = sa.select(sa.func.max(events.id)).where(of_asset).group_by(events.partition)
    gone = _delete_events(connection, of_asset & events.id.not_in(newest))
    partitions = sa.select(events.partition).where(of_asset).distinct()
    for partition in connection.execute(partitions).scalars().all():
        if partition not in kept:
            gone += _delete_events(connection, of_asset & (events.partition == partition))
    return gone


def _delete_events(connection: sa.Connection, where: sa.ColumnElement[bool]) -> int:
    tagged = sa.select(SqlEventLogStorageTable.c.id).where(where)
    connection.execute(
        sa.delete(AssetEventTagsTable).where(AssetEventTagsTable.c.event_id.in_(tagged))
    )
    return connection.execute(sa.delete(SqlEventLogStorageTable).where(where)).rowcount


def _forget(connection: sa.Connection, asset: str, kind: str, partition: str) -> int:
    events = SqlEventLogStorageTable.c
    # With the event type PostgreSQL uses an index to find the newest; without, it may read the
    # whole log.
    of_asset = (events.asset_key == asset) & (events.dagster_event_type == kind)
    newest = connection.execute(sa.select(sa.func.max(events.id)).where(of_asset)).scalar()
    if newest is None:
        return 0
    where = (
        of_asset
        & (events.run_id == RUNLESS_RUN_ID)
        & (sa.func.coalesce(events.partition, "") < partition)
        & (events.id < newest)
    )
    return _delete_events(connection, where)


def _forget_evaluations(connection: sa.Connection, asset: str, before: datetime) -> None:
    checks = AssetCheckExecutionsTable.c
    names = sa.select(checks.check_name).where(checks.asset_key == asset).distinct()
    for name in connection.execute(names).scalars().all():
        of_check = (checks.asset_key == asset) & (checks.check_name == name)
        numbers = sa.select(checks.id).where(of_check).order_by(checks.id.desc())
        kept = connection.execute(numbers.limit(KEPT_EVALUATIONS)).scalars().all()
        old = checks.create_timestamp < before.replace(tzinfo=None)
        _forget_those(connection, of_check & (checks.id < kept[0]) & (old | (checks.id < kept[-1])))


def _forget_those(connection: sa.Connection, where: sa.ColumnElement[bool]) -> None:
    checks, events = AssetCheckExecutionsTable.c, SqlEventLogStorageTable.c
    reported = sa.select(checks.evaluation_event_storage_id).where(
        where, checks.run_id == RUNLESS_RUN_ID
    )
    connection.execute(
        sa.delete(SqlEventLogStorageTable).where(
            events.run_id == RUNLESS_RUN_ID, events.id.in_(reported)
        )
    )
    connection.execute(sa.delete(AssetCheckExecutionsTable).where(where))
