"""`deltaforge bench pg-redis` and the other pairs: measure how fast a backlog reaches the sink.

A first backlog is drained to warm up the servers, Spark and every kernel. Then the source is
filled, in transactions of 1,000 rows, while nothing reads from it. The measured time begins with
the run, which takes the lease, connects and opens the log, and ends when the sink has acknowledged
the last message. docs/benchmarks.md explains the numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.encode.encoder import Encoder, RegisteredVersions
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_lab.bench.cost.processes import Sampler
from deltaforge_lab.bench.cost.stages import StoreClock, stage_seconds
from deltaforge_lab.bench.installation import Installation, Say, installed
from deltaforge_lab.bench.limits import MachineLimits, raw_write_rate
from deltaforge_lab.bench.shapes import Shape
from deltaforge_lab.bench.sinks import STARTS as SINKS
from deltaforge_lab.bench.sinks import BenchSink, SinkKind
from deltaforge_lab.bench.sources import STARTS as SOURCES
from deltaforge_lab.bench.sources import BenchSource, SourceKind
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer

PAIRS: dict[str, tuple[SourceKind, SinkKind]] = {
    "pg-redis": ("pg", "redis"),
    "pg-kafka": ("pg", "kafka"),
    "pg-nats": ("pg", "nats"),
    "mysql-redis": ("mysql", "redis"),
    "mysql-kafka": ("mysql", "kafka"),
    "mysql-nats": ("mysql", "nats"),
}

WARM_ROWS = 60_000
WARM_BACKLOG = 20_000
"""At most `WARM_ROWS` rows, but no more than are measured, warm everything up, in backlogs of
`WARM_BACKLOG`.
"""

_RAW_WRITE_ROWS = 100_000


@contextmanager
def pair_servers(pair: str, shape: Shape, say: Say) -> Iterator[tuple[BenchSource, BenchSink]]:
    """Start the servers of a pair and create the source's table; yield source and sink.

    At the end the servers are stopped.
    """
    source_kind, sink_kind = PAIRS[pair]
    say("starting the servers")
    with closing(SOURCES[source_kind]()) as source, closing(SINKS[sink_kind]()) as sink:
        source.create(shape)
        yield source, sink


@dataclass(frozen=True, slots=True)
class BusiestThread:
    """The busiest thread of a group of processes, and its processor seconds per million events."""

    name: str
    seconds_per_million: float


@dataclass(frozen=True, slots=True)
class Drain:
    """The measured values.

    Attributes:
        pair: Source and sink.
        rows: Events of the backlog.
        shape: Shape of its table.
        exactly_once: Whether the sink kept its own position.
        sensing: Whether schema sensing was enabled, at its default settings.
        avro: Whether messages were Avro, with a schema registry of the lab, and not JSON.
        writers: How many connections filled the backlog.
        max_bytes: The size limit of a delivery batch; None for the default, which is the segment.
        seconds: Time from the start of the run to the last acknowledgement.
        first_seconds: Time from the start of the run to the first acknowledgement.
        events_per_second: `rows / seconds`.
        steady_events_per_second: The rate after the first acknowledgement, without its time and
            messages.
        cpu_seconds_per_million: Processor seconds per million events, of the run, Spark (JVM and
            Python workers), the source's server and the sink's server.
        stage_seconds_per_million: Processor seconds per million events of the run and Spark, by
            stage; `cost.stages` says what counts as what.
        busiest_threads: The busiest thread of each of these groups.
        serial_seconds_per_million: The serial part: the seconds of the busiest thread of run and
            Spark.
        ceiling_events_per_second: The rate at which this thread would be busy all the time, which
            no number of processors can exceed.
        peak_rss_mb: Peak resident memory of the run and Spark together, in MiB.
        peak_rss_mb_by: The peak of each of them; the peaks may be at different times.
        limits: The limits of the machine.
        cores: Processors that this process may use.
    """

    pair: str
    rows: int
    shape: str
    exactly_once: bool
    sensing: bool
    avro: bool
    writers: int
    max_bytes: int | None
    seconds: float
    first_seconds: float
    events_per_second: int
    steady_events_per_second: int
    cpu_seconds_per_million: dict[str, float]
    stage_seconds_per_million: dict[str, float]
    busiest_threads: dict[str, BusiestThread]
    serial_seconds_per_million: float
    ceiling_events_per_second: int
    peak_rss_mb: int
    peak_rss_mb_by: dict[str, int]
    limits: MachineLimits
    cores: int


def measure(
    pair: str,
    rows: int,
    shape: Shape,
    *,
    exactly_once: bool,
    sensing: bool = False,
    avro: bool = False,
    writers: int = 1,
    max_bytes: int | None = None,
    timeout: float | None = None,
    say: Say,
) -> Drain:
    """Start everything, drain a backlog of `rows` events, and measure the limits.

    Raises:
        DeltaforgeError: A server does not start, or the sink does not have every event after
            `timeout` seconds (without a timeout: at the end of the run).
    """
    with ExitStack() as owned:
        source, sink = owned.enter_context(pair_servers(pair, shape, say))
        if avro:
            registry = owned.enter_context(closing(SchemaRegistryServer.start()))
            sink.encoding = f'{{type: avro, schema_registry_url: "{registry.url}"}}'
        installation = owned.enter_context(
            installed(
                source,
                sink,
                exactly_once=exactly_once,
                sensing=sensing,
                max_bytes=max_bytes,
                say=say,
            )
        )
        warm = min(WARM_ROWS, rows)
        for ready in range(0, warm, WARM_BACKLOG):
            say(f"warming up: {ready:,} of {warm:,} events")
            fill(source, 1 + ready, min(WARM_BACKLOG, warm - ready))
            installation.catch_up()
        source.begin_backlog()
        for written in source.write(1 + warm, rows, writers):
            say(f"filling the backlog: {written:,} of {rows:,} rows")
        source.end_backlog()
        say(f"draining {rows:,} events")
        installation.acknowledged.reset()
        groups = {
            "run": os.getpid(),
            "spark": installation.spark.pid,
            "source": source.server.pid,
            "sink": sink.server.pid,
        }
        began = time.monotonic()
        store_clock = StoreClock()
        with (
            Sampler(groups, together=("run", "spark"), alone="run", threads=True) as sampler,
            store_clock,
        ):
            outcome = installation.catch_up(timeout)
        done = installation.acknowledged
        problem = outcome.capture_error or outcome.sink_errors.get("sink")
        if problem is None and outcome.reason == "asked" and done.rows < rows:
            problem = f"the time was up after {timeout:g} s (--timeout)"
        if problem or done.rows != rows or sink.count() != warm + rows:
            raise DeltaforgeError(
                f"{done.rows:,} of {rows:,} events were delivered; {problem or 'no error'}"
            )
        if sensing:
            _check_sensed(installation)
        # Before the raw writes below, which the same sink acknowledges and would count.
        seconds = done.last_at - began
        rate = rows / seconds
        steady = (rows - done.first_rows) / max(done.last_at - done.first_at, 1e-9)
        first_seconds = done.first_at - began
        used = sampler.cpu_seconds()
        stages = stage_seconds(
            sampler.threads("run"), store_clock.seconds, run=used["run"], spark=used["spark"]
        )
        busiest = {name: _busiest(sampler, name, rows) for name in groups}
        serial = max(busiest[name].seconds_per_million for name in ("run", "spark"))
        say("reading the raw log")
        raw_read = rows / source.read_raw()
        say("writing the raw messages")
        raw_write = _write_raw(installation)
        return Drain(
            pair=pair,
            rows=rows,
            shape=shape.name,
            exactly_once=exactly_once,
            sensing=sensing,
            avro=avro,
            writers=writers,
            max_bytes=max_bytes,
            seconds=round(seconds, 3),
            first_seconds=round(first_seconds, 3),
            events_per_second=round(rate),
            steady_events_per_second=round(steady),
            cpu_seconds_per_million=_per_million(used, rows),
            stage_seconds_per_million=_per_million(stages, rows),
            busiest_threads=busiest,
            serial_seconds_per_million=serial,
            ceiling_events_per_second=round(1e6 / serial),
            peak_rss_mb=sampler.peak_together >> 20,
            peak_rss_mb_by={name: sampler.peak_rss[name] >> 20 for name in ("run", "spark")},
            limits=MachineLimits.of(rate, raw_read=raw_read, raw_write=raw_write),
            cores=len(os.sched_getaffinity(0)),
        )


def _per_million(seconds: dict[str, float], rows: int) -> dict[str, float]:
    return {name: round(used / rows * 1e6, 3) for name, used in seconds.items()}


def _busiest(sampler: Sampler, group: str, rows: int) -> BusiestThread:
    busiest = max(sampler.threads(group), key=lambda thread: thread.cpu_seconds)
    return BusiestThread(busiest.name, round(busiest.cpu_seconds / rows * 1e6, 3))


def _check_sensed(installation: Installation) -> None:
    """Check that sensing has processed everything; otherwise it would seem cheaper than it is."""
    store, name = installation.store, installation.loaded.name
    row, progress = store.pipelines.get(name), store.sensing.progress(name)
    assert row is not None
    if progress is None or progress.problem or progress.segment != row.next_segment - 1:
        raise DeltaforgeError(f"sensing has not processed everything: {progress}")


def fill(source: BenchSource, first: int, rows: int) -> None:
    """Write rows from number `first` on."""
    for _ in source.write(first, rows):
        pass


def _write_raw(installation: Installation) -> float:
    """Return how many messages per second the sink's client can write from memory.

    The messages are those of the last segments, encoded again and sent without a position.
    """
    messages = _last_messages(installation)
    sink = installation.context.build_sink("sink")

    def write() -> int:
        for batch in messages:
            sink.send(batch, lambda: None)
        return sum(batch.messages.num_rows for batch in messages)

    sink.open()
    try:
        return raw_write_rate(write)
    finally:
        sink.close()


def _last_messages(installation: Installation) -> list[SinkBatch]:
    store, loaded = installation.store, installation.loaded
    row = store.pipelines.get(loaded.name)
    assert row is not None
    with installation.context.replay_sessions() as sessions:
        encoder = Encoder(
            loaded.spec,
            installation.context.journal,
            sessions,
            "raw",
            versions=RegisteredVersions(store.schemas, loaded.name),
        )
        batches: list[SinkBatch] = []
        rows = 0
        for number in range(row.next_segment - 1, 0, -1):
            segments = store.segments.read(loaded.name, first=number, last=number)
            if rows >= _RAW_WRITE_ROWS or not segments:
                break
            encoded = encoder.encode(segments)
            batches += encoded.batches("sink", number, -1)
            rows += segments[0].rows
            encoded.discard()
        return batches


@contextmanager
def progress(*, quiet: bool) -> Iterator[Say]:
    """Yield a function that shows the current step on standard error, or nothing if `quiet`."""
    if quiet:
        yield lambda _: None
        return
    with Status("", console=Console(stderr=True)) as status:
        yield status.update
