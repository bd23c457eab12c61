"""Puts the objects of commits into their place: a folder by the sink's template, and a name.

An object's name and changes are a function of the commit, which the state store records before the
commit begins. A successor that repeats the commit therefore writes the same objects; an object that
already exists is complete and is left as it is.

A name is `<segment>-<hash>.<extension>`, or `<segment>.<run>-<hash>.<extension>` if the table's
changes in the commit are of several table versions. The segment is the last one of the object's
commit, with twelve digits. The run is the number of a run of consecutive changes of one version.
The names of a table's objects in a folder therefore sort in the order of its changes. The hash
distinguishes tables, table versions, sinks, and journals that started from scratch.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
from collections.abc import Sequence

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import JournalDamaged, SinkUnavailable, StoreUnavailable
from deltaforge_dagster.journal.storage import open_located
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.objects.sink_type import PERIODS, S3SinkConfig
from deltaforge_dagster.sinks.objects.stores import ObjectStore
from deltaforge_dagster.sinks.tables.staged import (
    AFTER,
    BEFORE,
    IMAGE_META,
    ObjectPart,
    StagedTable,
)
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


def object_path(
    config: S3SinkConfig,
    owner: TableOwner,
    table: tuple[str, str | None, str],
    part: ObjectPart,
    through: int,
) -> str:
    """Return the path of an object below the sink's root.

    Args:
        config: The sink.
        owner: Who writes.
        table: Database, schema and name of the source's table.
        part: What the object's changes have in common.
        through: The last segment of the commit.
    """
    database, schema, name = table
    values = {"source.db": database, "source.schema": schema or database, "source.table": name}
    if part.began is not None:
        began = dt.datetime.fromtimestamp(part.began, dt.UTC)
        formats = dict(zip(PERIODS, ("%Y", "%m", "%d", "%H"), strict=True))
        values |= {variable: began.strftime(form) for variable, form in formats.items()}
    folder = "".join(
        piece if isinstance(piece, str) else values[".".join(piece.path)]
        for piece in compile_template(config.folder).parts
    )
    words = (owner.uid, owner.sink_id, database, schema or "", name, part.version or "")
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()
    # Releases before runs were numbered wrote the same changes to the name without a number.
    prefix = f"{through:012d}" if part.run is None else f"{through:012d}.{part.run:06d}"
    return f"{folder}/{prefix}-{digest}.{config.extension}"


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
