"""Where objects are: a folder by the sink's template, and a name.

A name is a function of what is in the object: `<segment>-<hash>.<extension>`, or
`<segment>.<run>-<hash>.<extension>` if the table's changes in the commit are of several table
versions. The segment is the last one of the object's commit, with twelve digits. The run is the
number of a run of consecutive changes of one version. The names of a table's objects in a folder
therefore sort in the order of its changes. The hash distinguishes tables, table versions, sinks,
and journals that started from scratch.
"""

from __future__ import annotations

import datetime as dt
import hashlib

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.objects.sink_type import PERIODS, S3SinkConfig
from deltaforge_dagster.sinks.tables.staged import ObjectPart
from deltaforge_dagster.sinks.tables.writer import TableOwner


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
