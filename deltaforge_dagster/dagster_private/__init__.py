"""All that is used of Dagster's private modules, as read in Dagster 1.13; with each, why.

Nothing of Dagster is replaced: these names are called, inherited from, or used in annotations. A
release of Dagster that moves one of them fails here. Modules that `import dagster` does not load
anyway are imported by the functions that need them, or named in `storage`, which definitions do not
import.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

# `dg.define_asset_job` returns it, and it has no public name: for annotations.
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

# The run id of events that were reported without a run: retention deletes those only.
from dagster._core.instance import RUNLESS_RUN_ID

# The settings of an instance. A command replaces one of them for its own process, which the public
# way, a `dagster.yaml` of its own, cannot do for an instance that exists.
from dagster._core.instance.ref import InstanceRef

# What a run launcher gets, and how it recognizes runs of our definitions.
from dagster._core.launcher import LaunchRunContext
from dagster._core.origin import JobPythonOrigin

# What `DagsterInstance.event_log_storage.get_latest_asset_check_execution_by_key` returns.
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord

# An argument of `from_config_value`, which every class that `dagster.yaml` names has.
from dagster._serdes import ConfigurableClassData

# The text by which Dagster explains an exit code, so that our runs fail with the same one.
from dagster._utils import get_run_crash_explanation

# The next time of a schedule, by the cron library that Dagster contains.
from dagster._utils.schedules import get_next_cron_tick

__all__ = [
    "DAEMON_MODULES",
    "RUNLESS_RUN_ID",
    "RUN_MODULES",
    "AssetCheckExecutionRecord",
    "ConfigurableClassData",
    "InstanceRef",
    "JobPythonOrigin",
    "LaunchRunContext",
    "UnresolvedAssetJobDefinition",
    "execute_run",
    "get_next_cron_tick",
    "get_run_crash_explanation",
    "run_arguments",
    "run_daemon",
]

RUN_MODULES = ("dagster._cli.api", "dagster._core.storage.sqlite_storage")
"""Modules that a run would import when it first needs them; storage on one machine included."""

DAEMON_MODULES = ("dagster._cli", *RUN_MODULES, "dagster._daemon.cli", "dagster._grpc.proxy_server")
"""Modules of Dagster's processes, which `deltaforge dev` imports before it forks them."""


def run_arguments(origin: JobPythonOrigin, run_id: str, instance: InstanceRef) -> str:
    """Return what `dagster api execute_run` takes."""
    from dagster import serialize_value
    from dagster._grpc.types import ExecuteRunArgs

    return serialize_value(ExecuteRunArgs(origin, run_id, instance))


def execute_run(arguments: str) -> None:
    """Execute a run in this process, as `dagster api execute_run` does; see `run_arguments`."""
    from dagster._cli.api import execute_run_command

    execute_run_command.main([arguments], standalone_mode=False)


def run_daemon() -> None:
    """Be Dagster's daemon, with the arguments of this process."""
    from dagster._daemon.cli import main

    main()
