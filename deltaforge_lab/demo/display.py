"""The display of the demo: progress while it runs, and the summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltaforge_dagster.state.records import RangeRow
from deltaforge_lab.demo.proof import SinkVerdict

_SHOWN_RANGES = 5


def progress(
    *,
    written: int,
    captured: int,
    arrived: Mapping[str, int],
    ranges: Sequence[RangeRow],
    ui: str,
) -> RenderableType:
    """Return the progress display; `ranges` are sorted newest first."""
    counts = Table(box=None, pad_edge=False)
    lines = {"written": written, "captured": captured}
    lines |= {f"in {sink}": count for sink, count in arrived.items()}
    for name in lines:
        counts.add_column(name, justify="right")
    counts.add_column("lag", justify="right")
    lag = written - min(arrived.values(), default=0)
    counts.add_row(*(f"{count:,}" for count in lines.values()), f"{lag:,}")
    newest = Table(box=None, pad_edge=False)
    for name in ("range", "state", "changes", "segments", "seconds"):
        newest.add_column(name, justify="right")
    for one in ranges[:_SHOWN_RANGES]:
        newest.add_row(
            f"{one.range}",
            one.state,
            f"{one.rows:,}",
            f"{one.last_segment - one.first_segment + 1}",
            f"{one.closed_at - one.opened_at:.1f}" if one.closed_at else "",
        )
    return Group("", counts, "", newest, "", Text(f"Dagster's UI: {ui}"))


def summary(
    verdicts: Mapping[str, SinkVerdict], figures: Mapping[str, str], *, good: bool
) -> RenderableType:
    """Return the summary: one line per sink, then the figures, then the verdict in one sentence."""
    table = Table()
    table.add_column("sink")
    for name in ("delivered", "lost", "duplicated", "out of order", "wrong"):
        table.add_column(name, justify="right")
    for sink, verdict in verdicts.items():
        counts = (
            verdict.delivered,
            verdict.lost,
            verdict.duplicated,
            verdict.out_of_order,
            verdict.wrong,
        )
        table.add_row(sink, *(f"{count:,}" for count in counts))
    rest = Table.grid(padding=(0, 2))
    for name, value in figures.items():
        rest.add_row(name, value)
    sentence = (
        Text("Every change arrived, once, in order per key, as written.", style="bold green")
        if good
        else Text("Not every change arrived once, in order, as written.", style="bold red")
    )
    return Group(table, rest, sentence)
