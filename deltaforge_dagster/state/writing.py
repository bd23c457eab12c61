"""Base of all parts of a `FencedWriter`: one transaction, and the lease that was checked in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update

from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.tables import pipelines


class Writing:
    """One lease holder's transaction; see `fenced`."""

    def __init__(self, connection: Connection, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease

    @property
    def _name(self) -> str:
        return f"pipeline {self._lease.pipeline!r}"

    def _pipeline(self) -> RowMapping:
        query = select(pipelines).where(pipelines.c.name == self._lease.pipeline)
        return self._connection.execute(query).mappings().one()

    def _update_pipeline(self, values: Mapping[str, Any]) -> None:
        this = pipelines.c.name == self._lease.pipeline
        self._connection.execute(update(pipelines).where(this).values(**values))
