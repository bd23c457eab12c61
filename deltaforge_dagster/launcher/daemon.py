"""Dagster's daemon, as `deltaforge dev` runs it: `python -m dagster._daemon`, with runs that are forks of this process's forks.

The daemon has threads, and could not be forked itself.
"""

from __future__ import annotations

from dagster._daemon.cli import main

from deltaforge_dagster.launcher.run_launcher import start_fork_server

if __name__ == "__main__":
    start_fork_server()
    main()
