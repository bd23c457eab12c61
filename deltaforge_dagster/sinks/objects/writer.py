"""Puts the objects of commits into their place.

An object's name and changes are a function of the commit (`names`), which the state store records
before the commit begins. A successor that repeats the commit therefore writes the same objects; an
object that already exists is complete and is left as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from deltaforge_dagster.errors import JournalDamaged, SinkUnavailable, StoreUnavailable
from deltaforge_dagster.journal.storage import open_located
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig
from deltaforge_dagster.sinks.objects.stores import ObjectStore
from deltaforge_dagster.sinks.objects.writer import object_path
from deltaforge_dagster.sinks.tables.staged import AFTER, BEFORE, IMAGE_META, StagedTable
from deltaforge_dagster.sinks.tables.writer import TableOwner, WrittenTable
from deltaforge_dagster.typed_rows.schema import TypedSchema

_PIECE = 8 << 20
"""Bytes that are copied at a time."""


class ObjectWriter:
    """Implements `CommitWriter`.

    Args:
        config: The sink.
        owner: Who writes.
        store: Where objects go.
    """

    def __init__(self, config: S3SinkConfig, owner: TableOwner, store: ObjectStore) -> None:
        self._config = config
        self._owner = owner
        self._store = store
        self._closed = threading.Event()

    def commit(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,  # noqa: ARG002 - older objects may be deleted
    ) -> WrittenTable:
        """Write the objects of a table that are not there yet; see `CommitWriter`."""
        for step in table.steps:
            assert step.part is not None
            path = object_path(self._config, self._owner, table.source, step.part, through)
            (content,) = step.files
            guard()
            if not self._store.exists(path):
                self._write(path, content, guard)
        return WrittenTable(_columns(self._config, table.columns))

    def close(self) -> None:
        """Stop writing; a `commit` in another thread ends after the piece that it is copying."""
        self._closed.set()

    def _write(self, path: str, content: str, guard: SendGuard) -> None:
        try:
            source = open_located(content)
        except JournalDamaged as error:
            raise StoreUnavailable(
                f"the staged file {content} is gone: it is made again"
            ) from error
        with source, self._store.create(path) as target:
            while piece := source.read(_PIECE):
                if self._closed.is_set():
                    raise SinkUnavailable(f"sink {self._config.id}: it was closed")
                target.write(piece)
            guard()
            target.complete()


def _columns(config: S3SinkConfig, columns: TypedSchema) -> Sequence[tuple[str, str]]:
    """Return name and type of the columns of objects; JSON lines have none."""
    if config.format == "jsonl":
        return ()
    images = [
        (prefix + column.name, column.type.name)
        for prefix in (BEFORE, AFTER)
        for column in columns.columns
    ]
    return [*((field.name, str(field.type)) for field in IMAGE_META), *images]
