"""The arguments that commands share, and the pipelines and the state store that they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, SpecError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, installed, kept
from deltaforge_dagster.resources.platform import installed_pipelines
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore


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


def select_pipeline(settings: Settings, pipeline: str) -> tuple[Settings, LoadedPipeline]:
    """Return the pipeline with that name, or the one in the file at that path.

    If a path was given, the returned settings have `pipelines` set to that file alone.

    Raises:
        NotAllowed: There is no such pipeline; the message lists those that exist.
        SpecError: Its file is invalid.
    """
    is_file = Path(pipeline).suffix in {".yaml", ".yml"}  # names may end like this, too
    if is_file and Path(pipeline).exists():
        settings = replace(settings, pipelines=Path(pipeline).absolute())
        (only,) = load_pipelines(settings.pipelines, strict=settings.strict)
    else:
        pipelines = {candidate.name: candidate for candidate in installed_pipelines(settings)}
        if pipeline not in pipelines:
            names = ", ".join(sorted(pipelines)) or "none"
            prefix = f"no file {pipeline}, and no" if is_file else "no"
            raise NotAllowed(
                f"{prefix} pipeline {pipeline!r} in {settings.pipelines} (there is: {names})"
            )
        only = pipelines[pipeline]
    if isinstance(only, BrokenPipeline):
        raise only.error
    return settings, only


@contextmanager
def opened_store() -> Iterator[StateStore]:
    """Yield the installation's state store, which must exist.

    Raises:
        NotAllowed: The store does not exist because nothing has run yet, or it is in another
            process's memory.
    """
    url = Settings.from_env().state_url
    if url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: only the run itself can see that state")
    file = url.removeprefix("sqlite:///")
    if file != url and not Path(file).exists():
        raise NotAllowed(
            f"no state in {file}: nothing has run here yet (deltaforge dev, deltaforge run), or "
            "DELTAFORGE_HOME is another directory"
        )
    store = StateStore.open(url)
    try:
        yield store
    finally:
        store.close()


def installed_files(store: StateStore) -> list[AnyPipeline]:
    """Return the pipelines of the pipeline files and of the state store.

    If the folder of files cannot be read, return only those of the store: pipelines that have run
    were then started with the path of their file (`catalog.of_row`).
    """
    settings = Settings.from_env()
    try:
        return installed(settings, store)
    except SpecError:
        return kept(store, strict=settings.strict)


def known_pipeline(store: StateStore, name: str) -> PipelineRow:
    """Return a pipeline's row by name.

    Raises:
        NotAllowed: The store does not have it; the message lists those that it has.
    """
    row = store.pipelines.get(name)
    if row is None:
        names = ", ".join(pipeline.name for pipeline in store.pipelines.read()) or "none"
        raise NotAllowed(f"no pipeline {name!r} in the state store (there is: {names})")
    return row
