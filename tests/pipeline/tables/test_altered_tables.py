"""Tables whose columns are dropped, added, renamed and swapped, in both databases: every copy equals its source."""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import orjson
import psycopg
import pytest

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.mysql import MysqlServer, connect
from deltaforge_lab.servers.postgres import PostgresServer
from tests.chance import examples
from tests.e2e.conftest import Shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress, connected
from tests.pipeline.live import Feed, opened_feed

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.mysql, pytest.mark.clickhouse]

PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {{type: {type}, config: {{id: shop, dsn: "{dsn}", {more}tables: ["{schema}.items"]}}}}
  sinks:
    - {{type: postgres, config: {{id: copy, dsn: "{copy}", table: items, commit_seconds: 0.1}}}}
    - {{type: postgres, config: {{id: past, dsn: "{copy}", table: past, mode: history, commit_seconds: 0.1}}}}
    - {{type: clickhouse, config: {{id: analytics, url: "{url}", password: "{password}", database: {database},
        table: items, mode: current, commit_seconds: 0.1}}}}
    - {{type: iceberg, config: {{id: iceberg, catalog: lake, table: shop.items, mode: current, commit_seconds: 0.1,
        catalog_properties: {{type: hadoop, warehouse: {folder}/iceberg}}}}}}
{delta}
  engine: {{run: {{idle_seconds: 600, lease_seconds: 20, renew_seconds: 0.5}}}}
"""
DELTA = """\
    - {{type: delta, config: {{id: delta, path: {folder}/delta, table: items, mode: current, commit_seconds: 0.1}}}}
"""

Rows = list[tuple[Any, ...]]


@dataclass
class Past:
    """Every version that the rows of a table had, by columns that keep their identity under any name.

    Attributes:
        columns: The identity of each column that the table has, by name.
        versions: The versions of each row, by its id: a value for each identity.
        added: What the rows that were there got in columns that were added.
    """

    columns: dict[str, int] = field(default_factory=dict)
    versions: dict[Any, list[dict[int, Any]]] = field(default_factory=dict)
    added: dict[int, Any] = field(default_factory=dict)
    _now: dict[Any, dict[int, Any]] = field(default_factory=dict)
    _last: int = 0

    def executed(self, statement: str, names: Sequence[str], rows: Rows) -> None:
        """Note what the table is like after a statement: its columns and rows."""
        renamed = dict(re.findall(r"RENAME COLUMN (\w+) TO (\w+)", statement))
        dropped = re.findall(r"DROP COLUMN (\w+)", statement)
        kept = {
            renamed.get(name, name): column
            for name, column in self.columns.items()
            if name not in dropped
        }
        new = [name for name in names if name not in kept]
        self.columns = kept | {name: self._last + count for count, name in enumerate(new, 1)}
        self._last += len(new)
        now = {
            row[names.index("id")]: {
                self.columns[name]: value for name, value in zip(names, row, strict=True)
            }
            for row in rows
        }
        altered = statement.startswith("ALTER")
        for key, values in now.items():
            if altered:
                # Its rows go on, with values for the columns that it adds.
                self.versions[key][-1] |= values
                self.added |= {self.columns[name]: values[self.columns[name]] for name in new}
            elif values != self._now.get(key):
                self.versions.setdefault(key, []).append(dict(values))
        self._now = now

    def rows(self, names: Sequence[str]) -> Rows:
        """Return every version of every row, ordered by id and then by time, in these columns."""
        return [
            tuple(self._value(version, self.columns[name]) for name in names)
            for _, versions in sorted(self.versions.items())
            for version in versions
        ]

    def _value(self, version: Mapping[int, Any], column: int) -> Any:
        return version[column] if column in version else NullOr(self.added.get(column))


@dataclass(frozen=True)
class NullOr:
    """Equals null and a value: a version that ended before a column was added may have been filled with its default.

    It is if it ended in the commit that adds the column, which fills the versions that it finds.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        """Say whether another value is one of both."""
        return other is None or other == self.value

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Source:
    """A database with the table `items`.

    Attributes:
        type: Its kind.
        dsn: Where it is.
        schema: The schema of the table, or its database.
        more: Further options of the source.
        past: What the table has been like.
    """

    type: str
    dsn: str
    schema: str
    more: str = ""
    past: Past = field(default_factory=Past)

    def change(self, *statements: str) -> None:
        """Execute statements, each in a transaction of its own, and note what the table is like after each."""
        for statement in statements:
            self.execute(statement)
            names = self.columns()
            self.past.executed(
                statement, names, self.execute(f"SELECT {', '.join(names)} FROM items")
            )

    def execute(self, *statements: str) -> Rows:
        """Execute statements, each in a transaction of its own; return the rows of the last one."""
        rows: Rows = []
        if self.type == "postgres":
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute("SET synchronous_commit = on")
                for statement in statements:
                    cursor = connection.execute(statement)
                    rows = cursor.fetchall() if cursor.description else []
            return rows
        with connect(self.dsn) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
                rows = list(cursor.fetchall())
            connection.commit()
        return rows

    def columns(self) -> list[str]:
        """The columns that the table has."""
        query = (
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'items'"
            f" AND table_schema = '{self.schema}' ORDER BY ordinal_position"
        )
        return [str(row[0]) for row in self.execute(query)]

    def rename(self, **names: str) -> list[str]:
        """Statements that rename columns, perhaps each to the name of the other."""
        if self.type == "mysql":
            items = ", ".join(f"RENAME COLUMN {old} TO {new}" for old, new in names.items())
            return [f"ALTER TABLE items {items}"]
        away = [f"ALTER TABLE items RENAME COLUMN {old} TO tmp_{old}" for old in names]
        return away + [f"ALTER TABLE items RENAME COLUMN tmp_{old} TO {new}" for old, new in names.items()]  # fmt: skip


