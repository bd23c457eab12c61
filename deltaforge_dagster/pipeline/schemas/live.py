"""Compare the tables in the database's catalog with the versions that were last captured.

Rows are decoded with the table version that was in force at their position, which the log tells. So
a table that was altered while nothing ran gets its new version with its first change after that,
and nothing is registered here. Users want to know earlier: `compare` shows how every captured table
differs from the catalog, when a run begins and on request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, SourceMisconfigured
from deltaforge_dagster.pipeline.failover import differences
from deltaforge_dagster.pipeline.schemas import views as schema_views
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.schemas import TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import TableSchema

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that the end of a run waits for a server that does not answer."""

Status = Literal["same", "altered", "new", "dropped", "error"]


@dataclass(frozen=True, slots=True)
class LiveTable:
    """A table of the catalog, compared with the last captured version.

    Attributes:
        name: Full name.
        status: `same`; `altered` since then; `new`, nothing of it was captured yet;
            `dropped`; `error`, it could not be inspected.
        table: Its definition in the catalog; None if it is gone, or could not be inspected.
        differences: The differences, one text each.
        error: Why it could not be inspected.
    """

    name: str
    status: Status
    table: TableSchema | None = None
    differences: tuple[str, ...] = ()
    error: str | None = None


def compare(
    store: StateStore,
    pipeline: str,
    source: Source,
    only: str | None = None,
    *,
    new: bool = True,
) -> Iterator[LiveTable]:
    """Yield a comparison with the catalog of every table that is or was captured, or of `only`.

    With `new=False`, tables of which nothing was captured yet are left out.

    Raises:
        NotAllowed: `only` is no such table.
        DeltaforgeError: The source cannot be queried.
    """
    histories = {history.name: history for history in store.schemas.histories(pipeline)}
    existing = set(source.tables())
    names = sorted(existing | histories.keys() if new else histories)
    if only is not None and only not in names:
        raise NotAllowed(f"pipeline {pipeline!r} captures no table {only!r}")
    for name in names if only is None else [only]:
        yield _compared(name, source, histories.get(name), exists=name in existing)


def reload(
    store: StateStore,
    pipeline: str,
    source: Source,
    only: str | None = None,
    *,
    proceed: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the result of `compare` as JSON values, with counts and the time taken.

    Args:
        store: The state store.
        pipeline: The pipeline.
        source: Its source.
        only: Just this table.
        proceed: Called after each table; may end the comparison by raising an error.

    Raises:
        NotAllowed: `only` is no such table.
        DeltaforgeError: The source cannot be queried.
    """
    began = time.monotonic()
    tables = []
    for table in compare(store, pipeline, source, only):
        tables.append(table)
        proceed()
    return {
        "pipeline": pipeline,
        "tables_reloaded": sum(table.status != "error" for table in tables),
        "tables": [_view(table, source.database()) for table in tables],
        "elapsed_ms": round((time.monotonic() - began) * 1000),
    }


def named(store: StateStore, pipeline: str, source: Source, database: str, table: str) -> str:
    """Return the full name of a table that was captured, or that the file's patterns now match.

    Raises:
        NotAllowed: There is no such table, or there are several (`schema_views.named`).
        DeltaforgeError: The source cannot be queried.
    """
    captured = schema_views.captured(store, pipeline)
    try:
        return schema_views.named(captured, pipeline, database, table)
    except NotAllowed:
        present = [schema_views.place(source.database(), name) for name in source.tables()]
        return schema_views.named([*captured, *present], pipeline, database, table)


class WarmStart:
    """Compares the catalog with the registry while a run begins, in a separate thread.

    Args:
        store: The state store.
        pipeline: The pipeline.
        build_source: Makes a source for this thread.
        warn: Called for each table that was altered or dropped.
    """

    def __init__(
        self,
        store: StateStore,
        pipeline: str,
        build_source: Callable[[], Source],
        warn: Callable[[str], None],
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._build_source = build_source
        self._warn = warn
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=in_context(self._compare), name=f"warm start {pipeline}", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop after the current table; wait for it for a few seconds."""
        self._over.set()
        self._thread.join(_PATIENCE)

    def _compare(self) -> None:
        try:
            source = self._build_source()
            try:
                for table in compare(self._store, self._pipeline, source, new=False):
                    if self._over.is_set():
                        return
                    if table.status in {"altered", "dropped"}:
                        self._warn(_difference_text(table))
            finally:
                source.close()
        except DeltaforgeError as error:  # capture meets it as well, and reports it
            logger.info("%s: the catalog was not compared: %s", self._pipeline, error)


def _difference_text(table: LiveTable) -> str:
    """Return how a table differs from its last captured version, in one sentence."""
    if table.status == "dropped":
        return f"table {table.name} is not in the database any more"
    changes = ", ".join(table.differences)
    return (
        f"table {table.name} was altered ({changes}); its new version begins with its first change"
        " after that"
    )


def _compared(
    name: str, source: Source, history: TableHistory | None, *, exists: bool
) -> LiveTable:
    try:
        table = source.schema(name)
    except SourceMisconfigured:
        return LiveTable(name, "dropped")
    except DeltaforgeError as error:
        return LiveTable(name, "error", error=str(error))
    if history is None:
        return LiveTable(name, "new", table)
    if not exists:  # it exists, but is no longer captured
        return LiveTable(name, "same", table)
    changes = differences(history.current.table, table)
    return LiveTable(name, "altered" if changes else "same", table, tuple(changes))


def _view(live: LiveTable, database: str | None) -> dict[str, Any]:
    db, schema, table = schema_views.place(database, live.name)
    return {
        "database": db,
        "schema": schema,
        "table": table,
        "name": live.name,
        "status": live.status,
        "changed": live.status in {"altered", "dropped", "new"},
        "differences": list(live.differences),
        "error": live.error,
    }
