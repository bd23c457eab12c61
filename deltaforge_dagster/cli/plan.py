"""`deltaforge plan`: what a pipeline file means, and what it would change, before anything runs with it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from deltaforge_dagster.cli.creations import creations
from deltaforge_dagster.cli.options import JsonOption, PipelineArgument
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.code_versions import CodeParts, code_parts
from deltaforge_dagster.pipeline.publication import CHANGES
from deltaforge_dagster.pipeline.spec_changes import Standing, snapshot_due, spec_changes
from deltaforge_dagster.pipeline.specs import kept_form, noted_spec
from deltaforge_dagster.resources.platform import existing_store
from deltaforge_dagster.state.store import StateStore

_KINDS = {"added": "green", "removed": "red", "renamed": "yellow", "changed": "yellow"}


def plan(pipeline: PipelineArgument, *, json_output: JsonOption = False) -> None:
    """Show a file's effective content, what it makes, and what it changes about the known pipeline.

    Compared is what the pipeline last ran with, or was seen with by its sensor. No server but the state
    store is asked, and nothing is changed. Secrets are `***`, scripts are their hashes.
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
        "creates": creations(settings, loaded),
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
    """Return what is known of the pipeline, the changes, and the assets that become stale."""
    row = None if store is None else store.pipeline(loaded.name)
    if store is None or row is None:
        return {"known": "new", "changes": [], "stale": []}
    if row.spec_hash == loaded.hash:
        return {"known": "the same", "changes": [], "stale": []}
    noted = noted_spec(store, loaded.name, row.spec_hash)
    if noted is None:
        return {"known": "another, of a version that kept no specs", "changes": [], "stale": []}
    standing = Standing(row, store.checkpoints(loaded.name))
    found = spec_changes(noted.content, kept_form(loaded.spec), standing)
    return {
        "known": "another",
        "changes": [dataclasses.asdict(one) for one in found],
        "stale": _stale(noted.parts, code_parts(loaded.spec)) if row.next_range > 1 else [],
    }


def _stale(before: CodeParts, after: CodeParts) -> list[str]:
    """Return the assets whose ranges of now another file will have made."""
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
    heading("What it makes and uses")
    console.print(Text(_as_yaml(planned["creates"])))
    heading("What it changes")
    name, known = planned["pipeline"], planned["known"]
    if not planned["changes"]:
        said = {
            "new": f"  {name} is new: it has not run yet, nor has its sensor seen it.",
            "the same": f"  Nothing: {name} runs with the same file.",
            "another": f"  Nothing that shows: secrets of {name} are others, or scripts' spelling.",
        }
        console.print(said.get(known, f"  Not known: {name} ran with {known}."))
    for one in planned["changes"]:
        values = "" if one["kind"] == "removed" else f": {_value(one['after'])}"
        if one["kind"] in {"changed", "renamed"}:
            values = f": {_value(one['before'])} -> {_value(one['after'])}"
        console.print(
            Text.assemble("  ", (one["kind"], _KINDS[one["kind"]]), f" {one['path']}{values}")
        )
        console.print(Text(f"      {one['consequence']}", "dim"))
    if planned["snapshot"] is not None:
        console.print(f"  By itself: {planned['snapshot']}.")
    if planned["stale"]:
        console.print(
            f"  Ranges that are there become stale in Dagster: {', '.join(planned['stale'])}"
        )


def _as_yaml(content: Any) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"  {line}\n" for line in text.splitlines())


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
