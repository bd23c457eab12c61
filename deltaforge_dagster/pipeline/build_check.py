"""What is wrong with a pipeline that only its libraries can tell, without connecting to anything."""

from __future__ import annotations

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.sinks.build import problems


def build_problems(spec: PipelineSpec) -> list[str]:
    """Return what keeps a pipeline's sinks or processors from being built, one line each.

    The sinks' libraries read their settings, and the engine of scripts the scripts; a function of Python is
    imported.
    """
    found = problems(spec)
    for number, problem in chain_of(spec).problems():
        found.append(f"spec.processors[{number}]: {problem}")
    return found
