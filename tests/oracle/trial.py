"""Trying a scenario: the source, the pipeline in this process, and the differences in the end."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.run.live import RunOutcome
from deltaforge_dagster.pipeline.snapshots.request import requested_snapshot
from deltaforge_dagster.resources.platform import Platform
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.mysql import MysqlServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.fix_mysql import MysqlVersion
from tests.fix_postgres import PostgresVersion
from tests.fix_spark import SparkAddress
from tests.oracle.compare import Comparison, Difference, Images
from tests.oracle.databases import Database, MysqlTables, PostgresTables
from tests.oracle.known import Excuses, documented_hold
from tests.oracle.scenario import Run, Scenario, Transaction
from tests.oracle.sinks import SINKS, Place
from tests.pipeline.live import Feed

LAST_REV = 1_000_000
"""The `rev` of the last change of a table, later than all that scenarios give."""

PIPELINE = """\
metadata: {{name: oracle, tenant: acme}}
spec:
  source: {source}, snapshot: {{mode: {snapshot}}}}}}}
  sinks:
{sinks}
  engine:
    run: {{idle_seconds: 4, lease_seconds: 60, renew_seconds: 1}}
    range: {{max_seconds: 600}}
    deliver: {{backoff_max_seconds: 2}}
"""


@dataclass(frozen=True, slots=True)
class Servers:
    """What trials share."""

    postgres: PostgresVersion
    mysql: MysqlVersion
    copies: PostgresServer
    clickhouse: ClickhouseServer
    spark: SparkAddress


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a scenario.

    Attributes:
        differences: What is not as it should be.
        excused: Documented reasons for which something was not compared.
        refused: Statements that the server refused, with the reason.
        seconds: What it took.
    """

    differences: tuple[Difference, ...]
    excused: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    seconds: float


def attempt(scenario: Scenario, servers: Servers) -> Trial:
    """Try a scenario."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oracle-") as name, ExitStack() as stack:
        folder = Path(name)
        database = stack.enter_context(_database(scenario, servers))
        place = stack.enter_context(_place(folder, servers, database.schema()))
        return _Attempt(scenario, database, place).execute(began)


@contextmanager
def _database(scenario: Scenario, servers: Servers) -> Iterator[Database]:
    """Lend a database for the scenario's tables, which is dropped at the end."""
    server: PostgresServer | MysqlServer
    database: Database
    if scenario.source == "postgres":
        server = servers.postgres(int(scenario.version))
        database = PostgresTables(server.create_database())
    else:
        server = servers.mysql(scenario.version)  # type: ignore[arg-type] # one of its words
        database = MysqlTables(server.create_database(), scenario.settings)
    try:
        yield database
    finally:
        database.close()


@contextmanager
def _place(folder: Path, servers: Servers, schema: str) -> Iterator[Place]:
    copy = servers.copies.create_database()
    database = f"oracle_{folder.name.replace('-', '_')}"
    servers.clickhouse.query(f"CREATE DATABASE {database}")
    try:
        yield Place(folder, copy, servers.clickhouse, database, servers.spark, schema)
    finally:
        servers.clickhouse.query(f"DROP DATABASE {database}")


