"""What things are called in Dagster: asset keys, partitions, jobs, tags.

Asset keys carry the pipeline's own name. Dagster refuses hyphens and dots in op, job and sensor
names; those get underscores, and a short hash where the name changed, so that `a-b` and `a_b`
stay two pipelines.
"""

from __future__ import annotations

import hashlib
import re

import dagster as dg

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.publication import CHANGES

PIPELINE_TAG = "deltaforge/pipeline"
RUN_TAG = "deltaforge/run"
"""`live` marks a run that captures and delivers; every other run is a Materialize of ranges."""
REASON_TAG = "deltaforge/reason"
UNTIL_TAG = "deltaforge/until"
"""`caught up` lets a live run end as soon as there is nothing more to do."""
OUTCOME_METADATA = "outcome"
"""Each live run leaves an observation of `changes` with how it ended, under this name."""

CAUGHT_UP_METADATA = "caught_up"
"""A sink that got on request what it lacked has an observation with the number of messages."""


def dagster_name(pipeline: str) -> str:
    """Return a name for ops, jobs and sensors, different for different pipelines."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", pipeline)
    if plain == pipeline:
        return plain
    return f"{plain}_{hashlib.sha256(pipeline.encode()).hexdigest()[:6]}"


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
