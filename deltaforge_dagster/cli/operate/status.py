"""`deltaforge status`: show every pipeline, from the pipeline files and the state store.

On a terminal there is one block for each pipeline.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    installed_files,
    known_pipeline,
    opened_store,
)
from deltaforge_dagster.cli.operate.overview import NotBegun, Overview, SinkView, overview
from deltaforge_dagster.cli.output import answers, position, print_answer
from deltaforge_dagster.errors import Retryable
from deltaforge_dagster.pipeline.committed import go_on_command
from deltaforge_dagster.pipeline.control.catalog import of_row, without_file
from deltaforge_dagster.pipeline.health.health import Health, health
from deltaforge_dagster.pipeline.plural import duration, pluralize, size
from deltaforge_dagster.state.records import HoldRow, LeaseRow, RangeRow, SourceLog
from deltaforge_dagster.state.store import StateStore

_STATUS_STYLES = {"running": "green", "paused": "yellow", "stopped": "red", "failed": "bold red"}

_OVERDUE_SECONDS = 60.0
"""A next attempt that was due longer ago is not shown, because no run is live that would make
it."""


def status(
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(metavar="PIPELINE", help="Names of pipelines. Default: all."),
    ] = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating the output.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between updates, with --watch.")
    ] = 2.0,
    json_output: JsonOption = False,
) -> None:
    """Show pipelines: how far capture and delivery are, which run works on them, and what fails.

    The command reads only the pipeline files and the state store. With --watch and --json it prints
    one object per line, until Ctrl-C.

    The exit code is 1 if a pipeline has an error: its file is invalid, its changes are not
    captured, or a sink that the commit policy waits for fails. It is 0 for warnings, and for
    pipelines that were paused or stopped.
    """
    with opened_store() as store, contextlib.suppress(KeyboardInterrupt):
        if not watch:
            views = _views(store, pipelines)
            if json_output:
                _print_json(views)
            else:
                print_answer(screen(views))
            if not all(view.health.well for view in views):
                raise typer.Exit(1)
        elif json_output:
            while True:
                _print_json(_views(store, pipelines))
                time.sleep(interval)
        else:
            _watch(store, pipelines, interval)


def _views(store: StateStore, names: Sequence[str] | None) -> list[Overview | NotBegun]:
    installed = installed_files(store)
    rows = {row.name: row for row in store.pipelines.read()}
    files = [*installed, *without_file(rows.values(), installed)]
    unbegun = {file.name: file for file in files if file.name not in rows}
    for name in names or ():
        if name not in unbegun:
            known_pipeline(store, name)
    chosen = sorted({*rows, *unbegun} if not names else set(names))
    return [
        overview(store, rows[name], of_row(rows[name], files))
        if name in rows
        else NotBegun(name, health(store, unbegun[name]), store.now())
        for name in chosen
    ]


def _print_json(views: Sequence[Overview | NotBegun]) -> None:
    typer.echo(json.dumps({"pipelines": [view.to_json() for view in views]}))


def _watch(store: StateStore, names: Sequence[str] | None, interval: float) -> None:
    """Update the display until Ctrl-C.

    If the store is unavailable, show the error and try again.
    """
    shown: RenderableType = screen(_views(store, names))
    console = answers()
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                shown = screen(_views(store, names))
            except Retryable as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)


def screen(views: Sequence[Overview | NotBegun]) -> RenderableType:
    """Return the display of all pipelines."""
    blocks: list[RenderableType] = []
    for view in views:
        if isinstance(view, NotBegun):
            blocks += [_title(view.name, view.health, 0.0), *_problems(view.health, view.now), ""]
        else:
            blocks += [_pipeline(view), _sinks(view), ""]
    return Group(*blocks[:-1] or ["No pipeline has run yet."])


def _title(name: str, health: Health, lag_seconds: float) -> Text:
    lag = f"  lag {duration(lag_seconds)}" if lag_seconds >= 1 else ""
    warned = "" if health.status == "failed" or not health.problems else "  with problems"
    return Text.assemble(
        (name, "bold"),
        "  ",
        (health.status, _STATUS_STYLES[health.status]),
        (warned, "yellow"),
        (lag, "yellow"),
    )


def _problems(health: Health, now: float) -> Iterator[RenderableType]:
    """Yield each problem with its duration, the next attempt and the remedy."""
    for problem in health.problems:
        style = "red" if problem.severity == "error" else "yellow"
        text = f"{problem.severity}: {problem.subject}: {problem.text}"
        if problem.since is not None:
            text += f" (for {duration(now - problem.since)})"
        left = None if problem.next_attempt_at is None else problem.next_attempt_at - now
        if left is not None and left > -_OVERDUE_SECONDS:
            text += f"; next attempt {f'in {duration(left)}' if left >= 1 else 'now'}"
        yield Padding(Text(text, style=style), (0, 0, 0, 2))
        for number, command in enumerate(problem.remedy):
            yield Padding(Text(f"{'then' if number else 'run'}: {command}"), (0, 0, 0, 4))


def _pipeline(overview: Overview) -> RenderableType:
    row, now = overview.pipeline, overview.now
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row(
        "  captured",
        (
            f"{position(row.captured_position or row.start_position)}, "
            f"segment {row.next_segment - 1:,}"
        ),
    )
    if overview.health.log is not None and (ahead := _log_ahead(overview.health.log, now)):
        facts.add_row("  log ahead", ahead)
    if overview.health.log is not None and (kept := _log_kept(overview.health.log, now)):
        facts.add_row("  log kept", kept)
    if row.capture_pause is not None:
        facts.add_row("  paused", Text(row.capture_pause, style="yellow"))
    for hold in overview.holds:
        if hold.state == "journaled":
            facts.add_row("  held", _released(hold))
    facts.add_row("  confirmed", _confirmed(overview))
    facts.add_row("  journal", size(overview.journal_bytes))
    if overview.unsensed:
        facts.add_row("  sensing", f"{pluralize(overview.unsensed, 'segment')} behind")
    if overview.snapshot is not None:
        facts.add_row("  snapshot", _snapshot(overview))
    facts.add_row("  range", _range(overview.newest, now) if overview.newest else "none yet")
    facts.add_row("  lease", _lease(overview.lease, now))
    facts.add_row("  seen", _last_activity(overview))
    title = _title(row.name, overview.health, overview.lag_seconds)
    return Group(title, *_problems(overview.health, now), facts)


def _log_ahead(log: SourceLog, now: float) -> str:
    """Return how far the source's log is ahead of capture; empty if nothing is known about it."""
    facts = [] if log.bytes is None else [size(log.bytes)]
    if log.unread_since is not None:
        facts.append(f"for {duration(now - log.unread_since)}")
    if log.unread is not None:
        facts.append("with changes to capture" if log.unread else "without changes to capture")
    if log.growing_since is not None:
        facts.append(f"growing for {duration(now - log.growing_since)}")
    if log.receiving_rows:
        since = 0.0 if log.receiving_since is None else now - log.receiving_since
        rows = f"{pluralize(log.receiving_rows, 'row')} in {duration(since)}"
        facts.append(f"a transaction is being received: {rows}")
    return f"{', '.join(facts)} (seen {duration(now - log.seen_at)} ago)" if facts else ""