class _Attempt:
    """One trial."""

    def __init__(self, scenario: Scenario, database: Database, place: Place) -> None:
        self._scenario = scenario
        self._database = database
        self._place = place
        self._images = {number: Images() for number in scenario.tables}
        self._outcome = RunOutcome("")
        self._excused: list[str] = []
        self._uncertain: dict[str, str] = {}
        self._lacking: dict[tuple[str, str], Sequence[str]] = {}

    def execute(self, began: float) -> Trial:
        """Run everything, and compare."""
        scenario, place = self._scenario, self._place
        for statements in scenario.tables.values():
            self._database.prepare(statements)
        file = place.folder / "oracle.yaml"
        file.write_text(self._pipeline())
        home = place.folder / "home"
        settings = Settings.from_env({"DELTAFORGE_HOME": str(home), **place.spark.settings(home)})
        with Platform(settings, single_process=True).open() as opened:
            feed = Feed(Shop("", ""), opened, file)
            stopped = self._stopped(feed)
            self._uncertain = {
                one.subject.rpartition(".")[2]: one.reason
                for one in feed.store.holds.read(feed.name)
            }
            histories = {one.name: one for one in feed.store.schemas.histories(feed.name)}
            self._lacking = {
                (one.sink, one.write.source[1]): histories[".".join(one.write.source)].names_now(
                    one.write.lacking
                )
                for one in feed.store.table_commits.tables(feed.name)
                if one.write.lacking
            }
        differences = [] if stopped is None else [stopped]
        if stopped is None:
            differences = [*self._compare()]
        return Trial(
            tuple(differences),
            tuple(dict.fromkeys(self._excused)),
            tuple(self._database.refused.statements),
            time.monotonic() - began,
        )

    def _pipeline(self) -> str:
        sinks = [f"    - {SINKS[name].yaml(self._place)}" for name in self._scenario.sinks]
        return PIPELINE.format(
            source=self._database.source(),
            snapshot="initial" if self._scenario.snapshot else "never",
            sinks="\n".join(sinks),
        )

    def _stopped(self, feed: Feed) -> Difference | None:
        """Run the steps; return why the pipeline has stopped, if it has."""
        try:
            self._outcome = feed.catch_up()
            if self._scenario.snapshot:
                self._observe()
                row = feed.store.pipelines.get(feed.name)
                assert row is not None
                assert requested_snapshot(feed.store, feed.loaded, row)
                feed.read_snapshot()
                self._outcome = feed.catch_up()
            for step in (*self._scenario.steps, None, Run()):
                if step is None:
                    self._touch()
                elif isinstance(step, Run):
                    self._outcome = feed.catch_up()
                    if self._outcome.reason != "caught up":
                        break
                else:
                    self._database.run(step)
                    self._observe(step.table)
        except DeltaforgeError as error:
            return Difference("pipeline", None, "stopped", f"{type(error).__name__}: {error}")
        problem = self._outcome.capture_error or (
            None
            if self._outcome.reason == "caught up"
            else f"the run ended: {self._outcome.reason}"
        )
        return Difference("pipeline", None, "stopped", problem) if problem else None

    def _touch(self) -> None:
        for number in self._scenario.tables:
            self._database.touch(f"t{number}", LAST_REV)
            self._observe(number)

    def _observe(self, table: int | None = None) -> None:
        for number, images in self._images.items():
            if table in {None, number} and (state := self._database.state(f"t{number}")):
                images.observe(state)

    def _compare(self) -> Iterator[Difference]:
        """Compare each table with what every reader sees."""
        for table, reason in self._uncertain.items():
            number = int(table.removeprefix("t"))
            if (why := documented_hold(reason) or self._hidden_column(number)) is None:
                yield Difference("source", number, "held", reason)
            else:
                self._excused.append(f"source: {why}")
        for sink in self._scenario.sinks:
            held = self._held(sink)
            text = self._outcome.sink_errors.get(sink) or (
                "it is behind" if self._outcome.behind.get(sink) else None
            )
            if text is not None and not set(held) & {f"t{one}" for one in self._scenario.tables}:
                yield Difference(sink, None, "failing", text)
                continue
            for number in self._scenario.tables:
                table = f"t{number}"
                if table in self._uncertain:
                    continue
                if table in held:
                    yield from self._judge_hold(sink, number, held[table])
                else:
                    yield from self._compare_safely(sink, number, table)

    def _held(self, sink: str) -> dict[str, str]:
        """Return the reason for each table that a sink holds."""
        text = self._outcome.sink_errors.get(sink, "")
        begin = r"(?:^|; |: )table (\S+) has everything up to segment \S+ and is held: "
        parts = re.split(begin, text)
        names = [
            re.sub(r"^(current|changelog)_", "", one.rpartition(".")[2]) for one in parts[1::2]
        ]
        return dict(zip(names, parts[2::2], strict=True))

    def _hidden_column(self, number: int) -> str | None:
        """Return why a table whose log has a column that no catalog shows may be held."""
        hides = self._scenario.version == "8.0" and any(
            isinstance(step, Transaction) and step.table == number and step.indexes_expression
            for step in self._scenario.steps
        )
        return "mysql.md: an index of an expression on MySQL 8.0.15" if hides else None

    def _judge_hold(self, sink: str, number: int, reason: str) -> Iterator[Difference]:
        why = documented_hold(reason)
        if "was there before is not known" in reason and any(
            isinstance(step, Transaction) and step.table == number and step.replaces_column
            for step in self._scenario.steps
        ):
            why = "tables.md: a transaction with rows that replaces a column"
        if why is None:
            yield Difference(sink, number, "held", reason)
        else:
            self._excused.append(f"{sink}: {why}")

    def _compare_safely(self, sink: str, number: int, table: str) -> Iterator[Difference]:
        """Compare a table; that it cannot be read is a difference, too."""
        lacking = self._lacking.get((sink, table), ())
        try:
            for difference in [*self._compare_table(sink, number, table)]:
                if difference.column in lacking:
                    said = f"{sink}: tables.md: status says that older rows lack a column"
                    self._excused.append(said)
                else:
                    yield difference
        except Exception as error:  # noqa: BLE001 - whatever a reader raises
            yield Difference(sink, number, "unreadable", f"{type(error).__name__}: {error}")

    def _compare_table(self, sink: str, number: int, table: str) -> Iterator[Difference]:
        state = self._database.state(table)
        if state is None:
            return
        images = self._images[number]
        excuses = Excuses(
            whole_images=self._scenario.settings.get("binlog_row_image", "FULL") == "FULL",
            toast=self._scenario.source == "postgres",
        )
        # Messages and files keep the names that columns had; a message that lacks a value leaves that of an older column.
        keeps_names = sink in {"messages", "parquet"} and excuses.whole_images
        # What a row was between two statements of a transaction, no other client has seen.
        left_out = self._scenario.defined_columns(number, among_rows=keeps_names)
        for reader, readings in SINKS[sink].readers(self._place, table, state):
            comparison = Comparison(reader, number, state, excuses)
            if readings is None:
                if state.rows:
                    says = f"{len(state.rows)} rows are in the source"
                    yield Difference(reader, number, "missing table", says)
            elif readings.events is None:
                yield from comparison.of_rows(readings)
            else:
                yield from comparison.of_changes(readings, images, left_out)
