"""`deltaforge bench pg-delta` and the other pairs with tables, and `deltaforge bench changes`.

The pairs measure how fast a backlog of inserts reaches a table, as `drain` does for messages: the
measured time begins with the run and ends with it, when the last commit is made. `bench changes`
measures what changes of random rows cost in a table that already has many: they are updates,
deletes and inserts, first all in one backlog, then a few in each of several commits. What has
arrived is read back, after the measurement.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import psycopg
import typer
from rich.console import Console
from rich.table import Table

from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_lab.bench.cost.processes import Sampler
from deltaforge_lab.bench.drain import fill, progress
from deltaforge_lab.bench.installation import PIPELINE, Installation, Say, installed
from deltaforge_lab.bench.limits import MachineLimits, raw_write_rate
from deltaforge_lab.bench.shapes import ORDERS6, SHAPES, TRANSACTION_ROWS, Shape
from deltaforge_lab.bench.sources import STARTS, BenchSource, PostgresBench, SourceKind
from deltaforge_lab.bench.table_sinks import TABLES, TableBench, TableKind, TableMode

TABLE_PAIRS: dict[str, tuple[SourceKind, TableKind]] = {
    f"{source}-{kind}": (source, kind) for kind in TABLES for source in ("pg", "mysql")
}

_WARM_ROWS = 20_000
_NAMES = {
    "pg": "PostgreSQL",
    "mysql": "MySQL",
    "delta": "a Delta table",
    "iceberg": "an Iceberg table",
    "postgres": "a table in PostgreSQL",
    "clickhouse": "a table in ClickHouse",
    "objects": "Parquet files on object storage",
}
_CHANGED = "changed"
"""The note of an updated row."""


@dataclass(frozen=True, slots=True)
class TableDrain:
    """How a backlog was drained into a table.

    Attributes:
        pair: Source and kind of table.
        mode: What the table has.
        shape: Shape of the source's table.
        rows: Changes of the backlog.
        from_journal: Whether the backlog was in the journal before, so that the run captured
            nothing.
        seconds: How long the run took.
        events_per_second: `rows / seconds`.
        cpu_seconds_per_million: Processor seconds per million changes, of the run, Spark (JVM and
            Python workers), the source's server, and the sink's if there is one.
        peak_rss_mb: Peak resident memory of the run and Spark together, in MiB.
        peak_rss_mb_by: The peak of each of them.
        cores: Processors that this process may use.
        limits: The limits of the machine; None for changes of random rows, with which no plain
            client compares.
    """

    pair: str
    mode: TableMode
    shape: str
    rows: int
    from_journal: bool
    seconds: float
    events_per_second: int
    cpu_seconds_per_million: dict[str, float]
    peak_rss_mb: int
    peak_rss_mb_by: dict[str, int]
    cores: int
    limits: MachineLimits | None = None


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What changes of random rows cost.

    Attributes:
        backlog: All changes at once, in a table with `table_rows` rows.
        table_rows: Rows of the table before.
        commit_changes: Changes of each small commit.
        commit_seconds: Median of the time that a run needs to capture and commit them.
        commit_cpu_seconds: Median of the processor seconds of run and Spark for that.
    """

    backlog: TableDrain
    table_rows: int
    commit_changes: int
    commit_seconds: float
    commit_cpu_seconds: float


def table_command(pair: str) -> Callable[..., None]:
    """Return the command that measures a source with a format."""
    source, kind = TABLE_PAIRS[pair]

    def command(
        *,
        rows: Annotated[
            int, typer.Option(min=1_000, help="Number of changes in the backlog.")
        ] = 1_000_000,
        mode: Annotated[
            TableMode | None,
            typer.Option(help="What the table has. Default: current; of object files changelog."),
        ] = None,
        shape: Annotated[
            Literal["orders6", "wide10", "documents3"],
            typer.Option(help="Columns of the table."),
        ] = "orders6",
        from_journal: Annotated[
            bool,
            typer.Option(
                "--from-journal", help="Capture the backlog before, and measure only its delivery."
            ),
        ] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print one JSON object on the last line.")
        ] = False,
    ) -> None:
        mode = mode or TABLES[kind].modes[0]
        _check_mode(kind, mode)
        with (
            progress(quiet=as_json) as say,
            _opened(pair, mode, SHAPES[shape], min(_WARM_ROWS, rows), say) as bench,
        ):
            result = bench.drain_with_limits(pair, rows, from_journal=from_journal)
        if as_json:
            typer.echo(json.dumps(asdict(result)))
        else:
            _print(f"{pair}, {mode}, {rows:,} changes {shape}", _lines(result))

    command.__doc__ = (
        f"Measure draining a backlog from {_NAMES[source]} into {_NAMES[kind]}: rate, cost, limits."
    )
    return command


def _check_mode(kind: TableKind, mode: TableMode) -> None:
    if mode not in TABLES[kind].modes:
        raise NotAllowed(f"--mode must be {' or '.join(TABLES[kind].modes)} ({kind})")


