"""The names in Dagster: asset keys, partitions, jobs, tags.

Asset keys have the pipeline's name, unless a project translates them (`translator`). Dagster
refuses hyphens and dots in the names of ops, jobs and sensors; these have underscores instead, and
a short hash if that changed the name, so that `a-b` and `a_b` stay different.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import unquote

import dagster as dg

from deltaforge_dagster.assets.translator import PipelineAsset, shown_key
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.installation import run_launcher
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES

PIPELINE_TAG = run_launcher.PIPELINE_TAG
RUN_TAG = "deltaforge/run"
"""The purpose of a run.

`live` captures and delivers, `snapshot` reads the missing chunks of a snapshot; sensors start both.
Every other run is a Materialize of chosen partitions, for which the tag may be set to `reprocess`,
to deliver what the current processors make of the ranges to sinks that have them, or to `preview`,
to only show that at `changes`.
"""
REASON_TAG = "deltaforge/reason"
COMMAND = "command"
"""The reason of a live run that was started by `deltaforge run`, not by a sensor."""
CODE_TAG = "deltaforge/code"
"""Which code has started a live run (`code_version`); the run ends once other code ticks."""
UNTIL_TAG = "deltaforge/until"
"""`caught up` makes a live run end as soon as there is nothing more to do."""
OUTCOME_METADATA = "outcome"
"""The metadata field with the outcome of a live run, in the run's observation of `changes`."""
RETENTION_JOB = "deltaforge_retention"
"""The job that deletes old data of all pipelines of an installation of its own."""
CAUGHT_UP_METADATA = "caught_up"
"""The metadata field with the number of messages, in the observation of a sink.

It is set when a Materialize has caught up the sink.
"""

_REFUSED = re.compile(r"[%\x00-\x1f]|\.(?=\.\.)")
"""Characters that Dagster refuses in partition names."""


def group_name(group: str, part: str) -> str:
    """Return the name of the group of assets of a pipeline's sink or source (`part`)."""
    return f"{group}_{re.sub(r'[^A-Za-z0-9_]', '_', part)}"


def dagster_name(pipeline: str) -> str:
    """Return a name for ops, jobs and sensors that is unique to the pipeline."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", pipeline)
    if plain == pipeline:
        return plain
    return f"{plain}_{hashlib.sha256(pipeline.encode()).hexdigest()[:6]}"


def op_name(pipeline: str) -> str:
    """Return the name of the op behind a pipeline's assets.

    Dagster does not allow a job of the same name.
    """
    return f"{dagster_name(pipeline)}_ranges"


def job_name(pipeline: str) -> str:
    """Return the name of the job that a live run executes."""
    return f"{dagster_name(pipeline)}_run"


def asset_key(pipeline: str, asset: str) -> dg.AssetKey:
    """Return the key of `changes`, or of the sink with the id `asset`."""
    return shown_key(changes_asset(pipeline) if asset == CHANGES else sink_asset(pipeline, asset))


def changes_asset(pipeline: str) -> PipelineAsset:
    """Return the asset of the captured changes, with nothing but its key."""
    return PipelineAsset(pipeline, "changes", dg.AssetSpec([pipeline, CHANGES]))


def sink_asset(pipeline: str, sink: str) -> PipelineAsset:
    """Return the asset of a sink, with nothing but its key."""
    return PipelineAsset(pipeline, "sink", dg.AssetSpec([pipeline, "sinks", sink]), sink)


def lake_table_key(pipeline: str, sink: str, source: tuple[str, str]) -> dg.AssetKey:
    """Return the key of the table in which a sink keeps a table of the source.

    The source's table is given by schema and name.
    """
    return shown_key(lake_table_asset(pipeline, sink, source))


def lake_table_asset(pipeline: str, sink: str, source: tuple[str, str]) -> PipelineAsset:
    """Return the asset of a table of a sink, with nothing but its key.

    The key's last part, which is all that a node of the lineage graph shows, has the sink's id,
    too.
    """
    schema, table = source
    spec = dg.AssetSpec([pipeline, sink, schema, f"{table}_{sink}"])
    return PipelineAsset(pipeline, "table", spec, sink, schema, table)


def source_table_key(pipeline: str, source: str, table: tuple[str, str]) -> dg.AssetKey:
    """Return the key of a table of the source with this id, given by schema and name."""
    return shown_key(source_table_asset(pipeline, source, table))


def source_table_asset(pipeline: str, source: str, table: tuple[str, str]) -> PipelineAsset:
    """Return the asset of a table of the source, with nothing but its key.

    The key has more parts than every other key of a pipeline, whatever its sinks are called.
    """
    spec = dg.AssetSpec([pipeline, "source", source, *table])
    return PipelineAsset(pipeline, "source_table", spec, None, *table)


def maintenance_key(pipeline: str, sink: str) -> dg.AssetKey:
    """Return the key of the asset whose materializations are the maintenance of a sink's tables."""
    return shown_key(maintenance_asset(pipeline, sink))


