"""What a run's process executes, and what the fork server imports before it forks that process.

See `run_launcher`.
"""

from __future__ import annotations

from deltaforge_dagster.installation.arrow_memory import arrow_uses_malloc

arrow_uses_malloc()

# ruff: noqa: E402
from deltaforge_dagster.dagster_private import RUN_MODULES
from deltaforge_dagster.installation.forked import share
from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas

_MODULES = (
    *RUN_MODULES,
    "deltaforge_dagster.definitions",
    "deltaforge_dagster.assets.execution",
    "deltaforge_dagster.pipeline.run.leased_work",
    "deltaforge_dagster.resources.spark",
)
"""Modules that a run would otherwise import when it first needs them."""


arrow_without_pandas()
share(_MODULES)
