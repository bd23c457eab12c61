"""Find the pipeline that a command's argument names, by name or by file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.resources.platform import installed_pipelines


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
