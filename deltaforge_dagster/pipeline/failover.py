"""Failover: check, each time before a source is read, whether it is still the same server.

The server behind an unchanged DSN may change: to a promoted replica, a restored copy or an upgraded
cluster. Then the source determines where reading resumes, or that it cannot; every table is
compared with the version with which its rows were last decoded; and the result is recorded. A table
whose primary key has changed stops the pipeline, because consumers would mistake its rows for
others. `on_schema_drift: halt` stops it for every difference; `adapt` continues, since rows are
decoded with the table version in the log anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.store import FencedWriter, StateStore
from deltaforge_dagster.tables import TableSchema

logger = logging.getLogger(__name__)

Deltas = dict[tuple[str, str], list[str]]
"""By (db, full table name), the differences of a table, one text each."""

_KEY_CHANGED = "primary_key_changed"


class Failover:
    """Detects another server, and has the source resume there if nothing can be lost.

    Args:
        store: Where table versions are read.
        lease: The run's lease; fences what is written.
        source_id: `source.config.id`.
        on_schema_drift: Whether a table that changed stops the pipeline.
    """

    def __init__(
        self,
        store: StateStore,
        lease: ActiveLease,
        source_id: str,
        on_schema_drift: Literal["adapt", "halt"],
    ) -> None:
        self._store = store
        self._lease = lease
        self._source_id = source_id
        self._on_schema_drift = on_schema_drift

    def start(self, source: Source, start: Position) -> Position:
        """Return where reading resumes: at `start`, or at the equivalent position on a new server.

        Raises:
            PositionLost: The log after `start` cannot be read on this server.
            SourceMisconfigured: Tables differ in a way that somebody has to resolve.
            DeltaforgeError: The server cannot be asked.
        """
        identity = source.identity()
        previous = self._lease.write(lambda writer: writer.failovers.server(self._source_id))
        if previous is None:
            self._lease.write(lambda writer: writer.failovers.set_server(self._source_id, identity))
        if previous in {None, identity}:
            return start
        assert previous is not None
        logger.warning(
            "source %s is another server now (%s, was %s)", self._source_id, identity, previous
        )
        position = source.relocate(start, previous)
        deltas = self._deltas(source)
        # Before anything is recorded, so that a refused server is examined again at the next start.
        self._refuse(deltas)
        self._lease.write(lambda writer: self._record(writer, previous, identity, position, deltas))
        return position

    def _record(
        self, writer: FencedWriter, previous: str, identity: str, position: Position, deltas: Deltas
    ) -> None:
        writer.pipeline.set_captured(position.to_json())
        writer.failovers.reconciled(
            self._source_id,
            previous=previous,
            identity=identity,
            position=position.to_json(),
            deltas=deltas,
        )

    def _deltas(self, source: Source) -> Deltas:
        """Compare each table that was ever captured with its definition on this server."""
        existing = set(source.tables())
        deltas: Deltas = {}
        for versions in self._store.schemas.versions(self._lease.pipeline):
            newest = versions[-1]
            name = newest.full_name
            try:
                current = source.schema(name)
            except SourceMisconfigured:
                current = None
            if current is not None and name not in existing:
                continue  # it exists, but is no longer captured
            deltas[newest.db, name] = differences(newest, current)
            if current is not None and any(
                not differences(version, current) for version in versions
            ):
                deltas[newest.db, name] = []  # equal to an earlier version
        return deltas

    def _refuse(self, deltas: Mapping[tuple[str, str], list[str]]) -> None:
        changed = {name: changes for (_, name), changes in deltas.items() if changes}
        if not changed:
            return
        text = "; ".join(
            f"{name}: {', '.join(changes)}" for name, changes in sorted(changed.items())
        )
        if any(delta.startswith(_KEY_CHANGED) for changes in changed.values() for delta in changes):
            raise SourceMisconfigured(
                f"source {self._source_id} is another server now, and keys changed: {text}. "
                "Restore the keys, or capture these tables with a new pipeline"
            )
        if self._on_schema_drift == "halt":
            raise SourceMisconfigured(
                f"source {self._source_id} is another server now, and tables changed: {text}. "
                "Make them what they were, or set source.config.on_schema_drift to adapt"
            )
        logger.warning("source %s: tables changed: %s", self._source_id, text)


def differences(before: TableSchema, after: TableSchema | None) -> list[str]:
    """Return the differences of two table versions as texts: kind of difference and column."""
    if after is None:
        return ["table_dropped"]
    old = {column.name: column.data_type for column in before.columns}
    new = {column.name: column.data_type for column in after.columns}
    deltas = [f"column_added {name}" for name in new if name not in old]
    deltas += [f"column_dropped {name}" for name in old if name not in new]
    deltas += [
        f"column_type_changed {name}"
        for name in old
        if new.get(name) and old[name] != new[name]  # a source may not know a column's type
    ]
    if set(before.primary_key) != set(after.primary_key):
        deltas.append(f"{_KEY_CHANGED} ({', '.join(after.primary_key) or 'none'})")
    return deltas
