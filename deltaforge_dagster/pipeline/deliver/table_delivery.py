"""Builds the delivery to a sink that keeps tables: what stages the changes, and what writes them, depends on its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.delivery import DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.lake.writer import LakeWriter
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.pipeline.spark_session import SessionProvider
from deltaforge_dagster.pipeline.tables.delivery import CommitLimits, TableDelivery
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.registry import (
    DatabaseSinkType,
    LakeSinkType,
    TableSinkType,
    sink_types,
)
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sinks.tables.writer import TableOwner, TableWriter
from deltaforge_dagster.state.records import CheckpointRow


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
    sink = next(one for one in context.spec.spec.sinks if one.config.id == context.sink_id)
    kind, config = sink_types()[sink.type], sink.config
    assert isinstance(kind, TableSinkType)
    assert isinstance(config, TableSinkConfig)

    @contextmanager
    def open_writer(uid: str) -> Iterator[TableWriter]:
        source = context.spec.spec.source.config.id
        log = lease.write(lambda writer: writer.failovers.server(source))
        owner = TableOwner(uid, lease.pipeline, config.id, log or "")
        with _opened(run, kind, config, owner) as writer:
            try:
                yield writer
            finally:
                writer.close()

    return TableDelivery(
        context,
        checkpoint,
        thread,
        limits=CommitLimits(
            config.commit_seconds, config.commit_changes, at_once, until, config.pending_changes
        ),
        stager=TableStager(
            context.spec,
            config,
            kind.column_types(),
            context.run.journal,
            sessions,
            context.run.store,
            lease.run_id,
        ),
        open_writer=open_writer,
        skips=Resumption(context),
    )


@contextmanager
def _opened(
    run: RunContext, kind: TableSinkType[Any], config: TableSinkConfig, owner: TableOwner
) -> Iterator[TableWriter]:
    if isinstance(kind, DatabaseSinkType):
        yield kind.build_writer(config, owner)
        return
    assert isinstance(kind, LakeSinkType)
    assert isinstance(config, LakeSinkConfig)
    with run.replay_sessions() as sessions:
        yield LakeWriter(sessions, kind.dialect(config), config, owner)
