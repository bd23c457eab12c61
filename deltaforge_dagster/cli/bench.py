"""`deltaforge bench`: measurements that compare machines, each with its raw limit."""

from __future__ import annotations

import typer

from deltaforge_dagster.cli.bench_seam import seam

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure how fast parts of the platform are on this machine."""


app.command()(seam)
