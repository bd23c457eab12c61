"""`--peer COMMAND`: drain the same log alternately with DeltaForge and with another program.

The program is a process that is started for each drain. DeltaForge's run is in this process, as in
the benchmark without a peer. Each has its own destination in the same server, and its own place in
the same log, which it remembers itself. Both are measured from outside by the same code: how many
messages their destination has, and what /proc says. Nothing is read from their output.

1. The peer is started, and single rows are written until the first of them arrives. From then on it
   has a place in the log.
2. A first backlog is drained by both, unmeasured.
3. In each round a backlog is written while neither runs, and then drained by one after the other;
   they take turns in which of them is first.

The peer gets what it needs in environment variables (`_variables`). A drain ends when the
destination has the backlog. Then, or earlier if it exits with 0, the program has done its part;
otherwise it is asked to end (SIGTERM), so that it can save its place. A run ends when it has caught
up.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from deltaforge_dagster.errors import DeltaforgeError, SettingsError
from deltaforge_dagster.installation.process import ServerProcess
from deltaforge_lab.bench.cost.processes import Sampler
from deltaforge_lab.bench.drain import WARM_ROWS, fill, pair_servers
from deltaforge_lab.bench.installation import Installation, Say, installed
from deltaforge_lab.bench.shapes import Shape
from deltaforge_lab.bench.sinks import DESTINATION, BenchSink
from deltaforge_lab.bench.sources import BenchSource

DRAIN_SECONDS = 600.0
"""How long a drain may take without `--timeout`."""

_LOOK_SECONDS = 0.02
_PRIMER_SECONDS = 1.0
_QUIET_SECONDS = 2.0
"""A destination that has not grown for this long does not grow until more is written."""

_STOP_SECONDS = 60.0
_MARKS = 0.01
"""Transaction marks per message up to which the measured end of a drain is accurate enough."""


@dataclass(frozen=True, slots=True)
class ProgramDrain:
    """What one program needed for the backlog of one round.

    Attributes:
        seconds: From its start until its destination had the backlog.
        first_seconds: From its start until the first message was seen.
        events_per_second: `rows / seconds`.
        steady_events_per_second: The rate after the first messages, without their time; 0 if all
            were seen at once.
        cpu_seconds_per_million: Processor seconds per million events of the program with its child
            processes, of Spark (only DeltaForge has it), of the source's server and of the sink's
            server.
        peak_rss_mb: Peak resident memory of the program and Spark, in MiB.
        extra_messages: Messages beyond the backlog, such as repeated ones.
    """

    seconds: float
    first_seconds: float
    events_per_second: int
    steady_events_per_second: int
    cpu_seconds_per_million: dict[str, float]
    peak_rss_mb: int
    extra_messages: int

    @property
    def own_cpu_seconds(self) -> float:
        """Processor seconds per million events, without those of the servers."""
        return self.cpu_seconds_per_million["program"] + self.cpu_seconds_per_million.get(
            "spark", 0
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured values of both programs, one drain per round.

    Attributes:
        pair: Source and sink.
        rows: Events of a backlog.
        shape: Shape of its table.
        exactly_once: Whether DeltaForge's sink kept its own position.
        sensing: Whether DeltaForge's schema sensing was enabled.
        writers: How many connections filled the backlog.
        max_bytes: The size limit of DeltaForge's delivery batches; None for the default, which is
            the segment.
        command: The peer's command line.
        deltaforge: DeltaForge's drains.
        peer: The peer's drains.
        ratios: DeltaForge's value over the peer's, the median of all rounds; None if the peer's is
            0.
        cores: Processors that this process may use.
    """

    pair: str
    rows: int
    shape: str
    exactly_once: bool
    sensing: bool
    writers: int
    max_bytes: int | None
    command: str
    deltaforge: list[ProgramDrain]
    peer: list[ProgramDrain]
    ratios: dict[str, float | None]
    cores: int