def _log_kept(log: SourceLog, now: float) -> str:
    """Return how much log the server retains, and how long until it is lost; empty if unknown."""
    facts = []
    if log.retained is not None:
        limit = "any amount" if log.limit is None else f"{size(log.limit)} ({log.limited_by})"
        facts.append(f"{size(log.retained)} for this pipeline, of {limit}")
    if log.room is not None:
        age = "" if log.kept_seconds is None else f"; kept for {duration(log.kept_seconds)}"
        facts.append(f"{size(log.room)} before the captured position{age} ({log.limited_by})")
    if log.unconfirmed:
        since = (
            ""
            if log.unconfirmed_since is None
            else f", for {duration(now - log.unconfirmed_since)}"
        )
        facts.append(f"{size(log.unconfirmed)} not confirmed{since}")
    if log.growth is not None:
        facts.append(f"growing by {size(round(log.growth))}/s")
    if log.seconds_left is not None:
        facts.append(f"lost in {duration(log.seconds_left)}")
    return ", ".join(facts)


def _confirmed(overview: Overview) -> str:
    early = overview.health.early
    shown = position(overview.pipeline.confirmed_position)
    if early is None:
        return shown
    return (
        f"{shown}, up to what the journal has for {duration(overview.now - early.since)}: "
        f"{early.why}"
    )


