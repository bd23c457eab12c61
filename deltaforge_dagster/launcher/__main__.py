"""Dagster's daemon, as `deltaforge dev` runs it: it starts the process that runs are forked from when it begins.

The first run then need not wait for it. A `__main__` module, because `multiprocessing` imports any other main module
again in each process that it starts.
"""

from __future__ import annotations

from dagster._daemon.cli import main

from deltaforge_dagster.launcher import run_launcher

if __name__ == "__main__":
    run_launcher.begin()
    main()
