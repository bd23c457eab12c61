"""The Dagster instance that commands use, also without a daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from deltaforge_dagster.config.settings import Settings

_INSTANCE_SETTINGS = """\
telemetry:
  enabled: false
nux:
  enabled: false
concurrency:
  runs:
    max_concurrent_runs: 10
run_queue:  # looked through every second instead of every five; runs start beside each other
  dequeue_interval_seconds: 1
  dequeue_use_threads: true
  dequeue_num_workers: 4
sensors:  # of all pipelines beside each other; half of them may watch their sources
  use_threads: true
  num_workers: 16
run_launcher:  # forks the processes of runs, which start in a third of the time
  module: deltaforge_dagster.installation.run_launcher
  class: ForkedRunLauncher
"""


def dagster_home(settings: Settings) -> Path:
    """Return `DAGSTER_HOME`, or the directory `dagster` in the installation's home.

    The latter is created if it is missing, and gets a `dagster.yaml` with recommended settings,
    unless it has one. A `DAGSTER_HOME` set in the environment is not changed.
    """
    configured = os.environ.get("DAGSTER_HOME")
    if configured:
        return Path(configured)
    home = settings.home / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    configuration = home / "dagster.yaml"
    if not configuration.exists():
        configuration.write_text(_INSTANCE_SETTINGS)
    return home


@contextmanager
def local_instance(settings: Settings) -> Iterator[dg.DagsterInstance]:
    """Yield the instance of `dagster_home`, or an ephemeral one if the state store is in memory."""
    if settings.state_url == "memory":
        with dg.DagsterInstance.ephemeral() as instance:
            yield instance
        return
    with dg.DagsterInstance.from_config(str(dagster_home(settings))) as instance:
        yield instance