@dataclass
class Copies:
    """A pipeline from a source to all kinds of tables; those of Delta, which take longest, on request."""

    source: Source
    feed: Feed
    folder: Path
    copy: str
    spark: SparkAddress
    clickhouse: ClickhouseServer
    database: str
    delta: bool

    def catch_up(self) -> None:
        """Deliver everything."""
        outcome = self.feed.catch_up()
        assert (outcome.reason, outcome.sink_errors, outcome.behind) == ("caught up", {}, {})

    def check(self) -> None:
        """Compare every copy with the source, and see that the product knows of nothing that they lack."""
        columns = self.source.columns()
        names = ", ".join(columns)
        expected = self.source.execute(f"SELECT {names} FROM items ORDER BY id")
        found = {
            "postgres": self._postgres(f"SELECT {names} FROM items ORDER BY id"),
            "history": self._postgres(f"SELECT {names} FROM past WHERE df_is_current ORDER BY id"),
            "clickhouse": self._clickhouse(names),
            **self._lakes(columns),
        }
        assert found == dict.fromkeys(found, expected)
        past = self._postgres(f"SELECT {names} FROM past ORDER BY id, df_position, df_ordinal")
        assert self.source.past.rows(columns) == past
        store = self.feed.store
        (history,) = store.schemas.histories("feed")
        lacking = {
            one.sink: tuple(history.names_now(one.write.lacking))
            for one in store.table_commits.tables("feed")
        }
        sinks = ["analytics", "copy", "iceberg", "past", *(["delta"] if self.delta else [])]
        assert lacking == dict.fromkeys(sinks, ())

    def _postgres(self, query: str) -> Rows:
        with psycopg.connect(self.copy) as connection:
            return connection.execute(query).fetchall()

    def _clickhouse(self, names: str) -> Rows:
        query = f"SELECT {names} FROM {self.database}.items FINAL ORDER BY id"
        answer = self.clickhouse.query(query, "JSONCompactEachRow")
        return [tuple(orjson.loads(line)) for line in answer.splitlines()]

    def _lakes(self, columns: Sequence[str]) -> Mapping[str, Rows]:
        session = connected(self.spark.remote)
        try:
            return {
                format_: [
                    tuple(row)
                    for row in session.read.format(format_)
                    .load(f"{self.folder}/{place}")
                    .orderBy("id")
                    .select(*columns)
                    .collect()
                ]
                for format_, place in (("delta", "delta/items"), ("iceberg", "iceberg/shop/items"))
                if self.delta or format_ != "delta"
            }
        finally:
            session.stop()


class MakeCopies(Protocol):
    """Makes copies of a table of one kind of source."""

    def __call__(self, kind: str, *, delta: bool = True) -> Copies:
        """Return them."""
        ...


BEFORE = (
    "CREATE TABLE items (id int PRIMARY KEY, a int, b int, c int)",
    "INSERT INTO items VALUES (1, 10, 100, 1000), (2, 20, 200, 2000)",
)


