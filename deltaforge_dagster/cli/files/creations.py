"""What a pipeline creates when it is loaded and run: names in Dagster, in the state store, on servers."""

from __future__ import annotations

from typing import Any

import dagster as dg

from deltaforge_dagster.assets.names import job_name, snapshot_job_name
from deltaforge_dagster.cli.files.destinations import destinations
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.config.sinks.base import SinkBlock
from deltaforge_dagster.config.sources.base import SourceBlock
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.sensors.alerts import SENSOR as ALERTS
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types


def creations(settings: Settings, loaded: LoadedPipeline) -> dict[str, Any]:
    """Return the names that the pipeline creates or uses, by place, as plain JSON values."""
    sinks = loaded.spec.spec.sinks
    source = loaded.spec.spec.source
    return {
        "dagster": _in_dagster(settings, loaded),
        "state store": {
            "pipeline": loaded.name,
            "checkpoints": [sink.config.id for sink in sinks],
        },
        "source": _of_source(source, loaded.name),
        "sinks": {sink.config.id: _of_sink(sink, loaded.name, source) for sink in sinks},
    }


def _in_dagster(settings: Settings, loaded: LoadedPipeline) -> dict[str, Any]:
    definitions = build_definitions(settings, [loaded])
    graph = definitions.resolve_asset_graph()
    assets = sorted(graph.get_all_asset_keys())
    partitions = [graph.get(key).partitions_def for key in assets]
    repository = definitions.get_repository_def()
    jobs = [job_name(loaded.name), snapshot_job_name(loaded.name)]
    return {
        "assets": [key.to_user_string() for key in assets],
        "partitions": sorted(
            {
                one.name
                for one in partitions
                if isinstance(one, dg.DynamicPartitionsDefinition) and one.name
            }
        ),
        "jobs": jobs,
        "sensors": [
            one.name
            for one in repository.sensor_defs
            if one.name == ALERTS or any(target.job_name in jobs for target in one.targets)
        ],
        "schedules": [
            f"{one.name} ({one.cron_schedule})"
            for one in repository.schedule_defs
            if one.job_name in jobs
        ],
    }


def _of_source(source: SourceBlock, pipeline: str) -> dict[str, Any]:
    config = source.config
    names = source_types()[source.type].names(config, pipeline)
    return {**names, "tables": list(config.tables) or ["every table of users"]}


def _of_sink(sink: SinkBlock, pipeline: str, source: SourceBlock) -> dict[str, Any]:
    config, kind = sink.config, sink_types()[sink.type]
    return {
        kind.destinations: destinations(config.destination, source),
        **kind.names(config, pipeline),
    }
