"""Dagster's daemon, as `deltaforge dev` runs it: before it begins, it starts the process that runs are forked from (`run_launcher`).

Later it has threads, and must not be forked any more.
"""

from __future__ import annotations

from dagster._daemon.cli import main

from deltaforge_dagster.launcher import run_launcher

if __name__ == "__main__":
    run_launcher.begin()
    main()
