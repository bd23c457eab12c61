"""The commands `deltaforge bench pg-redis` and so on, one for each pair of source and sink."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from deltaforge_dagster.errors import NotAllowed
from deltaforge_lab.bench.drain import Drain, measure, progress
from deltaforge_lab.bench.peer import Comparison, ProgramDrain, compare
from deltaforge_lab.bench.shapes import SHAPES


def drain_command(pair: str) -> Callable[..., None]:
    """Return the command that measures a pair of source and sink."""

    def command(
        *,
        rows: Annotated[
            int, typer.Option(min=1_000, help="Number of events in the backlog.")
        ] = 1_000_000,
        exactly_once: Annotated[
            bool, typer.Option("--exactly-once", help="Enable exactly-once delivery of the sink.")
        ] = False,
        sensing: Annotated[
            bool,
            typer.Option("--sensing", help="Enable schema sensing, with its default settings."),
        ] = False,
        avro: Annotated[
            bool, typer.Option("--avro", help="Send Avro, with a schema registry, and not JSON.")
        ] = False,
        writers: Annotated[
            int, typer.Option(min=1, max=64, help="Connections that fill the backlog.")
        ] = 1,
        max_bytes: Annotated[
            int | None,
            typer.Option(
                "--max-bytes", min=1, help="`batch.max_bytes`: size limit of a delivery batch."
            ),
        ] = None,
        timeout: Annotated[
            float | None,
            typer.Option(
                min=0.001,
                help="Seconds that a drain may take. Default: no limit, with --peer 600.",
            ),
        ] = None,
        shape: Annotated[
            Literal["orders6", "wide10", "documents3"],
            typer.Option(help="Columns of the table."),
        ] = "orders6",
        peer: Annotated[
            str | None,
            typer.Option(
                metavar="COMMAND",
                help=(
                    "Drain the log alternately with this program, and compare; "
                    "see docs/benchmarks.md."
                ),
            ),
        ] = None,
        peer_destination: Annotated[
            str,
            typer.Option(help="With --peer: the topic or stream that the program writes to."),
        ] = "peer",
        rounds: Annotated[
            int, typer.Option(min=1, help="With --peer: how often each program drains a backlog.")
        ] = 3,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print one JSON object on the last line.")
        ] = False,
    ) -> None:
        result: Drain | Comparison
        if avro and peer is not None:
            raise NotAllowed("--avro and --peer exclude each other")
        with progress(quiet=as_json) as say:
            if peer is None:
                result = measure(
                    pair,
                    rows,
                    SHAPES[shape],
                    exactly_once=exactly_once,
                    sensing=sensing,
                    avro=avro,
                    writers=writers,
                    max_bytes=max_bytes,
                    timeout=timeout,
                    say=say,
                )
            else:
                result = compare(
                    pair,
                    rows,
                    SHAPES[shape],
                    peer,
                    destination=peer_destination,
                    rounds=rounds,
                    exactly_once=exactly_once,
                    sensing=sensing,
                    writers=writers,
                    max_bytes=max_bytes,
                    timeout=timeout,
                    say=say,
                )
        if as_json:
            typer.echo(json.dumps(asdict(result)))
        else:
            Console().print(
                _table(result) if isinstance(result, Drain) else _comparison_table(result)
            )

    source, _, sink = pair.partition("-")
    names = {
        "pg": "PostgreSQL",
        "mysql": "MySQL",
        "redis": "Redis",
        "kafka": "Kafka",
        "nats": "NATS",
    }
    command.__doc__ = (
        f"Measure draining a backlog from {names[source]} to {names[sink]}: rate, cost, limits."
    )
    return command


def _table(result: Drain) -> Table:
    table = Table("measure", "value", title=f"{result.pair}, {result.rows:,} events {result.shape}")
    rows = {
        "events per second": f"{result.events_per_second:,}",
        "without the time to the first": f"{result.steady_events_per_second:,}",
        "seconds to first, to last": f"{result.first_seconds:.2f}, {result.seconds:.2f}",
        **result.limits.lines(),
        "peak memory of run and Spark": f"{result.peak_rss_mb:,} MiB",
    }
    rows |= {
        f"cpu seconds per million, {name}": f"{value:.2f}"
        for name, value in result.cpu_seconds_per_million.items()
    }
    rows |= {
        f"of run and Spark, {name}": f"{value:.2f}"
        for name, value in result.stage_seconds_per_million.items()
    }
    rows |= {
        f"busiest thread of {name}": f"{thread.seconds_per_million:.2f} ({thread.name})"
        for name, thread in result.busiest_threads.items()
    }
    rows["ceiling by the busiest of run and Spark"] = f"{result.ceiling_events_per_second:,}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _comparison_table(result: Comparison) -> Table:
    """Return the medians of all rounds."""
    table = Table(
        "median of the rounds",
        "deltaforge",
        "peer",
        "ratio",
        title=f"{result.pair}, {result.rows:,} events {result.shape}, {len(result.peer)} times",
        caption=result.command,
    )
    ratios = {
        name: "" if ratio is None else f"{ratio:.2f}" for name, ratio in result.ratios.items()
    }

    def add(
        title: str, digits: int, value: Callable[[ProgramDrain], float], ratio: str = ""
    ) -> None:
        medians = (
            statistics.median(map(value, drains)) for drains in (result.deltaforge, result.peer)
        )
        table.add_row(title, *(f"{median:,.{digits}f}" for median in medians), ratio)

    add("events per second", 0, lambda drain: drain.events_per_second, ratios["events_per_second"])
    add(
        "without the time to the first",
        0,
        lambda drain: drain.steady_events_per_second,
        ratios["steady_events_per_second"],
    )
    add("seconds to first", 2, lambda drain: drain.first_seconds)
    add("seconds to last", 2, lambda drain: drain.seconds)
    add(
        "cpu seconds per million, program and Spark",
        2,
        lambda drain: drain.own_cpu_seconds,
        ratios["cpu_seconds_per_million"],
    )
    add("cpu seconds per million, source", 2, lambda drain: drain.cpu_seconds_per_million["source"])
    add("cpu seconds per million, sink", 2, lambda drain: drain.cpu_seconds_per_million["sink"])
    add("peak memory, MiB", 0, lambda drain: drain.peak_rss_mb)
    add("extra messages", 0, lambda drain: drain.extra_messages)
    return table
