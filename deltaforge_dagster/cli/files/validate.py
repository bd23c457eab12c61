"""`deltaforge validate` and `schema`: check pipeline files, and print their format.

Neither connects to anything.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from deltaforge_dagster.config.file.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_files,
    load_pipelines,
    pipeline_files,
)
from deltaforge_dagster.config.file.schema import pipeline_schema, reference
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.control.owners import rivalries
from deltaforge_dagster.pipeline.process.chains import build_problems


def validate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help=(
                "Pipeline files, or directories of them. "
                "Default: DELTAFORGE_PIPELINES (./pipelines)."
            ),
        ),
    ] = None,
    *,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of lines.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            envvar="DELTAFORGE_STRICT", help="Treat unknown fields as problems, not as warnings."
        ),
    ] = False,
) -> None:
    """Check pipeline files and print every problem and warning, each with its line.

    The command connects to nothing and writes nothing. The exit code is 0 if every file is valid,
    even with warnings, and 1 otherwise.
    """
    files: dict[Path, None] = {}
    missing: list[str] = []
    for path in paths or [Settings.from_env().pipelines]:
        try:
            yaml_files = pipeline_files(path)
        except SpecError as error:
            missing += error.problems
            continue
        if not yaml_files:
            missing.append(f"{path}: holds no *.yaml or *.yml file")
        files |= dict.fromkeys(yaml_files)
    pipelines = _with_rivalries(
        [_checked(pipeline) for pipeline in load_files(files, strict=strict)]
    )
    valid = not missing and all(isinstance(pipeline, LoadedPipeline) for pipeline in pipelines)
    if json_output:
        typer.echo(
            json.dumps(
                {
                    "valid": valid,
                    "problems": missing,
                    "pipelines": [_as_json(pipeline) for pipeline in pipelines],
                }
            )
        )
    else:
        _print(pipelines, missing)
    raise typer.Exit(0 if valid else 1)


def _checked(pipeline: LoadedPipeline | BrokenPipeline) -> LoadedPipeline | BrokenPipeline:
    """Check a valid file further, with the sinks' client libraries and the script engine."""
    if isinstance(pipeline, BrokenPipeline):
        return pipeline
    problems = [f"{pipeline.path}: {problem}" for problem in build_problems(pipeline.spec)]
    if not problems:
        return pipeline
    return BrokenPipeline(pipeline.path, pipeline.name, SpecError(*problems), pipeline.warnings)


def _with_rivalries(
    pipelines: list[LoadedPipeline | BrokenPipeline],
) -> list[LoadedPipeline | BrokenPipeline]:
    """Return the pipelines; those that claim a resource of another pipeline become broken.

    They are compared with one another and with the installation's other files.
    """
    checked = {loaded.path: loaded for loaded in pipelines if isinstance(loaded, LoadedPipeline)}
    with contextlib.suppress(SpecError):  # the folder of pipeline files does not exist
        for other in load_pipelines(Settings.from_env().pipelines):
            resolved = {path.resolve() for path in checked if path is not None}
            if (
                isinstance(other, LoadedPipeline)
                and other.path is not None
                and other.path.resolve() not in resolved
            ):
                checked[other.path] = other
    compared: list[LoadedPipeline | BrokenPipeline] = []
    for pipeline in pipelines:
        lines = (
            rivalries(pipeline, checked.values()) if isinstance(pipeline, LoadedPipeline) else []
        )
        broken = BrokenPipeline(pipeline.path, pipeline.name, SpecError(*lines), pipeline.warnings)
        compared.append(broken if lines else pipeline)
    return compared


def _problems(pipeline: LoadedPipeline | BrokenPipeline) -> list[str]:
    return list(pipeline.error.problems) if isinstance(pipeline, BrokenPipeline) else []


def _as_json(pipeline: LoadedPipeline | BrokenPipeline) -> dict[str, object]:
    return {
        "path": str(pipeline.path),
        "name": pipeline.name,
        "valid": isinstance(pipeline, LoadedPipeline),
        "problems": _problems(pipeline),
        "warnings": list(pipeline.warnings),
    }


def _print(pipelines: list[LoadedPipeline | BrokenPipeline], missing: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for problem in missing:
        console.print(Text.assemble(("error   ", "bold red"), problem))
    for pipeline in pipelines:
        for problem in _problems(pipeline):
            console.print(Text.assemble(("error   ", "bold red"), problem))
        for warning in pipeline.warnings:
            console.print(Text.assemble(("warning ", "yellow"), warning))
        if isinstance(pipeline, LoadedPipeline):
            spec = pipeline.spec.spec
            sinks = ", ".join(sink.config.id for sink in spec.sinks)
            text = f"{pipeline.path}: pipeline {pipeline.name}, {spec.source.type} to {sinks}"
            console.print(Text.assemble(("ok      ", "green"), text))


def schema(
    *,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file instead of standard output.")
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print a Markdown page that explains every field instead."),
    ] = False,
) -> None:
    """Print the format of pipeline files as JSON Schema (draft 2020-12).

    Editors that use the YAML language server complete and check a file whose first line is
    `# yaml-language-server: $schema=pipeline.schema.json` (a path or a URL).
    """
    text = reference() if markdown else json.dumps(pipeline_schema(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, "utf-8")