def _last_activity(overview: Overview) -> str:
    """Return when a run, a tick or the source last showed activity."""
    if overview.lease is not None and overview.lease.active_at(overview.now):
        return "a run is at work"
    seen = overview.health.seen_at
    ago = "never" if seen is None else f"{duration(overview.now - seen)} ago"
    row = overview.pipeline
    if row.ticked_at is None:
        return f"{ago}; no sensor watches it, only `deltaforge run` works on it"
    source = row.source_seen_at
    answered = (
        "" if source is None else f"; the source responded {duration(overview.now - source)} ago"
    )
    return f"{ago} by a tick{answered}"


def _released(hold: HoldRow) -> str:
    return f"{hold.kind} {hold.subject}: released, in segment {hold.last_segment}"


def _snapshot(overview: Overview) -> Text:
    assert overview.snapshot is not None
    row, progress = overview.snapshot
    chunks = sum(table.chunks for table in progress.values())
    done = sum(table.complete for table in progress.values())
    read = done + sum(table.read for table in progress.values())
    rows = sum(table.rows for table in progress.values())
    text = f"{row.snapshot} {row.state_text}"
    if chunks:
        text += f": {read:,} of {pluralize(chunks, 'chunk')} read, {done:,} in the journal"
        text += f", {pluralize(rows, 'row')}"
    if row.problem:
        text += f"; {row.problem}"
    return Text(text, style="red" if row.problem else "")


def _range(newest: RangeRow, now: float) -> str:
    rows = pluralize(newest.rows, "row")
    if newest.state == "closed":
        ago = duration(now - (newest.closed_at or now))
        return f"{newest.range} closed {ago} ago ({newest.close_reason}), {rows}"
    return f"{newest.range} open for {duration(now - newest.opened_at)}, {rows}"


def _lease(row: LeaseRow | None, now: float) -> str:
    if row is None or row.run_id is None:
        return "free"
    if row.expires_at > now:
        return f"run {row.run_id} (epoch {row.epoch}), {duration(row.expires_at - now)} left"
    return f"free; run {row.run_id} lost it {duration(now - row.expires_at)} ago"


def _sinks(overview: Overview) -> RenderableType:
    """Return a table of the sinks, and below it the notes on where each sink began."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("  sink", "segment", "behind", "lag", "moved", "failures", "next attempt"):
        justify: JustifyMethod = "right" if heading == "failures" else "left"
        table.add_column(heading, overflow="fold", justify=justify)
    notes: list[RenderableType] = []
    for view in overview.sinks:
        checkpoint = view.checkpoint
        odd = checkpoint.notice is not None or checkpoint.paused
        bad = checkpoint.failures or not checkpoint.attached
        style = "red" if bad else "yellow" if odd else ""
        wait = checkpoint.next_attempt_at - overview.now
        table.add_row(
            f"  {checkpoint.sink}",
            f"{checkpoint.segment:,}"
            + ("" if checkpoint.complete else f" row {checkpoint.ordinal:,}"),
            _behind(overview, view),
            duration(view.lag_seconds) if view.segments else "-",
            f"{duration(overview.now - checkpoint.updated_at)} ago",
            f"{checkpoint.failures}",
            "" if not checkpoint.failures else f"in {duration(wait)}" if wait > 0 else "now",
            style=style,
        )
        if checkpoint.began:
            note = f"sink {checkpoint.sink}: {checkpoint.began}"
            notes.append(Padding(Text(note, style="dim"), (0, 0, 0, 2)))
    return Group(table, *notes)


def _behind(overview: Overview, view: SinkView) -> str:
    """Return what a sink lacks; `no` only if the source seems to have nothing left to capture."""
    checkpoint = view.checkpoint
    command = go_on_command(overview.pipeline.name, checkpoint.sink, checkpoint.state)
    if not checkpoint.attached:
        return f"detached; {command}"
    log = overview.health.log
    lacks = "no" if log is not None and log.all_read(overview.now) else "no segment"
    if view.segments:
        lacks = f"{pluralize(view.segments, 'segment')}, {pluralize(view.rows, 'row')}"
    return f"{lacks}; paused: {command}" if checkpoint.paused else lacks
