"""`deltaforge checkpoint`: show, set and import the checkpoints of sinks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    NameArgument,
    PipelineArgument,
    installed_files,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import moment, position, print_answer
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, SettingsError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.committed import segments_behind
from deltaforge_dagster.pipeline.control.catalog import of_row
from deltaforge_dagster.pipeline.control.first_start import sink_positions
from deltaforge_dagster.pipeline.control.owners import claim
from deltaforge_dagster.pipeline.control.user_requests import reset_pipeline
from deltaforge_dagster.pipeline.control.work import ensure_start
from deltaforge_dagster.pipeline.plural import pluralize, size
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.state import legacy
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.legacy import read_storage
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def checkpoint() -> None:
    """Show the checkpoints of sinks, set them, or import them from DeltaForge."""


@app.command()
def show(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Show each sink's checkpoint: the sink has acknowledged every change up to that point."""
    with opened_store() as store:
        row = known_pipeline(store, pipeline)
        checkpoints = store.checkpoints.read(pipeline)
    if json_output:
        typer.echo(json.dumps(_as_json(row, checkpoints)))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("sink", "state", "segment", "row", "behind", "source position", "last moved"):
        right = heading in {"segment", "row", "behind"}
        table.add_column(heading, overflow="fold", justify="right" if right else "left")
    for checkpoint in checkpoints.values():
        table.add_row(
            checkpoint.sink,
            checkpoint.state,
            f"{checkpoint.segment:,}",
            "all" if checkpoint.complete else f"{checkpoint.ordinal:,}",
            f"{segments_behind(row, checkpoint):,}" if checkpoint.attached else "-",
            position(checkpoint.source_position),
            moment(checkpoint.updated_at),
        )
    print_answer(table)
    print_answer(f"\ncommitted  {position(row.confirmed_position)}")
    print_answer(f"captured   {position(row.captured_position or row.start_position)}")


