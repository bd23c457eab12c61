"""`deltaforge demo`: run the platform on real servers with live changes, and prove delivery.

The demo writes changes in three phases. A few *first* changes make the sensor start a run; they
wait for the run, a Spark session and compiled kernels. *Calm* changes follow at a steady pace, a
few per transaction; the reported latency is theirs, from the database's commit to the arrival time
that Redis records. Last comes a *burst*, as fast as the database accepts it; the reported rate is
the number of its changes over the time from its first commit to the last delivery. If the changes
of one phase do not all arrive, the demo skips the phases after it.

Finally the content of Redis and the files is compared with the writer's own record (`proof`).
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deltaforge_dagster.errors import DeltaforgeError, SettingsError
from deltaforge_dagster.installation.process import interrupt_once
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.state.records import RangeRow
from deltaforge_lab.arrivals import Arrival, percentile, read_redis
from deltaforge_lab.demo.environment import STREAMS, DemoEnvironment, DemoSource
from deltaforge_lab.demo.patience import Patience
from deltaforge_lab.demo.proof import (
    ArrivalCounter,
    Proof,
    SinkVerdict,
    arrival_rate,
    latencies,
    read_lines,
)
from deltaforge_lab.demo.workload import Workload

_ROWS: Mapping[DemoSource, int] = {"postgres": 100_000, "turso": 20_000}
_FIRST_SHARE, _CALM_SHARE = 0.01, 0.05
_FIRST_MOST, _CALM_MOST = 300, 3_000
_CALM_SECONDS = 15.0
_CALM_TRANSACTION, _BURST_TRANSACTION = 12, 1_000
_CLOSING_SECONDS = 30.0
_TICK_SECONDS = 0.25


def demo(
    *,
    source: Annotated[
        DemoSource,
        typer.Option(help="Read PostgreSQL, or a SQLite file through the source `turso`."),
    ] = "postgres",
    rows: Annotated[
        int | None,
        typer.Option(min=100, help="Number of changes to write. Default: 100,000; turso: 20,000."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object on the last line.")
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Directory for state, journal and logs, kept afterwards. "
                "Default: a temporary directory."
            ),
        ),
    ] = None,
) -> None:
    """Start everything, write live changes, and prove that each one arrived once and in order.

    The command starts real servers on free ports (PostgreSQL unless the source is `turso`, Redis,
    Spark and Dagster) and always stops them at the end. The exit code is 0 only if no change was
    lost, repeated, reordered or altered.
    """
    console = Console(stderr=json_output, log_path=False)
    signal.signal(signal.SIGTERM, interrupt_once)
    signal.signal(signal.SIGHUP, interrupt_once)
    result: Result | None = None
    try:
        with (
            _directory(home) as directory,
            DemoEnvironment(directory, console.log, source) as environment,
        ):
            result = _Demo(environment, console, rows or _ROWS[source]).run()
            console.print(_summary(result))
            if keep:
                console.print(f"Everything runs on until Ctrl-C. Dagster's UI: {environment.ui}")
                if json_output:
                    _print_json(result)
                environment.wait()
    except DeltaforgeError as error:
        console.print(f"[red]The demo failed:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if result is None or not keep:
            raise typer.Exit(130) from None
    if json_output and not keep:
        _print_json(result)
    raise typer.Exit(0 if result.good else 1)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the demo; `as_json` describes the units."""

    captured: int
    verdicts: dict[str, SinkVerdict]
    seconds: float
    burst_rate: float | None
    latencies_ms: list[int]
    ranges: int
    ui: str

    @property
    def good(self) -> bool:
        """Whether every sink holds every change once, in order, as written."""
        return all(verdict.good for verdict in self.verdicts.values())

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints.

        `lost`, `duplicated`, `out_of_order` and `wrong` are sums over the sinks. `seconds` is the
        time from the first commit to the last delivery. `events_per_second` is the rate of the
        burst, null if none of it arrived. `latency_ms` is the latency of the calm changes.
        """
        verdicts = self.verdicts.values()
        return {
            "captured": self.captured,
            "delivered": {sink: verdict.delivered for sink, verdict in self.verdicts.items()},
            "lost": sum(verdict.lost for verdict in verdicts),
            "duplicated": sum(verdict.duplicated for verdict in verdicts),
            "out_of_order": sum(verdict.out_of_order for verdict in verdicts),
            "wrong": sum(verdict.wrong for verdict in verdicts),
            "seconds": round(self.seconds, 3),
            "events_per_second": None if self.burst_rate is None else round(self.burst_rate),
            "latency_ms": {
                "p50": percentile(self.latencies_ms, 0.5),
                "p99": percentile(self.latencies_ms, 0.99),
            },
            "ranges": self.ranges,
            "ui": self.ui,
        }


def _summary(result: Result) -> RenderableType:
    middle, slow = (percentile(result.latencies_ms, share) for share in (0.5, 0.99))
    return _summary_display(
        result.verdicts,
        {
            "captured": (
                f"{pluralize(result.captured, 'change')} in {pluralize(result.ranges, 'range')}"
            ),
            "burst": "nothing of it arrived"
            if result.burst_rate is None
            else f"{result.burst_rate:,.0f} changes/s, commit to arrival",
            "latency": "none of the calm changes arrived"
            if middle is None
            else f"p50 {middle} ms, p99 {slow} ms, of the calm changes",
        },
        good=result.good,
    )


class _Demo:
    """One demo in a running environment: write, watch, prove."""

    def __init__(self, environment: DemoEnvironment, console: Console, changes: int) -> None:
        self._environment = environment
        self._log = console.log
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._changes = changes
        self._database = environment.database
        self._workload = Workload(environment.database)
        self._arrived = ArrivalCounter(environment.redis_uri, STREAMS, environment.files)
        self._failure: BaseException | None = None

    def run(self) -> Result:
        """Write all changes, wait for them, and return the result.

        The display lasts as long as this call.
        """
        self._workload.create_tables()
        self._environment.start_platform()
        first = min(_FIRST_MOST, round(self._changes * _FIRST_SHARE))
        calm = min(_CALM_MOST, round(self._changes * _CALM_SHARE))
        burst = self._changes - first - calm
        with self._live, self._arrived:
            first_at = time.time()
            self._log(f"writing {pluralize(first, 'first change')}: the sensor starts a run")
            arrived = self._write(first, _BURST_TRANSACTION)
            if arrived:
                self._log(f"they arrived after {time.time() - first_at:.1f} s")
                self._log(f"writing {pluralize(calm, 'change')} calmly, over {_CALM_SECONDS:.0f} s")
            calm_at = time.time()
            arrived = arrived and self._write(calm, _CALM_TRANSACTION, _CALM_SECONDS)
            if arrived:
                self._log(
                    f"writing {pluralize(burst, 'change')} "
                    f"as fast as {self._database.title} takes them"
                )
            burst_at = time.time()
            if arrived:
                self._write(burst, _BURST_TRANSACTION)
            self._log("waiting for the last range to close")
            self._wait_for_ranges()
        self._log("reading Redis and the files back")
        in_redis = list(read_redis(self._environment.redis_uri, STREAMS))
        verdicts = {
            "redis": self._judge(in_redis),
            "files": self._judge(read_lines(self._environment.files)),
        }
        last_at = max((arrival.at_ms or 0 for arrival in in_redis), default=0) / 1000
        ranges = self._environment.store.ranges.read(self._database.pipeline)
        return Result(
            captured=sum(row.rows for row in ranges),
            verdicts=verdicts,
            seconds=max(last_at - first_at, 0),
            burst_rate=arrival_rate(in_redis, int(burst_at * 1000)),
            latencies_ms=latencies(in_redis, round(calm_at * 1000), round(burst_at * 1000)),
            ranges=len(ranges),
            ui=self._environment.ui,
        )

    def _judge(self, arrivals: Iterable[Arrival]) -> SinkVerdict:
        proof = Proof(self._workload.record, self._database.tables)
        for arrival in arrivals:
            proof.see(arrival.event)
        return proof.verdict()

    def _write(self, changes: int, per_transaction: int, seconds: float = 0) -> bool:
        """Write from a separate thread; return True once every sink has as many changes as written.

        Return False when the demo gives up waiting for the rest (`Patience`); that rest counts as
        lost.

        Raises:
            SettingsError: The database refused a change, or Dagster has ended.
        """
        stop = threading.Event()
        writer = threading.Thread(
            target=self._write_in_thread,
            args=(changes, per_transaction, seconds, stop),
            daemon=True,
        )
        writer.start()
        try:
            patience = Patience(time.monotonic())
            while True:
                writing = writer.is_alive()
                arrived = self._show()
                everything = not writing and min(arrived.values()) >= self._workload.record.total
                if everything:
                    break
                now = time.monotonic()
                if message := patience.poll(now, arrived, self._run_at_work(), writing=writing):
                    self._log(message)
                if why := patience.over(now):
                    self._log(f"{why}: the demo ends without the rest")
                    break
                time.sleep(_TICK_SECONDS)
        finally:
            stop.set()
            writer.join()
        if self._failure:
            raise SettingsError(
                f"{self._database.title} refused a change: {self._failure}"
            ) from self._failure
        return everything

    def _write_in_thread(
        self, changes: int, per_transaction: int, seconds: float, stop: threading.Event
    ) -> None:
        try:
            self._workload.write(changes, per_transaction, seconds=seconds, stop=stop)
        except self._database.errors as error:
            self._failure = error

    def _run_at_work(self) -> str | None:
        store = self._environment.store
        lease = store.leases.get(self._database.pipeline)
        return lease.run_id if lease is not None and lease.active_at(store.now()) else None

    def _wait_for_ranges(self) -> None:
        deadline = time.monotonic() + _CLOSING_SECONDS
        while self._environment.store.ranges.read(self._database.pipeline, state="open", limit=1):
            if time.monotonic() > deadline:
                return
            self._show()
            time.sleep(_TICK_SECONDS)

    def _show(self) -> dict[str, int]:
        """Check the processes, update the display, and return how many events each sink holds."""
        self._environment.check()
        arrived = self._arrived.count()
        ranges = self._environment.store.ranges.read(self._database.pipeline, newest_first=True)
        self._live.update(
            _progress_display(
                written=self._workload.record.total,
                captured=sum(row.rows for row in ranges),
                arrived=arrived,
                ranges=ranges,
                ui=self._environment.ui,
            ),
            refresh=True,
        )
        return arrived


@contextmanager
def _directory(home: Path | None) -> Iterator[Path]:
    """Yield the demo's directory.

    A given one is kept, a temporary one only after a `DeltaforgeError`.
    """
    if home is not None:
        home = home.absolute()
        home.mkdir(parents=True, exist_ok=True)
        if any(home.iterdir()):
            raise SettingsError(f"--home {home} holds files: name a new or an empty directory")
        yield home
        return
    temporary = Path(tempfile.mkdtemp(prefix="deltaforge-demo-"))
    try:
        yield temporary
    except DeltaforgeError as error:
        raise SettingsError(f"{error} (files are kept in {temporary})") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(temporary, ignore_errors=True)


def _print_json(result: Result) -> None:
    print(json.dumps(result.as_json()), flush=True)  # noqa: T201 - the command's output


_SHOWN_RANGES = 5


def _progress_display(
    *,
    written: int,
    captured: int,
    arrived: Mapping[str, int],
    ranges: Sequence[RangeRow],
    ui: str,
) -> RenderableType:
    """Return the progress display; `ranges` are sorted newest first."""
    counts = Table(box=None, pad_edge=False)
    lines = {"written": written, "captured": captured}
    lines |= {f"in {sink}": count for sink, count in arrived.items()}
    for name in lines:
        counts.add_column(name, justify="right")
    counts.add_column("lag", justify="right")
    lag = written - min(arrived.values(), default=0)
    counts.add_row(*(f"{count:,}" for count in lines.values()), f"{lag:,}")
    newest = Table(box=None, pad_edge=False)
    for name in ("range", "state", "changes", "segments", "seconds"):
        newest.add_column(name, justify="right")
    for row in ranges[:_SHOWN_RANGES]:
        newest.add_row(
            f"{row.range}",
            row.state,
            f"{row.rows:,}",
            f"{row.last_segment - row.first_segment + 1}",
            f"{row.closed_at - row.opened_at:.1f}" if row.closed_at else "",
        )
    return Group("", counts, "", newest, "", Text(f"Dagster's UI: {ui}"))


def _summary_display(
    verdicts: Mapping[str, SinkVerdict], figures: Mapping[str, str], *, good: bool
) -> RenderableType:
    """Return the summary: one line per sink, then the figures, then the verdict in one sentence."""
    table = Table()
    table.add_column("sink")
    for name in ("delivered", "lost", "duplicated", "out of order", "wrong"):
        table.add_column(name, justify="right")
    for sink, verdict in verdicts.items():
        counts = (
            verdict.delivered,
            verdict.lost,
            verdict.duplicated,
            verdict.out_of_order,
            verdict.wrong,
        )
        table.add_row(sink, *(f"{count:,}" for count in counts))
    rest = Table.grid(padding=(0, 2))
    for name, value in figures.items():
        rest.add_row(name, value)
    sentence = (
        Text("Every change arrived, once, in order per key, as written.", style="bold green")
        if good
        else Text("Not every change arrived once, in order, as written.", style="bold red")
    )
    return Group(table, rest, sentence)
