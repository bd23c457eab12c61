"""Arguments and options that several commands share, and their shell completion."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.resources.platform import installed_pipelines


def _names(incomplete: str) -> list[str]:
    """Return the installed pipelines whose names begin with `incomplete`, for shell completion."""
    try:
        names = [pipeline.name for pipeline in installed_pipelines(Settings.from_env())]
    except (DeltaforgeError, OSError):  # errors cannot be reported during completion
        return []
    return [name for name in names if name.startswith(incomplete)]


NameArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline.", autocompletion=_names)
]

PipelineArgument = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="Name of a pipeline, or its file.", autocompletion=_names
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