class Started(Protocol):
    """A program that has been started (`ServerProcess`), or a run (`OwnRun`)."""

    @property
    def pid(self) -> int:
        """The process that drains."""
        ...

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        ...

    @property
    def exit_code(self) -> int | None:
        """0 if it has ended in order; None while it is running."""
        ...

    def stop(self, number: signal.Signals, seconds: float) -> None:
        """End it, with this signal if it is a process."""

    def log_tail(self) -> str:
        """Return the last lines of a program's output, or why a run has not caught up."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """A program that drains a log when it is started.

    Attributes:
        name: Its name in messages.
        start: Starts it; raises `SettingsError` if it cannot be executed.
        destination: What it writes to.
        beside: First processes of further groups that work for it, by the name of the group.
    """

    name: str
    start: Callable[[], Started]
    destination: str
    beside: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        destination: str,
        *,
        directory: Path,
        environment: Mapping[str, str],
    ) -> Self:
        """Return the peer, a command that is executed in the current directory.

        Its output is kept in `directory`.
        """
        name = "the peer"
        start = partial(
            ServerProcess,
            name,
            command,
            directory=directory,
            working_directory=Path.cwd(),
            environment=environment,
        )
        return cls(name, start, destination)


class OwnRun:
    """A run of DeltaForge that has been started in this process, until it has caught up.

    Attributes:
        pid: This process.
    """

    def __init__(self, installation: Installation) -> None:
        self.pid = os.getpid()
        self._run = installation.run(until_caught_up=True)
        self._problem = "it has not caught up"
        self._thread = threading.Thread(target=self._execute, name="run")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    @property
    def exit_code(self) -> int | None:
        """0 if it has caught up, 1 if it has failed; None while it is running."""
        return None if self.running else int(bool(self._problem))

    def stop(self, number: signal.Signals, seconds: float) -> None:  # noqa: ARG002 - no process
        """Ask it to end, and wait."""
        self._run.request_end("asked")
        self._thread.join()

    def log_tail(self) -> str:
        """Return why it has not caught up; empty if it has."""
        return self._problem

    def _execute(self) -> None:
        try:
            outcome = self._run.execute()
        except DeltaforgeError as error:
            self._problem = str(error)
        else:
            self._problem = outcome.capture_error or outcome.sink_errors.get("sink") or ""


def compare(
    pair: str,
    rows: int,
    shape: Shape,
    command: str,
    *,
    destination: str,
    rounds: int,
    exactly_once: bool,
    sensing: bool,
    writers: int,
    max_bytes: int | None,
    timeout: float | None,
    say: Say,
) -> Comparison:
    """Start everything, and drain a backlog of `rows` events with both programs in each round.

    Raises:
        SettingsError: There is no such program, or its destination is the pipeline's.
        DeltaforgeError: A program has ended, or `timeout` seconds have passed, before its
            destination had every event.
    """
    words = _words(command)
    if destination == DESTINATION:
        raise SettingsError(f"--peer-destination: {DESTINATION!r} is what DeltaForge writes to")
    patience = timeout or DRAIN_SECONDS
    with ExitStack() as owned:
        source, sink = owned.enter_context(pair_servers(pair, shape, say))
        sink.create(destination)
        home = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="deltaforge-peer-")))
        variables = _variables(source, sink, destination, home)
        peer = Program.of(
            words, destination, directory=home, environment={**os.environ, **variables}
        )
        say("starting the peer for the first time")
        written = establish(peer, source, sink, patience)
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
        ours = Program(
            "DeltaForge",
            lambda: OwnRun(installation),
            DESTINATION,
            {"spark": installation.spark.pid},
        )
        both = (ours, peer)
        warm = min(WARM_ROWS, rows)
        fill(source, written + 1, warm)
        written += warm
        for program in both:
            say(f"warming up: {program.name}")
            drain(program, source, sink, warm, patience)
        drains: dict[str, list[ProgramDrain]] = {program.name: [] for program in both}
        for number in range(rounds):
            where = f"round {number + 1} of {rounds}"
            for done in source.write(written + 1, rows, writers):
                say(f"{where}: filling, {done:,} of {rows:,} rows")
            written += rows
            for program in both if number % 2 == 0 else reversed(both):
                say(f"{where}: {program.name} drains {rows:,} events")
                drains[program.name].append(drain(program, source, sink, rows, patience))
    own, theirs = (drains[program.name] for program in both)
    return Comparison(
        pair=pair,
        rows=rows,
        shape=shape.name,
        exactly_once=exactly_once,
        sensing=sensing,
        writers=writers,
        max_bytes=max_bytes,
        command=command,
        deltaforge=own,
        peer=theirs,
        ratios={
            "events_per_second": _ratio(own, theirs, lambda measured: measured.events_per_second),
            "steady_events_per_second": _ratio(
                own, theirs, lambda measured: measured.steady_events_per_second
            ),
            "cpu_seconds_per_million": _ratio(
                own, theirs, lambda measured: measured.own_cpu_seconds
            ),
        },
        cores=len(os.sched_getaffinity(0)),
    )


def establish(program: Program, source: BenchSource, sink: BenchSink, patience: float) -> int:
    """Start a program until a row written while it ran arrives; return the number of rows written.

    A program that exits with 0 when it has caught up is started again.

    Raises:
        DeltaforgeError: It fails, or nothing has arrived after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    written = 0
    process = program.start()
    try:
        with sink.sizes(program.destination) as size:
            before = size()
            while size() == before:
                if not process.running:
                    if process.exit_code != 0:
                        raise DeltaforgeError(
                            _end_text(program, process, "before anything arrived")
                        )
                    process.stop(signal.SIGTERM, _STOP_SECONDS)
                    process = program.start()
                if time.monotonic() > deadline:
                    raise DeltaforgeError(
                        f"nothing of {program.name} has arrived in {program.destination!r} after "
                        f"{patience:g} s (--timeout); its output ends: {process.log_tail()}"
                    )
                written += 1
                fill(source, written, 1)
                look_again = time.monotonic() + _PRIMER_SECONDS
                while size() == before and process.running and time.monotonic() < look_again:
                    time.sleep(_LOOK_SECONDS)
            _wait_until_quiet(size)
    finally:
        process.stop(signal.SIGTERM, _STOP_SECONDS)
    return written