@app.command()
def reset(
    pipeline: NameArgument,
    *,
    sink: Annotated[str | None, typer.Option(help="The sink whose checkpoint to set.")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="oldest|tail|range:N",
            help="Continue with the oldest segment of the journal, with the next captured segment "
            "(skipping everything before it), or with the first segment of a range.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Delete journal and positions: start as a new pipeline would."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --all: do not ask for confirmation.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Move one sink to another place in the journal, or reset the whole pipeline.

    No run may hold the pipeline. Moving back delivers changes again, without marking them as a
    replay. Moving forward skips changes: the sink never gets them. Tables and object files skip
    what they have.

    With --all, a replication slot that can no longer be read is dropped and created again. On a
    terminal, the command lists what it will delete and asks for confirmation.
    """
    with opened_store() as store:
        before = known_pipeline(store, pipeline)
        if everything:
            if sink is not None or to is not None:
                raise NotAllowed("--all resets the whole pipeline: leave --sink and --to out")
            summary = _reset_all(store, before, ask=not yes and on_terminal())
        elif sink is None or to is None:
            raise NotAllowed("write --sink SINK --to oldest|tail|range:N, or --all")
        else:
            summary = _reset_sink(store, pipeline, sink, to)
        rows = _as_json(known_pipeline(store, pipeline), store.checkpoints.read(pipeline))
    typer.echo(json.dumps(rows) if json_output else summary)


@app.command("import")
def import_(
    pipeline: PipelineArgument,
    *,
    storage: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STORAGE",
            help="DeltaForge's storage: its SQLite file, a postgresql:// address, or the JSON file "
            "of old versions. The command only reads it.",
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Discard imported checkpoints; start without them.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Start a new pipeline at the checkpoints of DeltaForge's sinks, read from its storage.

    Stop DeltaForge first. The pipeline must not have run in this installation yet.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    if (storage is None) != forget:
        raise NotAllowed("write --from STORAGE, or --forget")
    if settings.state_url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: imported checkpoints would be lost")
    source_id = loaded.spec.spec.source.config.id
    imported = {} if storage is None else legacy.of_source(read_storage(storage), source_id)
    if storage is not None and not imported:
        raise SettingsError(
            f"{storage}: holds no checkpoint of source {source_id!r} (spec.source.config.id)"
        )
    positions = sink_positions(loaded, imported)
    store = StateStore.open(settings.state_url)
    try:
        _import(store, loaded, imported)
    finally:
        store.close()
    if json_output:
        reached = {sink: json.loads(end.to_json()) for sink, end in positions.items()}
        typer.echo(json.dumps({"pipeline": loaded.name, "sinks": reached}))
        return
    for sink, end in positions.items():
        typer.echo(f"{sink} has everything up to {position(end.to_json())}.")
    if positions:
        first = position(min(positions.values()).to_json())
        typer.echo(f"{loaded.name} begins at {first}, or before it where a transaction begins.")
    else:
        typer.echo(f"{loaded.name} starts where its file says.")


def _import(store: StateStore, loaded: LoadedPipeline, imported: dict[str, bytes]) -> None:
    row = store.pipelines.get(loaded.name)
    if row is not None and row.start_position is not None:
        raise NotAllowed(
            f"pipeline {loaded.name!r} has already started, at {row.start_position}; to reset it: "
            f"deltaforge checkpoint reset {loaded.name} --all"
        )
    with store.database.write() as connection:
        legacy.forget(connection, loaded.spec.spec.source.config.id)
    checkpoints = Kv(store.database, legacy.NAMESPACE)
    for key, value in imported.items():
        checkpoints.put(key, value)


def _reset_sink(store: StateStore, pipeline: str, sink: str, to: str) -> str:
    before = store.checkpoints.read(pipeline).get(sink)
    if before is None:
        names = ", ".join(store.checkpoints.read(pipeline)) or "none"
        raise NotAllowed(f"pipeline {pipeline!r} has no sink {sink!r} (there is: {names})")
    after = store.checkpoints.reset(pipeline, sink, _first_segment(store, pipeline, to) - 1)
    summary = f"{sink} continues with segment {after.segment + 1:,}: {_change(before, after)}."
    back = after.whole_segment < before.whole_segment
    if back and store.table_commits.read(pipeline, sink) is not None:
        summary += (
            " Its tables skip what they have, so only what they lack is written; "
            "to have a table rewritten, drop it before the next run."
        )
    return summary


def on_terminal() -> bool:
    """Return whether standard input is a terminal, so that the user can be asked."""
    return sys.stdin.isatty()


def _reset_all(store: StateStore, before: PipelineRow, *, ask: bool) -> str:
    """Reset a pipeline, after confirmation if `ask`; return a sentence that says what was done.

    Raises:
        NotAllowed: A run holds the pipeline.
        SpecError: Another pipeline has the slot.
        Abort: The user did not confirm.
    """
    settings = Settings.from_env()
    lease = store.leases.get(before.name)
    if lease is not None and lease.active_at(store.now()):
        raise NotAllowed(
            f"pipeline {before.name!r} is held by run {lease.run_id}; stop it, then reset"
        )
    file = of_row(before, installed_files(store))
    if isinstance(file, LoadedPipeline):
        claim(store, file)
    source = build_source(file.spec) if isinstance(file, LoadedPipeline) else None
    try:
        unread = "" if source is not None else "its file cannot be loaded"
        dropped: list[str] = []
        if source is not None:
            try:
                dropped = source.reset(dry_run=True)
            except DeltaforgeError as error:
                unread = str(error)
        if ask:
            confirm_deletion([*deleted_state(store, before), *dropped])
        after = reset_pipeline(store, Journal(settings.journal_url), before)
        where = (
            "where a new pipeline would: PostgreSQL at the oldest change that the slot still "
            "holds, MySQL with what is committed from then on"
        )
        if source is not None and dropped:
            assert isinstance(file, LoadedPipeline)
            source.reset(dry_run=False)
            after = ensure_start(store, file, after, source)
            where = (
                f"at {position(after.start_position)}; dropped and created again: "
                f"{', '.join(dropped)}"
            )
    finally:
        if source is not None:
            source.close()
    summary = f"{before.name} was reset and starts with segment {after.next_segment:,}, {where}."
    return summary + (f" The source was not checked: {unread}." if unread else "")


def confirm_deletion(listed: Sequence[str]) -> None:
    """List what will be deleted, and ask for confirmation.

    Raises:
        Abort: The user did not confirm.
    """
    typer.echo("\n".join(["This deletes:", *(f"  {line}" for line in listed)]), err=True)
    typer.confirm("Continue?", abort=True, err=True)


def deleted_state(store: StateStore, row: PipelineRow) -> list[str]:
    """Return lines that describe what a reset deletes of a pipeline's state and journal."""
    listed = [
        (
            f"the journal of {row.name} ({size(store.segments.total_bytes(row.name))}), "
            "its ranges and positions"
        )
    ]
    for checkpoint in store.checkpoints.read(row.name).values():
        behind = segments_behind(row, checkpoint)
        if behind:
            listed.append(
                f"{pluralize(behind, 'segment')} that sink {checkpoint.sink} does not have yet"
            )
    held = [hold.subject for hold in store.holds.read(row.name) if hold.state != "journaled"]
    return listed + ([f"held changes of {', '.join(held)}"] if held else [])


def _as_json(row: PipelineRow, checkpoints: dict[str, CheckpointRow]) -> dict[str, Any]:
    return {
        "pipeline": row.name,
        "uid": row.uid,
        "next_segment": row.next_segment,
        "captured_position": _fields(row.captured_position or row.start_position),
        "committed_position": _fields(row.confirmed_position),
        "sinks": {
            checkpoint.sink: {
                "state": checkpoint.state,
                "segment": checkpoint.segment,
                "ordinal": checkpoint.ordinal,
                "complete": checkpoint.complete,
                "segments_behind": segments_behind(row, checkpoint),
                "first_segment": checkpoint.first_segment,
                "source_position": _fields(checkpoint.source_position),
                "failures": checkpoint.failures,
                "updated_at": checkpoint.updated_at,
            }
            for checkpoint in checkpoints.values()
        },
    }


def _fields(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _first_segment(store: StateStore, pipeline: str, to: str) -> int:
    """Return the segment that the value of `--to` refers to."""
    kind, _, number = to.partition(":")
    if to == "oldest":
        oldest = store.segments.read(pipeline, limit=1)
        return oldest[0].segment if oldest else known_pipeline(store, pipeline).next_segment
    if to == "tail":
        return known_pipeline(store, pipeline).next_segment
    if kind == "range" and number.isdecimal():
        row = store.ranges.get(pipeline, int(number))
        if row is None:
            raise NotAllowed(f"pipeline {pipeline!r} has no range {int(number)}")
        return row.first_segment
    raise NotAllowed(f"--to {to}: write oldest, tail or range:N")


def _change(before: CheckpointRow, after: CheckpointRow) -> str:
    was = before.segment + before.complete
    distance = after.segment + 1 - was
    count = pluralize(abs(distance), "segment")
    if distance > 0:
        return f"skips {count}, from {was:,} on"
    if distance < 0:
        return f"delivers {count} again, up to {was - 1:,}"
    return "begins that segment again" if not before.complete else "as before"
