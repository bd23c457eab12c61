"""The list of benchmarks."""

from __future__ import annotations

import signal
from types import FrameType

import typer

from deltaforge_dagster.cli.bench.capture import capture
from deltaforge_dagster.cli.bench.debezium import debezium
from deltaforge_dagster.cli.bench.decode import decode
from deltaforge_dagster.cli.bench.drain import PAIRS, drain_command
from deltaforge_dagster.cli.bench.latency import latency
from deltaforge_dagster.cli.bench.seam import seam
from deltaforge_dagster.cli.bench.snapshot import snapshot

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure how fast the platform, or a part of it, is on this machine."""
    signal.signal(signal.SIGTERM, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    """Leave like with Ctrl-C: servers are ended, files removed."""
    raise KeyboardInterrupt


for _pair in PAIRS:
    app.command(_pair)(drain_command(_pair))
app.command()(capture)
app.command()(debezium)
app.command()(decode)
app.command()(latency)
app.command()(seam)
app.command()(snapshot)