@pytest.fixture
def make_copies(  # noqa: PLR0917 - servers
    postgres_server: PostgresServer,
    mysql_server: MysqlServer,
    clickhouse_server: ClickhouseServer,
    clickhouse_database: str,
    spark_server: SparkAddress,
    tmp_path: Path,
) -> Iterator[MakeCopies]:
    """Make a table with rows, and copies of it that have read a snapshot, and nothing of the log."""

    @contextmanager
    def opened(kind: str, *, delta: bool = True) -> Iterator[Copies]:
        if kind == "mysql":
            dsn = mysql_server.create_database()
            source = Source(kind, dsn, dsn.rpartition("/")[2])
        else:
            dsn = postgres_server.create_database()
            name = f"feed_{uuid.uuid4().hex[:8]}"
            source = Source(kind, dsn, "public", f"slot: {name}, publication: {name}, ")
        source.change(*BEFORE)
        copy = postgres_server.create_database()
        text = PIPELINE.format(
            type=kind, dsn=dsn, more=source.more, schema=source.schema, copy=copy, folder=tmp_path,
            url=clickhouse_server.url, password=clickhouse_server.password, database=clickhouse_database,
            delta=DELTA.format(folder=tmp_path) if delta else "",
        )  # fmt: skip
        path = tmp_path / "feed.yaml"
        with opened_feed(cast("Shop", None), path, text, spark_server) as feed:
            feed.store.snapshots.request(feed.name, cause="command")
            run = feed.begin()
            feed.read_snapshot()
            eventually(lambda: feed.store.snapshots.unfinished(feed.name) is None)
            run.end()
            made = Copies(
                source, feed, tmp_path, copy, spark_server, clickhouse_server, clickhouse_database,
                delta,
            )  # fmt: skip
            made.catch_up()
            yield made

    with ExitStack() as stack:
        yield lambda kind, *, delta=True: stack.enter_context(opened(kind, delta=delta))


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
@pytest.mark.parametrize(
    ("late", "delta"),
    [
        pytest.param(False, False, id="soon"),
        pytest.param(False, True, marks=pytest.mark.soak("formats"), id="soon-with-delta"),
        pytest.param(True, True, marks=pytest.mark.soak("formats"), id="late-with-delta"),
    ],
)
def test_copies_equal_their_source(
    make_copies: MakeCopies, kind: str, late: bool, delta: bool
) -> None:
    """After some statements' rows, read at once or all together later: rows from before have what the source has."""
    copies = make_copies(kind, delta=delta)
    source = copies.source
    for statements in (
        # Only a snapshot has been read.
        [
            *source.rename(a="x"), "INSERT INTO items VALUES (3, 30, 300, 3000)",
            "ALTER TABLE items DROP COLUMN c", "ALTER TABLE items ADD COLUMN c int", "INSERT INTO items VALUES (4, 40, 400, 4000)",
        ],
        [
            *source.rename(x="b", b="x"), "UPDATE items SET x = 5 WHERE id = 1", "UPDATE items SET x = 6 WHERE id = 2",
            "ALTER TABLE items ADD COLUMN d int NOT NULL DEFAULT 7, ADD COLUMN e varchar(10) DEFAULT 'z', ADD f decimal(6,2) DEFAULT -1.5",
            "INSERT INTO items (id, d) VALUES (5, 8)",
            "UPDATE items SET d = 9 WHERE id = 2",
        ],
        ["ALTER TABLE items DROP COLUMN x", *source.rename(b="x"), "INSERT INTO items (id, x) VALUES (6, 60)", "DELETE FROM items WHERE id = 3"],
    ):  # fmt: skip
        source.change(*statements)
        if not late:
            copies.catch_up()
            copies.check()
    copies.catch_up()
    copies.check()


NAMES = "abcdef"


def script(chance: random.Random, source: Source, steps: int) -> Iterator[list[str]]:
    """Yield lists of statements that alter the table and change rows, as they come."""
    columns, last, values = ["a", "b", "c"], 2, itertools.count(10_000)
    for _ in range(steps):
        free = [name for name in NAMES if name not in columns]
        statements: list[str] = []
        match chance.choice(["add", "drop", "rename", "swap", "again", "widen"]):
            case "add" if free:
                columns.append(chance.choice(free))
                default = chance.choice(["", " DEFAULT 7", " NOT NULL DEFAULT -1"])
                statements.append(f"ALTER TABLE items ADD COLUMN {columns[-1]} int{default}")
            case "drop" if len(columns) > 1:
                name = columns.pop(chance.randrange(len(columns)))
                statements.append(f"ALTER TABLE items DROP COLUMN {name}")
            case "rename" if free:
                place = chance.randrange(len(columns))
                old, columns[place] = columns[place], chance.choice(free)
                statements += source.rename(**{old: columns[place]})
            case "swap" if len(columns) > 1:
                first, second = chance.sample(columns, 2)
                statements += source.rename(**{first: second, second: first})
            case "again":
                name = columns.pop(chance.randrange(len(columns)))
                columns.append(name)
                statements += [
                    f"ALTER TABLE items DROP COLUMN {name}",
                    f"ALTER TABLE items ADD COLUMN {name} int",
                ] if len(columns) > 1 or source.type == "postgres" else []  # fmt: skip
            case _:
                pass
        for _ in range(chance.randrange(3)):
            column = chance.choice(columns)
            match chance.choice("iud"):
                case "i":
                    last += 1
                    statements.append(f"INSERT INTO items (id, {column}) VALUES ({last}, {last})")
                case "u":
                    # No value comes twice: an update that changes nothing is none in MySQL's log.
                    statements.append(f"UPDATE items SET {column} = {next(values)} WHERE id = {chance.randint(1, last)}")  # fmt: skip
                case _:
                    statements.append(f"DELETE FROM items WHERE id = {chance.randint(1, last)}")
        yield statements


@pytest.mark.soak("formats")
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
@pytest.mark.parametrize("number", range(examples(1)))
def test_random_statements(make_copies: MakeCopies, kind: str, number: int) -> None:
    """Runs are where chance puts them."""
    copies = make_copies(kind)
    chance = random.Random(number)
    for number_of_step, statements in enumerate(script(chance, copies.source, 12)):
        copies.source.change(*statements)
        if chance.random() < 0.5:
            # A log says nothing of DDL before the next row.
            copies.source.change(f"INSERT INTO items (id) VALUES ({1000 + number_of_step})")
            copies.catch_up()
            copies.check()
    copies.source.change("INSERT INTO items (id) VALUES (2000)")
    copies.catch_up()
    copies.check()