def drain(
    program: Program, source: BenchSource, sink: BenchSink, rows: int, patience: float
) -> ProgramDrain:
    """Start a program, and measure until its destination has `rows` more messages; then end it.

    Raises:
        DeltaforgeError: It has ended, or `patience` seconds have passed, and messages are missing.
    """
    sink.trim(program.destination)
    counted = sink.count(program.destination)
    with ExitStack() as owned:
        size = owned.enter_context(sink.sizes(program.destination))
        before = size()
        began = time.monotonic()
        process = program.start()
        owned.callback(process.stop, signal.SIGTERM, _STOP_SECONDS)
        groups = {
            "program": process.pid,
            **program.beside,
            "source": source.server.pid,
            "sink": sink.server.pid,
        }
        first_at, first_rows = 0.0, 0
        together = ("program", *program.beside)
        alone = "program" if process.pid == os.getpid() else None
        with Sampler(groups, together=together, alone=alone) as sampler:
            while True:
                running = process.running  # first, so that what it sent before its end is seen
                arrived, now = size() - before, time.monotonic()
                if arrived and not first_at:
                    first_at, first_rows = now, min(arrived, rows)
                if arrived >= rows:
                    break
                where = f"with {arrived:,} of {rows:,} messages in {program.destination!r}"
                if not running:
                    raise DeltaforgeError(_end_text(program, process, where))
                if now - began > patience:
                    raise DeltaforgeError(
                        f"{program.name} was still running after {patience:g} s (--timeout), "
                        f"{where}; its output ends: {process.log_tail()}"
                    )
                time.sleep(_LOOK_SECONDS)
        _wait_until_quiet(size)
        readable = sink.count(program.destination) - counted
        marks = size() - before - readable
    if readable < rows:
        raise DeltaforgeError(
            f"{program.name}: only {readable:,} of {rows:,} messages "
            f"in {program.destination!r} can be read"
        )
    if marks > rows * _MARKS:  # they are counted like messages, so the end was seen much too early
        raise DeltaforgeError(
            f"{program.name} ended transactions with {marks:,} marks for {readable:,} messages in "
            f"{program.destination!r}; have it write larger transactions"
        )
    used = sampler.cpu_seconds()
    return ProgramDrain(
        seconds=round(now - began, 3),
        first_seconds=round(first_at - began, 3),
        events_per_second=round(rows / (now - began)),
        steady_events_per_second=round((rows - first_rows) / max(now - first_at, 1e-9)),
        cpu_seconds_per_million={
            name: round(seconds / rows * 1e6, 3) for name, seconds in used.items()
        },
        peak_rss_mb=sampler.peak_together >> 20,
        extra_messages=readable - rows,
    )


def _variables(
    source: BenchSource, sink: BenchSink, destination: str, home: Path
) -> dict[str, str]:
    """Return the environment variables for a peer; docs/benchmarks.md explains each."""
    return {
        "DELTAFORGE_BENCH_SOURCE": source.dsn,
        "DELTAFORGE_BENCH_TABLE": source.table,
        "DELTAFORGE_BENCH_SINK": sink.address,
        "DELTAFORGE_BENCH_DESTINATION": destination,
        "DELTAFORGE_BENCH_HOME": str(home),
    }


def _words(command: str) -> list[str]:
    """Return program and arguments of a command line.

    Raises:
        SettingsError: It cannot be split into words, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"--peer: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise SettingsError(f"--peer: there is no program {' '.join(words[:1])!r} to execute")
    return words


def _end_text(program: Program, process: Started, where: str) -> str:
    return (
        f"{program.name} ended with exit code {process.exit_code} {where}; "
        f"its output ends: {process.log_tail()}"
    )


def _wait_until_quiet(size: Callable[[], int]) -> None:
    """Wait until a destination stops growing."""
    last, since = size(), time.monotonic()
    while time.monotonic() - since < _QUIET_SECONDS:
        time.sleep(_LOOK_SECONDS)
        if (now := size()) != last:
            last, since = now, time.monotonic()


def _ratio(
    ours: Sequence[ProgramDrain],
    theirs: Sequence[ProgramDrain],
    value: Callable[[ProgramDrain], float],
) -> float | None:
    pairs = [(value(our), value(their)) for our, their in zip(ours, theirs, strict=True)]
    if not all(their for _, their in pairs):
        return None
    return round(statistics.median(our / their for our, their in pairs), 3)
