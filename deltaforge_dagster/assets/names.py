"""What things are called in Dagster: asset keys, partitions, jobs, tags.

Asset keys carry the pipeline's own name. Dagster refuses hyphens and dots in op, job and sensor
names; those get underscores, and a short hash where the name changed, so that `a-b` and `a_b`
stay two pipelines.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import unquote

import dagster as dg

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.publication import CHANGES

PIPELINE_TAG = "deltaforge/pipeline"
RUN_TAG = "deltaforge/run"
"""What a run was started for.

`live` captures and delivers, `snapshot` reads what is missing of a snapshot; both are started by sensors. Every
other run is a Materialize of chosen partitions, and may say what becomes of ranges: `reprocess` delivers
to sinks that have them what today's processors make of them; `preview` only shows, at `changes`, what that
would be.
"""
REASON_TAG = "deltaforge/reason"
COMMAND = "command"
"""The reason of a live run that `deltaforge run` has started, and no sensor."""
UNTIL_TAG = "deltaforge/until"
"""`caught up` lets a live run end as soon as there is nothing more to do."""
OUTCOME_METADATA = "outcome"
"""Each live run leaves an observation of `changes` with how it ended, under this name."""
CAUGHT_UP_METADATA = "caught_up"
"""A sink that got on request what it lacked has an observation with the number of messages."""

_REFUSED = re.compile(r"[%\x00-\x1f]|\.(?=\.\.)")
"""What Dagster refuses in the name of a partition."""


def dagster_name(pipeline: str) -> str:
    """Return a name for ops, jobs and sensors, different for different pipelines."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", pipeline)
    if plain == pipeline:
        return plain
    return f"{plain}_{hashlib.sha256(pipeline.encode()).hexdigest()[:6]}"


def op_name(pipeline: str) -> str:
    """Return the name of the op behind a pipeline's assets; Dagster wants no job of that name."""
    return f"{dagster_name(pipeline)}_ranges"


def job_name(pipeline: str) -> str:
    """Return the name of the job that a live run executes."""
    return f"{dagster_name(pipeline)}_run"


def asset_key(pipeline: str, asset: str) -> dg.AssetKey:
    """Return the key of `changes`, or of the sink with the id `asset`."""
    if asset == CHANGES:
        return dg.AssetKey([pipeline, CHANGES])
    return dg.AssetKey([pipeline, "sinks", asset])


def partitions_name(pipeline: str) -> str:
    """Return the name of the dynamic partitions that are the pipeline's ranges."""
    return f"{pipeline}/ranges"


def range_partitions(pipeline: str) -> dg.DynamicPartitionsDefinition:
    """Return the partitions of a pipeline's assets: one range is one partition."""
    return dg.DynamicPartitionsDefinition(name=partitions_name(pipeline))


def snapshot_key(pipeline: str) -> dg.AssetKey:
    """Return the key of the asset whose partitions are chunks of tables."""
    return dg.AssetKey([pipeline, "snapshot"])


def health_key(pipeline: str) -> dg.AssetKey:
    """Return the key of the asset that stands for the whole pipeline, and has no partitions."""
    return dg.AssetKey([pipeline, "health"])


def snapshot_job_name(pipeline: str) -> str:
    """Return the name of the job that reads a snapshot's chunks."""
    return f"{dagster_name(pipeline)}_snapshot"


def schemas_key(pipeline: str) -> dg.AssetKey:
    """Return the key of the asset whose partitions are tables, and whose events are their versions."""
    return dg.AssetKey([pipeline, "schemas"])


def tables_name(pipeline: str) -> str:
    """Return the name of the dynamic partitions that are tables: `shop.orders`."""
    return f"{pipeline}/tables"


def table_partition(table: str) -> str:
    """Return the partition of a table; what Dagster refuses in a name is written as in URLs."""
    return _REFUSED.sub(lambda found: f"%{ord(found[0]):02X}", table)


def table_of(partition: str) -> str:
    """Return the full name of a partition's table."""
    return unquote(partition)


def chunks_name(pipeline: str) -> str:
    """Return the name of the dynamic partitions that are chunks: `shop.orders/000012`."""
    return f"{pipeline}/chunks"


def chunk_of(partition: str) -> tuple[str, int]:
    """Return table and number of a chunk's partition.

    Raises:
        NotAllowed: The partition is not a chunk's.
    """
    table, _, number = partition.rpartition("/")
    if not table or not number.isdigit():
        raise NotAllowed(f"{partition!r} is not a chunk (expected table/number)")
    return table, int(number)


def partition_key(number: int) -> str:
    """Return the partition of a range; ten digits keep the UI's order the log's order."""
    return f"{number:010d}"


def range_number(partition: str) -> int:
    """Return the range of a partition.

    Raises:
        NotAllowed: The partition is not a range's.
    """
    if not partition.isdigit():
        raise NotAllowed(f"{partition!r} is not the number of a range")
    return int(partition)
