"""The list of benchmarks."""

from __future__ import annotations

import signal

import typer

from deltaforge_dagster.installation.process import interrupt_once
from deltaforge_lab.bench.capture import capture
from deltaforge_lab.bench.debezium import debezium
from deltaforge_lab.bench.decode import decode
from deltaforge_lab.bench.drain import PAIRS
from deltaforge_lab.bench.latency import latency
from deltaforge_lab.bench.pairs import drain_command
from deltaforge_lab.bench.seam import seam
from deltaforge_lab.bench.snapshot import snapshot
from deltaforge_lab.bench.tables import TABLE_PAIRS, changes_of_rows, table_command
from deltaforge_lab.bench.typed import typed

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure how fast the platform, or a part of it, is on this machine."""
    before = signal.signal(signal.SIGTERM, interrupt_once)  # stops servers, removes files
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


for _pair in PAIRS:
    app.command(_pair)(drain_command(_pair))
for _pair in TABLE_PAIRS:
    app.command(_pair)(table_command(_pair))
app.command()(capture)
app.command("changes")(changes_of_rows)
app.command()(debezium)
app.command()(decode)
app.command()(latency)
app.command()(seam)
app.command()(snapshot)
app.command()(typed)