def maintenance_asset(pipeline: str, sink: str) -> PipelineAsset:
    """Return the asset of the maintenance of a sink's tables, with nothing but its key."""
    spec = dg.AssetSpec([pipeline, "maintenance", f"{sink}_maintenance"])
    return PipelineAsset(pipeline, "maintenance", spec, sink)


def maintenance_job_name(pipeline: str, sink: str) -> str:
    """Return the name of the job that maintains a sink's tables."""
    return f"{dagster_name(f'{pipeline}.{sink}')}_maintenance"


@dataclass(frozen=True, slots=True)
class SharedNames:
    """The names of what the pipelines of one set of definitions share.

    Attributes:
        files: The sensor that looks at the pipelines' files.
        alerts: The sensor that notifies hooks.
        retention: The job that deletes old data.
    """

    files: str = "pipeline_files"
    alerts: str = "deltaforge_alerts"
    retention: str = RETENTION_JOB

    @classmethod
    def of_pipeline(cls, pipeline: str) -> Self:
        """Return names that other definitions in a project do not have, for those of a pipeline."""
        name = dagster_name(pipeline)
        return cls(f"{name}_files", f"{name}_alerts", f"{name}_retention")


def partitions_name(pipeline: str) -> str:
    """Return the name of the dynamic partitions that are the pipeline's ranges."""
    return f"{pipeline}/ranges"


def range_partitions(pipeline: str) -> dg.DynamicPartitionsDefinition:
    """Return the partitions of a pipeline's assets: one range is one partition."""
    return dg.DynamicPartitionsDefinition(name=partitions_name(pipeline))


def snapshot_key(pipeline: str) -> dg.AssetKey:
    """Return the key of the asset whose partitions are chunks of tables."""
    return shown_key(own_asset(pipeline, "snapshot"))


def own_asset(pipeline: str, kind: Literal["snapshot", "schemas", "health"]) -> PipelineAsset:
    """Return an asset that a pipeline has once, with nothing but its key."""
    return PipelineAsset(pipeline, kind, dg.AssetSpec([pipeline, kind]))


def health_key(pipeline: str) -> dg.AssetKey:
    """Return the key of the asset that represents the whole pipeline and has no partitions."""
    return shown_key(own_asset(pipeline, "health"))


def snapshot_job_name(pipeline: str) -> str:
    """Return the name of the job that reads a snapshot's chunks."""
    return f"{dagster_name(pipeline)}_snapshot"


def schemas_key(pipeline: str) -> dg.AssetKey:
    """Return the key of the asset with tables as partitions and versions as materializations."""
    return shown_key(own_asset(pipeline, "schemas"))


def keys_of(pipeline: str, keys: Iterable[dg.AssetKey]) -> list[dg.AssetKey]:
    """Return those of the keys that belong to a pipeline's assets.

    The first part of a key is not enough, because other projects may have keys that begin with it.
    """
    paths = [tuple(key.path) for key in keys]
    sinks = {path[2] for path in paths if len(path) == 3 and path[:2] == (pipeline, "sinks")}
    whole = {asset_key(pipeline, CHANGES), snapshot_key(pipeline), health_key(pipeline)}
    whole |= {schemas_key(pipeline), *(maintenance_key(pipeline, sink) for sink in sinks)}
    whole |= {asset_key(pipeline, sink) for sink in sinks}

    def is_table(path: tuple[str, ...]) -> bool:
        if len(path) == 5:
            return path[:2] == (pipeline, "source")
        return len(path) == 4 and path[1] in sinks and path[3].endswith(f"_{path[1]}")

    return [
        dg.AssetKey(path)
        for path in paths
        if dg.AssetKey(path) in whole or (path[0] == pipeline and is_table(path))
    ]


def tables_name(pipeline: str) -> str:
    """Return the name of the dynamic partitions that are tables: `shop.orders`."""
    return f"{pipeline}/tables"


def table_partition(table: str) -> str:
    """Return the partition of a table; characters that Dagster refuses are percent-encoded."""
    return _REFUSED.sub(lambda match: f"%{ord(match[0]):02X}", table)


def table_of(partition: str) -> str:
    """Return the full name of a partition's table."""
    return unquote(partition)


def chunks_name(pipeline: str) -> str:
    """Return the name of the dynamic partitions that are chunks: `shop.orders/000012`."""
    return f"{pipeline}/chunks"


def chunk_of(partition: str) -> tuple[str, int]:
    """Return the table and the number of a chunk's partition.

    Raises:
        NotAllowed: The partition is not one of a chunk.
    """
    table, _, number = partition.rpartition("/")
    if not table or not number.isdigit():
        raise NotAllowed(f"{partition!r} is not a chunk (expected table/number)")
    return table, int(number)


def partition_key(number: int) -> str:
    """Return the partition of a range; ten digits make the UI's sort order the log order."""
    return f"{number:010d}"


def range_number(partition: str) -> int:
    """Return the range number of a partition.

    Raises:
        NotAllowed: The partition is not one of a range.
    """
    if not partition.isdigit():
        raise NotAllowed(f"{partition!r} is not the number of a range")
    return int(partition)
