"""Snapshots: whether and when a source's existing rows are read, and with how many readers."""

from __future__ import annotations

from typing import Literal

from deltaforge_dagster.config.blocks import Block, Count


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
