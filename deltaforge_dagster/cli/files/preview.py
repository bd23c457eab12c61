"""`deltaforge preview`: run changed processors over a range and show the differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from deltaforge_dagster.assets import preview as shown
from deltaforge_dagster.assets.publish import add_partition
from deltaforge_dagster.cli.arguments import JsonOption, PipelineArgument, select_pipeline
from deltaforge_dagster.cli.output import grid, print_answer
from deltaforge_dagster.config.file.processor_file import load_processors
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.pipeline.replay.preview import Preview
from deltaforge_dagster.pipeline.replay.preview import preview as make_preview
from deltaforge_dagster.resources.instance import local_instance
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context


def preview(
    pipeline: PipelineArgument,
    *,
    number: Annotated[int, typer.Option("--range", metavar="N", help="A closed range.", min=1)],
    processors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the processors to try: a pipeline file, or one with only `processors`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(metavar="K", help="Show at most K events of each kind.", min=0)
    ] = 5,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Also show the values of these events.")
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Record the result in Dagster, at the range, without values."
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Run processors over a closed range and show how the result differs from what the sinks got.

    Without --processors, the command uses the processors of the pipeline's current file. It
    delivers nothing, moves no checkpoint, and can be used while a run is live.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    chain = chain_of(loaded.spec)
    if processors is not None:
        chain = replace(chain, processors=load_processors(processors))
    with Platform(settings, single_process=True).open() as opened:
        context = build_run_context(opened, loaded)
        previewed = make_preview(
            context, loaded.name, number, chain, sample=sample, values=show_values
        )
    if record:
        with local_instance(settings) as instance:
            add_partition(instance, loaded.name, number)
            instance.report_runless_asset_event(shown.observation(loaded.name, previewed))
    if json_output:
        answer = {
            "pipeline": loaded.name,
            "range": previewed.range,
            "equal": previewed.difference.equal,
            "events_in": previewed.events_in,
            "events_out": previewed.events_out,
            "processors": previewed.processors,
            **previewed.difference.to_json(),
        }
        typer.echo(json.dumps(answer))
        return
    _print(previewed)


def _print(previewed: Preview) -> None:
    print_answer(f"{shown.sentence(previewed).capitalize()}.")
    for part in (
        shown.processors(previewed),
        shown.tables(previewed),
        shown.fields(previewed),
        shown.sample(previewed),
    ):
        if not part.rows:
            continue
        print_answer("")
        print_answer(grid(part.headings, part.rows))
    for event in previewed.difference.sample:
        for side in ("recorded", "made"):
            if event.get(side) is not None:
                values = json.dumps(event[side], ensure_ascii=False)
                typer.echo(f"{event['event_id']} {side}: {values}")
