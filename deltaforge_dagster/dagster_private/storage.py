"""What is used of Dagster's storage: what retention deletes, and where a run's output goes.

Importing it takes half a second, so only what works with the storage does; see the package.
"""

from __future__ import annotations

# The states of ticks: `DagsterInstance.purge_ticks` takes them.
from dagster._core.scheduler.instigation import TickStatus

# Where a run's output goes. The base class is public in the documentation, its parts are not.
from dagster._core.storage.compute_log_manager import CapturedLogContext, ComputeIOType

# Events without a run have no public function that deletes them (`sensors.history`).
from dagster._core.storage.event_log import SqlEventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager

__all__ = [
    "AssetCheckExecutionsTable",
    "AssetEventTagsTable",
    "CapturedLogContext",
    "ComputeIOType",
    "LocalComputeLogManager",
    "SqlEventLogStorage",
    "SqlEventLogStorageTable",
    "SqliteEventLogStorage",
    "TickStatus",
]
