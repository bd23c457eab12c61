"""The source of a pipeline file: what every kind of source has, and the options of snapshots.

A kind of source declares its options in a subclass of `SourceConfig` in its own folder,
`sources/<kind>/config.py` (`sources.registry`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from deltaforge_dagster.config.blocks import Block, Count, Text

# `schema.table` or `table`; the first dot is the separator, and a wildcard may only end a part.
_TABLE_PATTERN = re.compile(r"(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^*%]+[*%]?|[*%]) )?", re.VERBOSE)


def _table_pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write schema.table, where a part may end in `*` or `%` for "
            "any rest, and has no other wildcard)"
        )
    return text


TablePattern = Annotated[Text, AfterValidator(_table_pattern)]
"""`schema.table`, or `table`, with wildcards at the ends."""

OnSchemaDrift = Literal["adapt", "halt"]


class SourceConfig(Block):
    """The options of every source.

    Each kind declares `tables`, `on_schema_drift` and `snapshot` itself, because what they mean
    differs and the reference lists fields in the order of the class. A kind without snapshots
    declares `snapshot: None`.
    """

    id: Text
    """Identifies the source; part of every event id. If absent, the pipeline's name is used, with a
    warning.
    """

    if TYPE_CHECKING:
        tables: tuple[str, ...]
        on_schema_drift: OnSchemaDrift
        snapshot: Snapshot | None


DECLARED = ("tables", "on_schema_drift", "snapshot")
"""What each subclass of `SourceConfig` declares."""


class SourceBlock(Block):
    """The source of a pipeline file.

    It is an instance of one subclass per kind (`config.model`).
    """

    type: str
    config: SourceConfig


class Snapshot(Block):
    """`snapshot` of a source. Without the block, too, `mode` is `never`."""

    mode: Literal["initial", "always", "never"] = "never"
    """When the source's tables are read automatically.

    `initial`: once, when the pipeline starts for the first time. `always`: also whenever it starts
    with a changed file or by `deltaforge start`. `never`: only on request.
    """
    max_parallel_tables: Count = 8
    """The maximum number of tables that are read at the same time."""
    chunk_size: Count = 10_000
    """The approximate number of rows of a chunk.

    A large table gets larger chunks, so that their number stays bounded.
    """

    intra_table_parallel: bool = False
    """Whether chunks of one table are read at the same time."""

    max_parallel_chunks: Count = 4
    """The maximum number of chunks of one table that are read at the same time with
    `intra_table_parallel`.
    """


class SnapshotOptions(Block):
    """`engine.snapshot`: how much of the journal's disk snapshots may use."""

    max_staged_bytes: Count = 1 << 30
    """The maximum size of chunks that wait for the pipeline's run to capture them; at this limit
    reading pauses.
    """
