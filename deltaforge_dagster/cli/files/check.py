"""`deltaforge check`: check that the source and the sinks have everything that a pipeline needs."""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import typer
from rich.console import Console
from rich.text import Text

from deltaforge_dagster.cli.arguments import JsonOption, PipelineArgument, select_pipeline
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.installation.lake_jars import jars_finding
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, installed
from deltaforge_dagster.pipeline.control.owners import conflicts, rivalries
from deltaforge_dagster.pipeline.health.preflight import (
    confirm_findings,
    int96_findings,
    preflight_sinks,
    preflight_source,
    sink_destinations,
)
from deltaforge_dagster.resources.platform import build_source, existing_store
from deltaforge_dagster.sinks.registry import LakeSinkType, SinkContext, sink_types
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.store import StateStore

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def check(pipeline: PipelineArgument, *, json_output: JsonOption = False) -> None:
    """Check the source (settings, grants, log, tables, keys) and each sink; report what is missing.

    Each finding comes with the statement that fixes it. The command changes and writes nothing. The
    exit code is 1 if a problem prevents changes from being captured or delivered, or will soon lose
    changes.
    """
    installation = Settings.from_env()
    settings, loaded = select_pipeline(installation, pipeline)
    source = build_source(loaded.spec)
    try:
        with existing_store(settings) as store:
            findings = preflight_source(source, store, loaded)
            old_files = int96_findings(store, loaded)
            shared = _shared(installation, store, loaded)
    finally:
        source.close()
    findings += confirm_findings(loaded.spec, settings.journal_url, settings.state_url)
    declared = loaded.spec.spec
    names = {
        sink.config.id: sink_destinations(sink.config, declared.source) for sink in declared.sinks
    }
    if any(isinstance(sink_types()[sink.type], LakeSinkType) for sink in declared.sinks):
        findings.append(jars_finding(settings))
    context = SinkContext(loaded.name, brief=True, posted=loaded.is_stored)
    findings += preflight_sinks(declared.sinks, context, names)
    findings += [*old_files, *(Finding("other pipelines", "error", line) for line in shared)]
    failed = any(finding.level == "error" for finding in findings)
    if json_output:
        listed = [
            {
                "subject": finding.subject,
                "level": finding.level,
                "text": finding.text,
                "mend": _remedy(finding),
            }
            for finding in findings
        ]
        typer.echo(json.dumps({"pipeline": loaded.name, "ok": not failed, "findings": listed}))
    else:
        _print(loaded.name, findings)
    raise typer.Exit(1 if failed else 0)


def _remedy(finding: Finding) -> str | None:
    """Return a finding's remedy as one text."""
    return "; ".join(finding.commands) or None


def _shared(installation: Settings, store: StateStore | None, loaded: LoadedPipeline) -> list[str]:
    """Return the conflicts with other pipelines that use the same resources.

    The others are those that have run, and those of the installation's files.
    """
    claimed = [] if store is None else conflicts(store, loaded)
    others: list[AnyPipeline] = []
    with contextlib.suppress(SpecError):  # the folder of pipeline files does not exist
        others = installed(installation, store)
    named = rivalries(loaded, [other for other in others if isinstance(other, LoadedPipeline)])
    return list(dict.fromkeys([*claimed, *named]))


def _print(pipeline: str, findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        level = (f"{finding.level:<8}", _STYLES[finding.level])
        console.print(Text.assemble(level, f"{finding.subject}: {finding.text}"))
        if (remedy := _remedy(finding)) is not None:
            console.print(Text.assemble(" " * 8, ("fix: ", "dim"), remedy))
    levels = Counter(finding.level for finding in findings)
    console.print(
        f"{pipeline}: ok {levels['ok']}, notes {levels['note']}, "
        f"warnings {levels['warning']}, errors {levels['error']}"
    )
