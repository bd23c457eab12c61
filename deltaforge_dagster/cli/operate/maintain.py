"""`deltaforge lake maintain`: maintain the tables of a pipeline's sinks now."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltaforge_dagster.cli.options import JsonOption, PipelineArgument
from deltaforge_dagster.cli.output import show_grid
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.errors import NotAllowed, TableRejected
from deltaforge_dagster.pipeline.plural import size
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.lake.maintenance import MaintainedTable, TableCondition

_HEADINGS = ("SINK", "TABLE", "FILES", "SMALL", "SIZE", "DELETED ROWS", "SNAPSHOTS", "DONE")


def maintain(
    pipeline: PipelineArgument,
    *,
    sink: Annotated[
        str | None,
        typer.Option(metavar="SINK", help="Only this sink's tables, even with maintenance: off."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this table of the lake; can be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the tables, and what would be done.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Maintain tables now: compact files, expire old snapshots, delete files that no table uses.

    The same is done on the schedule of each sink, by its options under `maintenance`. Runs may
    deliver meanwhile.
    """
    # Imported here, because `deltaforge lake install` needs neither.
    from deltaforge_dagster.assets.maintenance import observation  # noqa: PLC0415
    from deltaforge_dagster.pipeline.lake.maintenance import maintain_tables  # noqa: PLC0415
    from deltaforge_dagster.resources.instance import local_instance  # noqa: PLC0415

    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    sinks = _selected(list(loaded.spec.spec.sinks), sink)
    if not sinks:
        raise NotAllowed(f"{loaded.name} has no sink whose tables are maintained")
    only = [tuple(name.split(".")) for name in table or ()]
    maintained: list[tuple[str, MaintainedTable]] = []
    with (
        Platform(settings, single_process=True).open() as opened,
        local_instance(settings) as instance,
    ):
        sessions = build_run_context(opened, loaded).replay_sessions
        for block in sinks:
            for stored, outcome in maintain_tables(
                opened.store, loaded.name, block, sessions, only=only, dry_run=dry_run
            ):
                maintained.append((stored.sink, outcome))
                if not dry_run and outcome.destination == stored.write.destination:
                    instance.report_runless_asset_event(observation(loaded.name, stored, outcome))
    if json_output:
        tables = [{"sink": name, **asdict(outcome)} for name, outcome in maintained]
        typer.echo(json.dumps({"pipeline": loaded.name, "tables": tables}))
    else:
        show_grid(
            _HEADINGS,
            [_row(name, outcome) for name, outcome in maintained],
            nothing=f"{loaded.name}: no table has been written yet.",
        )
    if problems := [problem for _, outcome in maintained for problem in outcome.problems]:
        raise TableRejected("; ".join(problems))


def _selected(sinks: list[SinkBlock], name: str | None) -> list[SinkBlock]:
    """Return the sinks to maintain: the named one, else all whose tables are maintained."""
    lake_sinks = [block for block in sinks if isinstance(block.config, LakeSinkConfig)]
    if name is None:
        return [
            block
            for block in lake_sinks
            if isinstance(block.config, LakeSinkConfig) and block.config.maintenance.enabled
        ]
    named = [block for block in lake_sinks if block.config.id == name]
    if not named:
        names = ", ".join(block.config.id for block in lake_sinks) or "none"
        raise NotAllowed(f"no sink {name!r} that writes tables (there is: {names})")
    return named


def _row(sink: str, outcome: MaintainedTable) -> tuple[str, ...]:
    before, after = _counts(outcome.before), _counts(outcome.after)
    names = ("files", "small_files", "bytes", "deleted_rows", "snapshots")
    done = outcome.done or ("to be compacted" if outcome.due else "")
    summary = "; ".join(filter(None, [done, *outcome.notes, *outcome.problems])) or "-"
    return (
        sink,
        ".".join(outcome.destination),
        *(_change(n, before, after) for n in names),
        summary,
    )


def _counts(condition: TableCondition | None) -> dict[str, int]:
    return {} if condition is None else condition.counts


def _change(name: str, before: dict[str, int], after: dict[str, int]) -> str:
    """Return a figure, before and afterwards if it has changed."""
    texts = [
        size(counts[name]) if name == "bytes" else str(counts[name])
        for counts in (before, after)
        if name in counts
    ]
    return " → ".join(dict.fromkeys(texts)) or "-"
