"""Snapshots: whether a source's tables are read as they are, when, and how wide."""

from __future__ import annotations

from typing import Literal

from deltaforge_dagster.config.blocks import Block, Count


class Snapshot(Block):
    """`snapshot` of a source. Without the block, and in a block without it, `mode` is `never`."""

    mode: Literal["initial", "always", "never"] = "never"
    """When the source's tables are read without anybody asking: `initial` once, when the pipeline starts
    for the first time; `always` whenever it starts with a changed file or by `deltaforge start`, too; `never`."""

    max_parallel_tables: Count = 8
    """How many tables are read at the same time, at most."""

    chunk_size: Count = 10_000
    """How many rows a chunk has, roughly. A large table gets larger chunks, so that their number stays
    bounded."""

    intra_table_parallel: bool = False
    """Whether chunks of one table are read at the same time."""

    max_parallel_chunks: Count = 4
    """How many chunks of one table are read at the same time, at most, with `intra_table_parallel`."""


class SnapshotOptions(Block):
    """`engine.snapshot`: how snapshots use the journal's disk."""

    max_staged_bytes: Count = 1 << 30
    """How many bytes of chunks may wait for the pipeline's run to take them over; reading waits then."""
