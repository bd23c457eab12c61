"""Dagster's daemon, as `deltaforge dev` runs it: it starts the fork server of runs at once.

So the first run does not have to wait for the fork server. This is a `__main__` module, because
`multiprocessing` imports any other main module again in each process that it starts.
"""

from __future__ import annotations

from deltaforge_dagster.dagster_private import run_daemon
from deltaforge_dagster.installation import run_launcher

if __name__ == "__main__":
    run_launcher.begin()
    run_daemon()
