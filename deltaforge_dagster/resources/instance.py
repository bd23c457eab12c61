"""The Dagster instance that commands without a daemon write to."""

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
sensors:  # of all pipelines beside each other
  use_threads: true
  num_workers: 8
"""


def dagster_home(settings: Settings) -> Path:
    """Return `DAGSTER_HOME`, or a directory under the installation's home, made if need be.

    Our own directory gets a `dagster.yaml` with the settings we recommend; an existing one and a
    `DAGSTER_HOME` that was given are left alone.
    """
    given = os.environ.get("DAGSTER_HOME")
    if given:
        return Path(given)
    home = settings.home / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    configuration = home / "dagster.yaml"
    if not configuration.exists():
        configuration.write_text(_INSTANCE_SETTINGS)
    return home


@contextmanager
def local_instance(settings: Settings) -> Iterator[dg.DagsterInstance]:
    """Lend the instance of `dagster_home`; an ephemeral one when the state lives in memory."""
    if settings.state_url == "memory":
        with dg.DagsterInstance.ephemeral() as instance:
            yield instance
        return
    with dg.DagsterInstance.from_config(str(dagster_home(settings))) as instance:
        yield instance
