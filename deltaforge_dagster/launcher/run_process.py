"""What a run's process executes, and what the fork server imports before it forks that process.

See `run_launcher`.
"""

from __future__ import annotations

from deltaforge_dagster.processes.arrow_memory import arrow_uses_malloc

arrow_uses_malloc()

# ruff: noqa: E402
from dagster._cli.api import execute_run_command

from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas
from deltaforge_dagster.processes.forked import share

_MODULES = (
    "dagster._core.storage.sqlite_storage",  # used by an instance on one machine
    "deltaforge_dagster.definitions",
    "deltaforge_dagster.assets.execution",
    "deltaforge_dagster.pipeline.run.leased_work",
    "deltaforge_dagster.resources.spark",
)
"""Modules that a run would otherwise import when it first needs them."""


def execute(arguments: str) -> None:
    """Execute a run of Dagster as `dagster api execute_run` does.

    Args:
        arguments: The serialized `ExecuteRunArgs`, as that command takes them.
    """
    execute_run_command.main([arguments], standalone_mode=False)


arrow_without_pandas()
share(_MODULES)
