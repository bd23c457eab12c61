"""`deltaforge warm`: machine code before the first run needs it."""

from __future__ import annotations

import time

import typer

from deltaforge_dagster.pipeline import messages
from deltaforge_dagster.sinks import resp
from deltaforge_dagster.sources.mysql import made_up as mysql
from deltaforge_dagster.sources.postgres import decoder as postgres


def warm() -> None:
    """Compile every kernel and keep the machine code, so that no run waits for it.

    It is kept in NUMBA_CACHE_DIR, else beside the package; the same user's later processes find it
    there. Takes one or two minutes the first time.
    """
    started = time.monotonic()
    postgres.warm()
    mysql.warm()
    messages.warm()
    resp.warm()
    typer.echo(f"Kernels are ready ({time.monotonic() - started:.1f} s).")
