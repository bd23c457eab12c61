"""`deltaforge plan`: show what a pipeline file means and would change, before it is used."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import dagster as dg
import typer
import yaml
from rich.console import Console
from rich.text import Text

from deltaforge_dagster.assets.names import SharedNames, job_name, snapshot_job_name
from deltaforge_dagster.cli.arguments import JsonOption, PipelineArgument, select_pipeline
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.secrets import MASK
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.config.sources import SourceBlock
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.control.secret_changes import changed_secrets, described
from deltaforge_dagster.pipeline.control.spec_changes import (
    NEXT_RUN,
    PipelineStatus,
    SpecChange,
    snapshot_due,
    spec_changes,
)
from deltaforge_dagster.pipeline.control.specs import CodeParts, code_parts, kept_form, noted_spec
from deltaforge_dagster.pipeline.health.preflight import sink_destinations
from deltaforge_dagster.resources.platform import existing_store
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.state.store import StateStore

_KINDS = {"added": "green", "removed": "red", "renamed": "yellow", "changed": "yellow"}


def plan(pipeline: PipelineArgument, *, json_output: JsonOption = False) -> None:
    """Show the effective content of a pipeline file, what it creates, and what it changes.

    The file is compared with the version that the live run uses, else with the version that the
    pipeline last ran with or its sensor last saw. The command reads only the state store and
    changes nothing. Secrets are shown as `***`, scripts as their hashes.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    with existing_store(settings) as store:
        compared = _compared(store, loaded)
    content = kept_form(loaded.spec)
    planned = {
        "pipeline": loaded.name,
        "path": str(loaded.path),
        "hash": loaded.hash,
        "warnings": list(loaded.warnings),
        "spec": content,
        "creates": _creations(settings, loaded),
        **compared,
        "snapshot": snapshot_due(content, known=compared["known"] != "new")
        if compared["known"] != "the same"
        else None,
    }
    if json_output:
        typer.echo(json.dumps(planned))
    else:
        _print(planned)


def _compared(store: StateStore | None, loaded: LoadedPipeline) -> dict[str, Any]:
    """Compare the file with the known pipeline.

    Return the fields `known`, `changes`, `waits` (what the changes wait for) and `stale` (the
    assets that become stale) of the JSON output.
    """
    nothing: dict[str, Any] = {"changes": [], "waits": None, "stale": []}
    row = None if store is None else store.pipelines.get(loaded.name)
    if store is None or row is None:
        return {"known": "new", **nothing}
    working = _live_run(store, loaded.name)
    before = row.spec_hash if working is None else working.spec_hash
    secrets = changed_secrets(store, loaded)
    if before == loaded.hash and not secrets:
        return {"known": "the same", **nothing}
    noted = noted_spec(store, loaded.name, before)
    if noted is None:
        return {"known": "another, of a version that kept no specs", **nothing}
    status = PipelineStatus(row, store.checkpoints.read(loaded.name))
    changes = spec_changes(noted.content, kept_form(loaded.spec), status)
    seen = tuple(change.path for change in changes)
    changes += [
        SpecChange(path, "changed", MASK, MASK, f"{described(path)} changed; {NEXT_RUN}")
        for path in secrets
        if not path.startswith(seen)
    ]
    return {
        "known": "another",
        "changes": [dataclasses.asdict(change) for change in changes],
        "waits": None if working is None else working.text,
        "stale": _stale(noted.parts, code_parts(loaded.spec)) if row.next_range > 1 else [],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _LiveRun:
    """A live run, and the hash of the file that it uses."""

    run_id: str
    spec_hash: str

    @property
    def text(self) -> str:
        """What changes of the file have to wait for."""
        return (
            f"run {self.run_id} uses the old file; within seconds of a change it closes its range "
            "and ends, and the next run uses the new file"
        )


def _live_run(store: StateStore, pipeline: str) -> _LiveRun | None:
    """Return the run that holds the lease and has begun a range, None if there is none."""
    lease = store.leases.get(pipeline)
    opened = store.ranges.read(pipeline, state="open", newest_first=True, limit=1)
    if lease is None or lease.run_id is None or not opened or not lease.active_at(store.now()):
        return None
    # A range that a dead run left open has the dead run's epoch.
    return _LiveRun(lease.run_id, opened[0].spec_hash) if opened[0].epoch == lease.epoch else None


def _stale(before: CodeParts, after: CodeParts) -> list[str]:
    """Return the assets whose existing ranges become stale, because their code version changes."""
    sinks = [sink for sink in after.sinks if sink in before.sinks]
    return [
        CHANGES if sink is None else sink
        for sink in (None, *sinks)
        if before.version(sink) != after.version(sink)
    ]


def _print(planned: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)

    def heading(text: str) -> None:
        console.print(Text(text, "bold"))

    for warning in planned["warnings"]:
        console.print(Text.assemble(("warning ", "yellow"), warning))
    heading("Effective file, with every default")
    console.print(Text(_as_yaml(planned["spec"])))
    heading("What it creates and uses")
    console.print(Text(_as_yaml(planned["creates"])))
    heading("What it changes")
    name, status = planned["pipeline"], planned["known"]
    if not planned["changes"]:
        messages = {
            "new": f"  {name} is new: it has not run yet, and its sensor has not seen it.",
            "the same": f"  Nothing: {name} runs with the same file.",
            "another": (
                f"  Nothing visible of {name}: only the spelling of scripts differs, or a salt."
            ),
        }
        console.print(messages.get(status, f"  Not known: {name} ran with {status}."))
    for change in planned["changes"]:
        values = "" if change["kind"] == "removed" else f": {_value(change['after'])}"
        if change["kind"] in {"changed", "renamed"}:
            values = f": {_value(change['before'])} -> {_value(change['after'])}"
        console.print(
            Text.assemble(
                "  ", (change["kind"], _KINDS[change["kind"]]), f" {change['path']}{values}"
            )
        )
        console.print(Text(f"      {change['consequence']}", "dim"))
    if planned["waits"] is not None:
        console.print(f"  Waits: {planned['waits']}.")
    if planned["snapshot"] is not None:
        console.print(f"  Automatically: {planned['snapshot']}.")
    if planned["stale"]:
        console.print(f"  Existing ranges become stale in Dagster: {', '.join(planned['stale'])}")


def _as_yaml(content: Any) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"  {line}\n" for line in text.splitlines())


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _creations(settings: Settings, loaded: LoadedPipeline) -> dict[str, Any]:
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
                partition.name
                for partition in partitions
                if isinstance(partition, dg.DynamicPartitionsDefinition) and partition.name
            }
        ),
        "jobs": jobs,
        "sensors": [
            sensor.name
            for sensor in repository.sensor_defs
            if sensor.name == SharedNames().alerts
            or any(target.job_name in jobs for target in sensor.targets)
        ],
        "schedules": [
            f"{schedule.name} ({schedule.cron_schedule})"
            for schedule in repository.schedule_defs
            if schedule.job_name in jobs
        ],
    }


def _of_source(source: SourceBlock, pipeline: str) -> dict[str, Any]:
    config = source.config
    names = source_types()[source.type].names(config, pipeline)
    return {**names, "tables": list(config.tables) or ["every table of users"]}


def _of_sink(sink: SinkBlock, pipeline: str, source: SourceBlock) -> dict[str, Any]:
    config, kind = sink.config, sink_types()[sink.type]
    return {
        kind.destinations: sink_destinations(config, source),
        **kind.names(config, pipeline),
    }
