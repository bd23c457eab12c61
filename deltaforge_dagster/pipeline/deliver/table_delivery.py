"""Builds the delivery to a sink that keeps tables.

What stages the changes, and what writes them, depends on the sink's kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.delivery import DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.lake.writer import LakeWriter
from deltaforge_dagster.pipeline.run_context import RunContext, SessionProvider
from deltaforge_dagster.pipeline.tables.committer import Stager
from deltaforge_dagster.pipeline.tables.delivery import TableDelivery
from deltaforge_dagster.pipeline.tables.object_stage import ObjectStager
from deltaforge_dagster.pipeline.tables.planner import CommitLimits
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.registry import (
    DatabaseSinkType,
    LakeSinkType,
    ObjectSinkType,
    TableSinkType,
    sink_types,
)
from deltaforge_dagster.sinks.tables.config import StagedSinkConfig, TableSinkConfig
from deltaforge_dagster.sinks.tables.writer import CommitWriter, TableOwner
from deltaforge_dagster.state.records import CheckpointRow
from deltaforge_dagster.state.store import StateStore


def build_table_delivery(
    run: RunContext,
    context: DeliveryContext,
    checkpoint: CheckpointRow,
    thread: DeliveryThread,
    sessions: SessionProvider,
    *,
    at_once: bool,
    until: int | None,
) -> TableDelivery:
    """Return the delivery to a sink.

    Args:
        run: Makes Spark sessions.
        context: The sink in its run.
        checkpoint: Its checkpoint.
        thread: The thread that runs the delivery.
        sessions: The session in which changes are staged.
        at_once: See `CommitLimits`.
        until: See `CommitLimits`.
    """
    lease = context.run.lease
    sink = next(block for block in context.spec.spec.sinks if block.config.id == context.sink_id)
    kind, config = sink_types()[sink.type], sink.config
    assert isinstance(kind, TableSinkType)
    assert isinstance(config, StagedSinkConfig)
    when = config.commit_when

    @contextmanager
    def open_writer(uid: str) -> Iterator[CommitWriter]:
        source = context.spec.spec.source.config.id
        log = lease.write(lambda writer: writer.failovers.server(source))
        owner = TableOwner(uid, lease.pipeline, config.id, log or "")
        with _open_writer(run, kind, config, owner) as writer:
            try:
                yield writer
            finally:
                writer.close()

    return TableDelivery(
        context,
        checkpoint,
        thread,
        limits=CommitLimits(
            when.seconds,
            when.changes,
            at_once,
            until,
            config.pending_changes,
            when.bytes,
            when.idle_seconds,
        ),
        stager=_stager(
            kind,
            config,
            spec=context.spec,
            journal=context.run.journal,
            sessions=sessions,
            store=context.run.store,
            run_id=lease.run_id,
        ),
        open_writer=open_writer,
        skips=Resumption(context),
        by_store=isinstance(kind, ObjectSinkType),
    )


def _stager(
    kind: TableSinkType[Any],
    config: StagedSinkConfig,
    *,
    spec: PipelineSpec,
    journal: Journal,
    sessions: SessionProvider,
    store: StateStore,
    run_id: str,
) -> Stager:
    types = kind.column_types()
    if isinstance(kind, ObjectSinkType):
        form = kind.object_form(config)
        return ObjectStager(spec, config, types, journal, sessions, store, run_id, form)
    assert isinstance(config, TableSinkConfig)
    return TableStager(spec, config, types, journal, sessions, store, run_id)


@contextmanager
def _open_writer(
    run: RunContext, kind: TableSinkType[Any], config: StagedSinkConfig, owner: TableOwner
) -> Iterator[CommitWriter]:
    if isinstance(kind, LakeSinkType):
        assert isinstance(config, LakeSinkConfig)
        with run.replay_sessions() as sessions:
            yield LakeWriter(sessions, kind.dialect(config), config, owner)
        return
    assert isinstance(kind, DatabaseSinkType | ObjectSinkType)
    yield kind.build_writer(config, owner)
