"""Change data capture with Dagster and Spark: one YAML file is one pipeline.

What a Dagster project uses is here: the components `PipelineComponent` and `PipelinesComponent`,
the function `project.definitions.pipeline_definitions`, and `DeltaforgeTranslator` with
`PipelineAsset`. It is imported when it is first used, because every project in an environment
imports this package to see which components it has.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "DeltaforgeTranslator": "deltaforge_dagster.assets.translator",
    "PipelineAsset": "deltaforge_dagster.assets.translator",
    "PipelineComponent": "deltaforge_dagster.project.components",
    "PipelinesComponent": "deltaforge_dagster.project.components",
    "pipeline_definitions": "deltaforge_dagster.project.definitions",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
