"""`deltaforge reconcile`: compare tables of sinks with the source."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    PipelineArgument,
    known_pipeline,
    select_pipeline,
)
from deltaforge_dagster.cli.output import position
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.reconcile.reports import TableReport, exit_code
from deltaforge_dagster.resources.platform import Platform, build_source
from deltaforge_dagster.resources.run_context import build_run_context


def reconcile(
    pipeline: PipelineArgument,
    *,
    sink: Annotated[
        str | None, typer.Option("--sink", help="Id of a sink. Default: all that keep tables.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", help="Full name of a table of the source. Default: all."),
    ] = None,
    sample: Annotated[
        str,
        typer.Option(
            "--sample", help="Compare this part of each table only, chosen at random, such as 1%."
        ),
    ] = "100%",
    max_seconds: Annotated[
        float | None,
        typer.Option("--max-seconds", help="Begin nothing more after so many seconds.", min=0.0),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Read at most so many rows of the source a second.", min=1.0),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Make rows of the sink that differ what they should be; see --yes."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show keys and values of rows that differ.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Compare the tables of sinks with those of the source; nothing is stopped or locked.

    The exit code is 0 if all that was compared is equal, 1 if rows differ, and 2 if no row differs
    but a table could not be compared, or the command was used wrongly.

    With --repair, it says what it has found, asks for confirmation on a terminal, repairs, and
    compares again, which the exit code is about.
    """
    from deltaforge_dagster.pipeline.reconcile.compare import (  # noqa: PLC0415 - takes a second
        CompareOptions,
        TableComparison,
    )

    part = _part(sample)
    if repair and part < 1.0:
        raise NotAllowed("--repair looks at whole tables: leave out --sample")
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    options = CompareOptions(sink, table, part, deadline, rate)
    repaired: list[TableReport] = []
    with (
        Platform(settings).open() as opened,
        closing(build_source(loaded.spec)) as source,
    ):
        known_pipeline(opened.store, loaded.name)
        sessions = build_run_context(opened, loaded).replay_sessions
        comparison = TableComparison(
            loaded, opened.store, opened.journal, source, sessions, options
        )

        def show(report: TableReport) -> TableReport:
            if not json_output:
                typer.echo("\n".join(_lines(report, values=show_values)))
            return report

        reports = [show(report) for report in comparison.execute()]
        if repair and exit_code(reports) == 1:
            if sys.stdin.isatty() and not yes:
                typer.confirm("Repair these rows of the sinks?", abort=True, err=True)
            for number, report in enumerate(reports):
                if report.differs:
                    done, now = comparison.repair(report)
                    _show_problem(done)
                    reports[number] = show(now)
                    repaired.append(done)
    code = exit_code(reports)
    if json_output:
        answer = {
            "pipeline": loaded.name,
            "equal": code == 0,
            "tables": [report.to_json(values=show_values) for report in reports],
            "repaired": [report.to_json(values=show_values) for report in repaired],
        }
        typer.echo(json.dumps(answer))
    raise typer.Exit(code)


def _show_problem(report: TableReport) -> None:
    if report.problem is not None:
        typer.echo(f"{report.table} in {report.sink}: NOT REPAIRED: {report.problem}", err=True)


def _part(text: str) -> float:
    """Return which part `1%` is.

    Raises:
        NotAllowed: The text is no percentage above 0, up to 100.
    """
    try:
        part = float(text.removesuffix("%")) / 100
    except ValueError:
        part = 0.0
    if not 0.0 < part <= 1.0:
        raise NotAllowed(f"--sample {text}: write a percentage above 0, such as 1%")
    return part


def _lines(report: TableReport, *, values: bool) -> Iterator[str]:
    """Yield what people read about a table."""
    where = f"{report.table} in {report.sink}"
    if report.problem is not None:
        yield f"{where}: NOT COMPARED: {report.problem}"
    if report.compared:
        yield f"{where}: {report.verdict} ({_extent(report)})"
    for column, rows in sorted(report.columns.items()):
        yield f"  column {column}: different in {pluralize(rows, 'row')}"
    for difference in report.shown if values else ():
        yield f"  {difference.kind} {json.dumps(dict(difference.key), ensure_ascii=False)}"
        for column in difference.columns:
            pair = difference.source[column], difference.sink[column]
            source, sink = (json.dumps(value, ensure_ascii=False) for value in pair)
            yield f"    {column}: {source} at the source, {sink} at the sink"


def _extent(report: TableReport) -> str:
    """Return what was compared, and up to where the sink had everything."""
    extent = f"{pluralize(report.rows, 'row')} of the source"
    if report.compared < report.windows:
        extent += f", {report.coverage:.0%} of the table"
    if not report.searched:
        extent += ", without a search for extra rows"
    return f"{extent}, at {position(report.position)}"
