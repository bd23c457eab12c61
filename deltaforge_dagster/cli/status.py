"""`deltaforge status` and `deltaforge ranges`: what the state store says, asking no server."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deltaforge_dagster.cli.output import duration, moment, position, size
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.pipeline.committed import attach_command
from deltaforge_dagster.state.records import CheckpointRow, HoldRow, LeaseRow, PipelineRow, RangeRow
from deltaforge_dagster.state.store import StateStore

_WANT_STYLES = {"running": "green", "paused": "yellow", "stopped": "red"}


def status() -> None:
    """Show every pipeline: how far it is captured and delivered, who works on it, what fails."""
    with opened_store() as store:
        rows = store.pipelines()
        blocks: list[RenderableType] = []
        for row in rows:
            blocks += [_pipeline(store, row), _sinks(store, row), ""]
    Console(highlight=False).print(Group(*blocks[:-1] or ["No pipeline has run yet."]))


def ranges(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline.")],
    *,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
) -> None:
    """Show the newest ranges: what they hold, which sinks have them, what Dagster was told."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        rows = store.ranges(pipeline, newest_first=True, limit=limit)
        checkpoints = store.checkpoints(pipeline)
        published = store.published(pipeline, rows[-1].range, rows[0].range) if rows else set()
        now = store.now()
    table = Table(box=None, pad_edge=False)
    for heading in ("range", "state", "rows", "bytes", "opened", "seconds"):
        justify: JustifyMethod = "left" if heading in {"state", "opened"} else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for sink in checkpoints:
        table.add_column(sink, overflow="fold")
    table.add_column("published", overflow="fold")
    for row in rows:
        assets = sorted(asset for number, asset in published if number == row.range)
        table.add_row(
            f"{row.range}",
            row.state,
            f"{row.rows:,}",
            size(row.bytes),
            moment(row.opened_at),
            f"{(row.closed_at or now) - row.opened_at:.1f}",
            *(_delivered(row, one) for one in checkpoints.values()),
            "all" if len(assets) == len(checkpoints) + 1 else ", ".join(assets) or "no",
        )
    Console(highlight=False).print(table if rows else "No range yet.")


def _pipeline(store: StateStore, row: PipelineRow) -> RenderableType:
    newest = store.ranges(row.name, newest_first=True, limit=1)
    now = store.now()
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row(
        "  captured",
        f"{position(row.captured_position or row.start_position)}, segment {row.next_segment - 1:,}",
    )
    if row.capture_pause is not None:
        facts.add_row("  paused", Text(row.capture_pause, style="yellow"))
    for hold in store.holds(row.name):
        facts.add_row("  held", Text(_hold(hold, now), style="red"))
    facts.add_row("  confirmed", position(row.confirmed_position))
    facts.add_row("  journal", size(store.journal_bytes(row.name)))
    facts.add_row("  range", _range(newest[0], now) if newest else "none yet")
    facts.add_row("  lease", _lease(store.lease(row.name), now))
    title = Text.assemble((row.name, "bold"), "  ", (row.want, _WANT_STYLES[row.want]))
    return Group(title, facts)


def _hold(hold: HoldRow, now: float) -> str:
    if hold.state == "journaled":
        return f"{hold.kind} {hold.subject}: released, in segment {hold.last_segment}"
    ago = duration(now - hold.since)
    state = "" if hold.state == "held" else f" ({hold.state})"
    return f"{hold.kind} {hold.subject}{state}: {hold.events:,} events for {ago}; {hold.reason}"


def _range(newest: RangeRow, now: float) -> str:
    if newest.state == "closed":
        ago = duration(now - (newest.closed_at or now))
        return f"{newest.range} closed {ago} ago ({newest.close_reason}), {newest.rows:,} rows"
    return f"{newest.range} open for {duration(now - newest.opened_at)}, {newest.rows:,} rows"


def _lease(row: LeaseRow | None, now: float) -> str:
    if row is None or row.run_id is None:
        return "free"
    if row.expires_at > now:
        return f"run {row.run_id} (epoch {row.epoch}), {duration(row.expires_at - now)} left"
    return f"free; run {row.run_id} lost it {duration(now - row.expires_at)} ago"


def _sinks(store: StateStore, pipeline: PipelineRow) -> RenderableType:
    """Return a line for each sink, and below them, with room for it, what each has to say."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("  sink", "segment", "behind", "failures", "next attempt"):
        table.add_column(heading, overflow="fold")
    said: list[RenderableType] = []
    now = store.now()
    for one in store.checkpoints(pipeline.name).values():
        style = "red" if one.failures or not one.attached else "yellow" if one.notice else ""
        wait = one.next_attempt_at - now
        table.add_row(
            f"  {one.sink}",
            f"{one.segment:,}" + ("" if one.complete else f" row {one.ordinal:,}"),
            _behind(store, pipeline, one),
            f"{one.failures}",
            "" if not one.failures else f"in {duration(wait)}" if wait > 0 else "now",
            style=style,
        )
        for text in (one.last_error, one.notice):
            if text:
                known = text if text.startswith("sink ") else f"sink {one.sink}: {text}"
                said.append(Padding(Text(known, style=style), (0, 0, 0, 2)))
    return Group(table, *said)


def _behind(store: StateStore, pipeline: PipelineRow, checkpoint: CheckpointRow) -> str:
    if not checkpoint.attached:
        return f"detached; {attach_command(pipeline.name, checkpoint.sink)}"
    first = checkpoint.segment + checkpoint.complete
    waiting = store.segments(pipeline.name, first=first)
    rows = sum(row.rows for row in waiting)
    if waiting and not checkpoint.complete and waiting[0].segment == checkpoint.segment:
        rows -= checkpoint.ordinal + 1
    count = pipeline.next_segment - first
    return f"{count:,} segments, {rows:,} rows" if count > 0 else "no"


def _delivered(row: RangeRow, checkpoint: CheckpointRow) -> str:
    """Say whether a sink has a range; `-` for one from before the sink was added."""
    if row.first_segment < checkpoint.first_segment:
        return "-"
    reached = (checkpoint.segment, checkpoint.complete)
    return "yes" if reached >= (row.last_segment, True) else "no"
