"""Arguments and options that many commands have, and how a shell completes them."""

from __future__ import annotations

from typing import Annotated

import typer

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.resources.installed import installed_pipelines


def _names(incomplete: str) -> list[str]:
    """Return the pipelines of the installation whose names begin so; a shell asks for them."""
    try:
        names = [one.name for one in installed_pipelines(Settings.from_env())]
    except (DeltaforgeError, OSError):  # there is nobody to tell it to while a line is typed
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