def changes_of_rows(
    *,
    kind: Annotated[
        Literal["delta", "iceberg", "postgres", "clickhouse"],
        typer.Option("--sink", help="Where the table is."),
    ] = "delta",
    mode: Annotated[TableMode, typer.Option(help="What the table has.")] = "current",
    table_rows: Annotated[
        int, typer.Option(min=1_000, help="Rows of the table before.")
    ] = 10_000_000,
    changes: Annotated[
        int, typer.Option(min=1_000, help="Changes, of which no two are of one row.")
    ] = 1_000_000,
    commit_changes: Annotated[
        int, typer.Option(min=10, help="Changes of each of the small commits that follow.")
    ] = 1_000,
    commits: Annotated[int, typer.Option(min=1, help="How many small commits.")] = 5,
    from_journal: Annotated[
        bool,
        typer.Option(
            "--from-journal", help="Capture the changes before, and measure only their delivery."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Measure changes of random rows of a large table: 70 % updates, 10 % deletes, 20 % inserts."""
    total = changes + (commits + 1) * commit_changes
    if table_rows < total:
        raise NotAllowed(f"--table-rows must be at least {total:,}, the number of all changes")
    _check_mode(kind, mode)
    pair, warm = f"pg-{kind}", min(_WARM_ROWS, table_rows)
    with progress(quiet=as_json) as say, _opened(pair, mode, ORDERS6, warm, say) as bench:
        bench.fill(table_rows - warm)
        say("delivering the rows")
        bench.deliver()
        result = _changes(
            bench, pair, table_rows, changes, (commits, commit_changes), from_journal=from_journal
        )
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    title = f"{kind}, {mode}, {changes:,} changes in {table_rows:,} rows"
    small = {
        f"{commit_changes:,} changes, seconds": f"{result.commit_seconds:.2f}",
        f"{commit_changes:,} changes, cpu seconds": f"{result.commit_cpu_seconds:.2f}",
    }
    _print(title, _lines(result.backlog) | small)


@dataclass(frozen=True, slots=True)
class _OpenBench:
    """The running source, pipeline and table; source and table have the first `rows` rows."""

    source: BenchSource
    installation: Installation
    tables: TableBench
    mode: TableMode
    shape: Shape
    rows: int
    say: Say

    def fill(self, rows: int) -> None:
        """Write `rows` rows after the first `self.rows`."""
        for written in self.source.write(1 + self.rows, rows):
            self.say(f"filling the backlog: {written:,} of {rows:,} rows")

    def drain(
        self, pair: str, rows: int, write: Callable[[], None], *, from_journal: bool = False
    ) -> TableDrain:
        """Write a backlog of `rows` changes and deliver it.

        With `from_journal` it is captured before the measurement.
        """
        write()
        if from_journal:
            self.capture()
        self.say(f"draining {rows:,} changes")
        groups = {
            "run": os.getpid(),
            "spark": self.installation.spark.pid,
            "source": self.source.server.pid,
        }
        if self.tables.server is not None:
            groups["sink"] = self.tables.server.pid
        began = time.monotonic()
        with Sampler(groups, together=("run", "spark"), alone="run") as sampler:
            self.deliver()
        seconds = time.monotonic() - began
        return TableDrain(
            pair=pair,
            mode=self.mode,
            shape=self.shape.name,
            rows=rows,
            from_journal=from_journal,
            seconds=round(seconds, 3),
            events_per_second=round(rows / seconds),
            cpu_seconds_per_million={
                name: round(used / rows * 1e6, 3) for name, used in sampler.cpu_seconds().items()
            },
            peak_rss_mb=sampler.peak_together >> 20,
            peak_rss_mb_by={name: sampler.peak_rss[name] >> 20 for name in ("run", "spark")},
            cores=len(os.sched_getaffinity(0)),
        )

    def drain_with_limits(self, pair: str, rows: int, *, from_journal: bool) -> TableDrain:
        """Write, deliver and check a backlog of `rows` inserts, and measure the limits."""

        def write() -> None:
            self.source.begin_backlog()
            self.fill(rows)
            self.source.end_backlog()

        result = self.drain(pair, rows, write, from_journal=from_journal)
        self.expect(self.rows + rows)
        self.say("reading the raw log")
        raw_read = rows / self.source.read_raw()
        self.say("writing the raw rows")
        raw_write = raw_write_rate(self.tables.raw_writer())
        limits = MachineLimits.of(rows / result.seconds, raw_read=raw_read, raw_write=raw_write)
        return dataclasses.replace(result, limits=limits)

    def capture(self) -> None:
        """Execute a run that captures everything and delivers nothing."""
        self.say("capturing the backlog")
        checkpoints = self.installation.store.checkpoints
        checkpoints.pause(PIPELINE, "sink")
        self.deliver()
        checkpoints.resume(PIPELINE, "sink")

    def deliver(self) -> None:
        """Execute a run until everything is delivered."""
        outcome = self.installation.catch_up()
        if problem := outcome.capture_error or outcome.sink_errors.get("sink"):
            raise DeltaforgeError(f"not everything was delivered: {problem}")

    def expect(self, rows: int, condition: str = "true") -> None:
        """Check how many rows the table has."""
        self.say("counting the table's rows")
        count = self.tables.count(self.installation, condition)
        if count != rows:
            raise DeltaforgeError(f"the table has {count:,} rows instead of {rows:,} ({condition})")


@contextmanager
def _opened(pair: str, mode: TableMode, shape: Shape, rows: int, say: Say) -> Iterator[_OpenBench]:
    """Start everything, and deliver the first `rows`."""
    source_kind, kind = TABLE_PAIRS[pair]
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="deltaforge-tables-")))
        say("starting the servers")
        source = owned.enter_context(closing(STARTS[source_kind]()))
        source.create(shape)
        tables = owned.enter_context(closing(TABLES[kind](mode, folder)))
        installation = owned.enter_context(installed(source, tables, jars=tables.jars, say=say))
        bench = _OpenBench(source, installation, tables, mode, shape, rows, say)
        say("warming up")
        fill(source, 1, rows)
        bench.deliver()
        yield bench


def _changes(
    bench: _OpenBench,
    pair: str,
    table_rows: int,
    changes: int,
    small: tuple[int, int],
    *,
    from_journal: bool,
) -> TableChanges:
    commits, size = small
    total = changes + (commits + 1) * size
    keys = random.Random(1).sample(range(1, table_rows + 1), total)  # noqa: S311 - no secret
    writer = _ChangeWriter(bench.source, bench.shape, keys, table_rows)

    def write() -> None:
        bench.say(f"writing {changes:,} changes")
        writer.write(changes)

    bench.say("warming up")  # so far there were only appends
    writer.write(size)
    bench.deliver()
    backlog = bench.drain(pair, changes, write, from_journal=from_journal)
    measured = [
        bench.drain(pair, size, lambda: writer.write(size), from_journal=from_journal)
        for _ in range(commits)
    ]
    if bench.mode == "current":
        bench.expect(table_rows + writer.inserted - writer.deleted)
        bench.expect(writer.updated, f"note = '{_CHANGED}'")
    return TableChanges(
        backlog,
        table_rows,
        size,
        statistics.median(drain.seconds for drain in measured),
        statistics.median(
            sum(drain.cpu_seconds_per_million[name] for name in ("run", "spark")) * size / 1e6
            for drain in measured
        ),
    )


class _ChangeWriter:
    """Changes rows of PostgreSQL's table: 70 % updates, 10 % deletes, 20 % inserts.

    Attributes:
        updated: How many rows have been updated.
        deleted: How many rows have been deleted.
        inserted: How many rows have been inserted.
    """

    def __init__(self, source: BenchSource, shape: Shape, keys: list[int], rows: int) -> None:
        assert isinstance(source, PostgresBench)
        self._dsn = source.dsn
        self._shape = shape
        self._keys = keys
        self._next = rows + 1
        self.updated = self.deleted = self.inserted = 0

    def write(self, changes: int) -> None:
        """Make changes, up to 1,000 in a transaction."""
        table = self._shape.name
        with psycopg.connect(self._dsn) as connection:
            for done in range(0, changes, TRANSACTION_ROWS):
                count = min(TRANSACTION_ROWS, changes - done)
                updates, deletes = count * 7 // 10, count // 10
                keys = [self._keys.pop() for _ in range(updates + deletes)]
                connection.execute(
                    f"UPDATE {table} SET note = '{_CHANGED}' WHERE id = ANY(%s)",  # noqa: S608
                    [keys[:updates]],
                )
                connection.execute(
                    f"DELETE FROM {table} WHERE id = ANY(%s)",  # noqa: S608
                    [keys[updates:]],
                )
                inserts = count - updates - deletes
                connection.execute(self._shape.insert("postgres", self._next, inserts).encode())
                connection.commit()
                self._next += inserts
                self.updated += updates
                self.deleted += deletes
                self.inserted += inserts


def _lines(result: TableDrain) -> dict[str, str]:
    return {
        "changes per second": f"{result.events_per_second:,}",
        "seconds": f"{result.seconds:.2f}",
        **(result.limits.lines() if result.limits is not None else {}),
        "peak memory of run and Spark": f"{result.peak_rss_mb:,} MiB",
    } | {
        f"cpu seconds per million, {name}": f"{value:.2f}"
        for name, value in result.cpu_seconds_per_million.items()
    }


def _print(title: str, lines: dict[str, str]) -> None:
    table = Table("measure", "value", title=title)
    for name, value in lines.items():
        table.add_row(name, value)
    Console().print(table)
