"""`deltaforge bench latency`: measure the time from the commit to the sink.

A live run follows the source while rows are written at a steady rate: 50 per second in transactions
of one row, then 1,000 per second in transactions of ten, after a few seconds of each to warm up.
The latency of a row is the time from the moment the writer sends COMMIT, so it includes the commit
itself, to the timestamp that the sink's server gave the message. Both clocks are of this machine,
in milliseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.run.live import RunOutcome
from deltaforge_lab.arrivals import percentile
from deltaforge_lab.bench.drain import pair_servers, progress
from deltaforge_lab.bench.installation import Installation, Say, installed
from deltaforge_lab.bench.shapes import ORDERS6
from deltaforge_lab.bench.sources import BenchSource

RATES = {50: 1, 1_000: 10}
"""Rows per second, and for each rate the rows per transaction."""

_WARM_SECONDS = 5.0
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from commit to sink, at one rate.

    Attributes:
        rows_per_second: The requested rate.
        rows: How many rows were written and arrived.
        written_per_second: The rate that the writer reached.
        p50_ms: Median.
        p99_ms: 99th percentile.
        max_ms: Maximum.
    """

    rows_per_second: int
    rows: int
    written_per_second: float
    p50_ms: int
    p99_ms: int
    max_ms: int


def latency(
    *,
    pair: Annotated[
        Literal["pg-redis", "pg-kafka", "pg-nats", "mysql-redis", "mysql-kafka", "mysql-nats"],
        typer.Option(help="Source and sink."),
    ] = "pg-redis",
    seconds: Annotated[
        float, typer.Option(min=1, help="Duration of each rate, in seconds.")
    ] = 20.0,
    exactly_once: Annotated[
        bool, typer.Option("--exactly-once", help="Enable exactly-once delivery of the sink.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Measure the latency from commit to sink at 50 and at 1,000 rows per second."""
    with progress(quiet=as_json) as say:
        latencies = measure(pair, seconds, exactly_once=exactly_once, say=say)
    if as_json:
        rates = {str(rate.rows_per_second): asdict(rate) for rate in latencies}
        result = {"pair": pair, "exactly_once": exactly_once, "latency": rates}
        typer.echo(json.dumps(result))
        return
    table = Table("rows/s", "p50 ms", "p99 ms", "max ms", title=f"{pair}, commit to sink")
    for rate in latencies:
        table.add_row(*map(str, (rate.rows_per_second, rate.p50_ms, rate.p99_ms, rate.max_ms)))
    Console().print(table)


def measure(pair: str, seconds: float, *, exactly_once: bool, say: Say) -> list[Latency]:
    """Start everything and measure each rate for `seconds`.

    Raises:
        DeltaforgeError: A server does not start, or a row does not arrive.
    """
    with ExitStack() as owned:
        source, sink = owned.enter_context(pair_servers(pair, ORDERS6, say))
        installation = owned.enter_context(
            installed(source, sink, exactly_once=exactly_once, say=say)
        )
        writer = _Writer(source)
        spans: dict[int, tuple[range, float]] = {}
        with _following(installation):
            say("warming up")
            for rate, per_transaction in RATES.items():
                writer.write(rate, per_transaction, min(_WARM_SECONDS, seconds))
            _wait(installation, writer)
            for rate, per_transaction in RATES.items():
                say(f"writing {rate:,} rows a second for {seconds:g} s")
                first, began = writer.next, time.monotonic()
                writer.write(rate, per_transaction, seconds)
                written = range(first, writer.next)
                spans[rate] = written, len(written) / (time.monotonic() - began)
                _wait(installation, writer)
        arrived = {arrival.event["after"]["id"]: arrival.at_ms or 0 for arrival in sink.arrivals()}
        return [
            _summary(rate, written, reached, writer.told, arrived)
            for rate, (written, reached) in spans.items()
        ]


def _summary(
    rate: int, written: range, reached: float, sent_at: dict[int, float], arrived: dict[int, int]
) -> Latency:
    times = sorted(round(arrived[number] - sent_at[number] * 1000) for number in written)
    middle, slow = percentile(times, 0.5), percentile(times, 0.99)
    assert middle is not None
    assert slow is not None
    return Latency(rate, len(times), round(reached, 1), middle, slow, times[-1])


class _Writer:
    """Writes rows at a steady rate, and records when each was committed.

    Attributes:
        next: Number of the next row.
        told: For each row, the time when COMMIT was sent, in seconds since 1970.
    """

    def __init__(self, source: BenchSource) -> None:
        self._source = source
        self.next = 1
        self.told: dict[int, float] = {}

    def write(self, rate: int, per_transaction: int, seconds: float) -> None:
        """Write `rate` rows per second for `seconds`; late transactions do not delay later ones."""
        began = time.monotonic()
        for turn in range(round(rate * seconds / per_transaction)):
            ahead = turn * per_transaction / rate - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
            sent_at = self._source.add(self.next, per_transaction)
            self.told |= dict.fromkeys(range(self.next, self.next + per_transaction), sent_at)
            self.next += per_transaction


@contextmanager
def _following(installation: Installation) -> Iterator[None]:
    """Have a live run follow the source within the block."""
    run = installation.run(until_caught_up=False)
    installation.acknowledged.reset()
    outcomes: list[RunOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run.execute()), name="run")
    thread.start()
    try:
        yield
    finally:
        run.request_end()
        thread.join()
    if not outcomes or outcomes[0].capture_error or outcomes[0].sink_errors:
        raise DeltaforgeError(f"the run failed: {outcomes[0] if outcomes else 'see above'}")


def _wait(installation: Installation, writer: _Writer) -> None:
    deadline = time.monotonic() + _PATIENCE
    while installation.acknowledged.rows < len(writer.told):
        if time.monotonic() > deadline:
            raise DeltaforgeError(
                f"{installation.acknowledged.rows:,} of {len(writer.told):,} rows have arrived"
            )
        time.sleep(0.02)
