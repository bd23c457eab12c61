"""`deltaforge ranges`: show a pipeline's newest ranges, and which sinks have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import JustifyMethod
from rich.table import Table

from deltaforge_dagster.cli.arguments import JsonOption, NameArgument, known_pipeline, opened_store
from deltaforge_dagster.cli.output import moment, print_answer
from deltaforge_dagster.pipeline.plural import size
from deltaforge_dagster.state.records import CheckpointRow, RangeRow


def ranges(
    pipeline: NameArgument,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Number of ranges to show, newest first.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """Show the newest ranges: their content, which sinks have them, what Dagster shows of them."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        rows = store.ranges.read(pipeline, newest_first=True, limit=limit)
        checkpoints = store.checkpoints.read(pipeline)
        published = (
            store.ranges.published(pipeline, rows[-1].range, rows[0].range) if rows else set()
        )
        now = store.now()
    assets = {
        row.range: sorted(asset for number, asset in published if number == row.range)
        for row in rows
    }
    if json_output:
        described = [_as_json(row, checkpoints, assets[row.range]) for row in rows]
        typer.echo(json.dumps({"pipeline": pipeline, "ranges": described}))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("range", "state", "rows", "bytes", "opened", "seconds"):
        justify: JustifyMethod = "left" if heading in {"state", "opened"} else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for sink in checkpoints:
        table.add_column(sink, overflow="fold")
    table.add_column("published", overflow="fold")
    for row in rows:
        asset_names = assets[row.range]
        table.add_row(
            f"{row.range}",
            row.state,
            f"{row.rows:,}",
            size(row.bytes),
            moment(row.opened_at),
            f"{(row.closed_at or now) - row.opened_at:.1f}",
            *(_YES_NO[_delivered(row, checkpoint)] for checkpoint in checkpoints.values()),
            "all" if len(asset_names) == len(checkpoints) + 1 else ", ".join(asset_names) or "no",
        )
    print_answer(table if rows else "No range yet.")


_YES_NO: Mapping[bool | None, str] = {True: "yes", False: "no", None: "-"}


def _delivered(row: RangeRow, checkpoint: CheckpointRow) -> bool | None:
    """Return whether a sink has a range, None if the range begins before the sink was added."""
    if row.first_segment < checkpoint.first_segment:
        return None
    return (checkpoint.segment, checkpoint.complete) >= (row.last_segment, True)


def _as_json(
    row: RangeRow, checkpoints: Mapping[str, CheckpointRow], published: list[str]
) -> dict[str, Any]:
    return {
        "range": row.range,
        "state": row.state,
        "rows": row.rows,
        "bytes": row.bytes,
        "first_segment": row.first_segment,
        "last_segment": row.last_segment,
        "start_position": json.loads(row.start_position),
        "end_position": json.loads(row.end_position),
        "counts": row.counts,
        "opened_at": row.opened_at,
        "closed_at": row.closed_at,
        "close_reason": row.close_reason,
        "content_hash": row.content_hash,
        "delivered": {
            sink: _delivered(row, checkpoint) for sink, checkpoint in checkpoints.items()
        },
        "published": published,
    }
