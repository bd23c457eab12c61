"""What every source promises of snapshots, proved on each of them with a real server."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pymysql
import pytest
import turso

from deltaforge_dagster.errors import SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, Source
from deltaforge_dagster.sources.registry import parse_read_view
from deltaforge_dagster.sources.snapshot import Chunk, ChunkRead, SnapshotSource
from deltaforge_dagster.testing.sources import LIMITS, Versions
from deltaforge_lab.servers.mysql import connect
from tests.contracts.test_source import bench  # noqa: F401 - a fixture
from tests.sources.mysql.bench import MysqlBench
from tests.sources.postgres.bench import PostgresBench
from tests.sources.turso.bench import FileBench

_POSTGRES_KEYS = {
    "k int": "g",
    "k smallint": "-g",
    "k bigint": "g * 100000000000",
    "k numeric": "g / 7.0",
    "k float8": "g / 3.0",
    "k text": "chr(64 + g % 26) || g || chr(96 + g % 26)",
    'k text COLLATE "C"': "'it''s \\ ' || chr(200 + g)",
    "k char(9)": "'c' || g",
    "k varchar(9)": "'v' || g",
    "k uuid": "md5(g::text)::uuid",
    "k date": "date '2000-01-01' + g * 40",
    "k timestamptz": "timestamptz '2000-01-01' + g * interval '7 hours 1.000001 s'",
    "k bytea": "decode(md5(g::text), 'hex')",
    "k bit(9)": "g::bit(9)",
    "k inet": "inet '10.0.0.0' + g * 77",
    "k int[]": "ARRAY[g % 3, g]",
    "k citext": "chr(65 + 32 * (g % 2) + g % 26) || g",
    "k boolean, l int": "g % 2 = 0, g",
    "k text, l int, m date": "'t' || g % 3, g % 4, date '2000-01-01' + g",
    "k small": "g",
}
_MYSQL_KEYS = {
    "k int": "g",
    "k tinyint": "-g",
    "k bigint unsigned": "18446744073709551615 - g",
    "k int unsigned zerofill": "g",
    "k decimal(20,5)": "g / 7",
    "k float": "g / 3",
    "k double": "g / 3",
    "k bit(20)": "g * 1000",
    "k varchar(20) CHARACTER SET utf8mb4": "CONCAT(CHAR(65 + 32 * (g % 2) + g % 26), g, _utf8mb4 x'F09F9880')",
    "k varchar(20) CHARACTER SET latin1": "CONCAT('it''s \\\\ ', g)",
    "k char(9) CHARACTER SET ucs2": "CONCAT('c', g)",
    "k binary(16)": "UNHEX(LEFT(SHA2(g, 256), 32))",
    "k varbinary(20)": "CONCAT(CHAR(g), UNHEX(LEFT(SHA2(g, 256), 32)))",
    "k date": "DATE('2000-01-01') + INTERVAL g MONTH",
    "k datetime(6)": "TIMESTAMP('2000-01-01') + INTERVAL g * 100000001 MICROSECOND",
    "k timestamp(3) NOT NULL DEFAULT '2000-01-01'": "TIMESTAMP('2000-01-01') + INTERVAL g HOUR",
    "k time": "SEC_TO_TIME(g * 3601 - 50000)",
    "k year": "1970 + g",
    "k enum('z','y','x','w'), l int": "1 + g % 4, g",
    "k int, l varchar(9), m date": "g % 3, CONCAT('l', g % 4), DATE('2000-01-01') + INTERVAL g DAY",
}
_SQLITE_KEYS = {
    "k INTEGER": "-g * 1000000007",
    "k int": "g * 3",
    "k TEXT": "char(64 + g % 26) || g || char(200 + g)",
    "k TEXT COLLATE NOCASE": "char(65 + 32 * (g % 2) + g % 26) || g",
    "k REAL": "g / 7.0",
    "k BLOB": "CAST(char(200 + g) || g AS BLOB)",
    "k": "CASE g % 4 WHEN 0 THEN g WHEN 1 THEN g / 3.0 WHEN 2 THEN 't' || g ELSE nullif(-g, -7) END",
    "k TEXT, l": "'t' || g % 3, nullif(g, 7)",
    "k INT, l TEXT, m": "g % 3, 'l' || g % 4, g",
}
_ROWS = 17


def snapshot_source(made: Any, **changed: Any) -> SnapshotSource:
    """Return a source of the bench whose log is kept from now on, as another process has it."""
    source = made.source(**changed)
    source.ensure_start()
    again = pickle.loads(pickle.dumps(source))
    assert isinstance(again, SnapshotSource)
    return again


def rows_of(read: ChunkRead) -> list[dict[str, Any]]:
    """Return the rows of a chunk."""
    found: list[dict[str, Any]] = []
    for batch in read.batches:
        assert batch.schema.equals(CAPTURED)
        found += batch.to_pylist()
    return found


def read_all(source: SnapshotSource, chunks: list[Chunk]) -> list[list[dict[str, Any]]]:
    """Return the rows of all chunks, read from the last to the first."""
    watermark = source.snapshots().watermark()
    with source.snapshots().reader() as reader:
        found = [rows_of(reader.read(chunk, watermark)) for chunk in reversed(chunks)]
    return found[::-1]


@dataclass
class Journal:
    """What a stream has captured, as the pipeline keeps it."""

    batches: list[ChangeBatch] = field(default_factory=list)
    versions: Versions = field(default_factory=Versions)
    ended: Position | None = None
    more: threading.Condition = field(default_factory=threading.Condition)

    def capture(self, source: Source, start: Position) -> None:
        """Take in what comes until the source is closed."""
        for batch in source.read(start, LIMITS, self.versions):
            with self.more:
                self.batches.append(batch)
                self.ended = batch.end or self.ended
                self.more.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something of it is true."""
        with self.more:
            assert self.more.wait_for(until, timeout=120)

    def changes(self) -> pa.Table:
        """Return everything that has come."""
        with self.more:
            found = [batch.rows for batch in self.batches if batch.rows is not None]
        return pa.Table.from_batches(found, CAPTURED)

    def rows(self, batch: ChangeBatch) -> list[dict[str, Any]]:
        """Return the changes of a batch."""
        return batch.rows.to_pylist() if batch.rows is not None else []


@contextmanager
def capturing(bench: Any, **changed: Any) -> Iterator[Journal]:  # noqa: F811 - as the fixture
    """Capture a bench's stream meanwhile."""
    source = bench.source(**changed)
    start = source.ensure_start()
    made = Journal()
    made.ended = start
    thread = threading.Thread(target=_quietly, args=(made, source, start))
    thread.start()
    try:
        yield made
    finally:
        source.close()
        thread.join()


@pytest.fixture
def journal(bench: Any) -> Iterator[tuple[Any, Journal]]:  # noqa: F811 - a fixture
    """A bench whose stream is being captured."""
    with capturing(bench) as made:
        yield bench, made


def _quietly(made: Journal, source: Source, start: Position) -> None:
    with pytest.raises(SourceUnavailable, match="closed"):  # that is how it ends
        made.capture(source, start)


def connection_of(made: Any) -> Any:
    """Return another connection to the bench's database; what it commits is durable, as the head is."""
    if isinstance(made, PostgresBench):
        return psycopg.connect(made.dsn, autocommit=True, options="-c synchronous_commit=on")
    if isinstance(made, FileBench):
        return made
    assert isinstance(made, MysqlBench)
    return connect(made.dsn)


def run(connection: Any, statement: str) -> None:
    """Run a statement."""
    if isinstance(connection, FileBench):
        connection.execute(statement)
        return
    with connection.cursor() as cursor:
        cursor.execute(statement)


def table_of(made: Any) -> dict[int, str]:
    """Return the rows of `orders`."""
    if isinstance(made, FileBench):
        return dict(made.rows("SELECT id, v FROM orders"))
    connection = connection_of(made)
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, v FROM orders")
        found = dict(cursor.fetchall())
    connection.close()
    return found


def test_every_row_is_in_one_chunk_whatever_the_key(bench: Any) -> None:  # noqa: F811 - a fixture
    """Chunks of tables with keys of every type: even, together the whole table, no row twice; rows
    that come after the plan are in exactly one as well.
    """  # noqa: D205 - one sentence
    postgres = isinstance(bench, PostgresBench)
    keys = _POSTGRES_KEYS if postgres else _MYSQL_KEYS
    if isinstance(bench, FileBench):
        keys = _SQLITE_KEYS
    elif postgres:
        bench.execute("CREATE EXTENSION citext", "CREATE DOMAIN small AS int CHECK (value < 1000)")
    else:
        bench.run("SET time_zone = '+00:00'", "SET sql_mode = ''")
    schema = "public" if postgres else bench.database
    for number, (columns, values) in enumerate(keys.items()):
        names = ", ".join(one.split()[0] for one in columns.split(", "))
        statement = f"CREATE TABLE t{number} ({columns}, g int, PRIMARY KEY ({names}))"
        if "enum" in columns:
            statement = f"CREATE TABLE t{number} ({columns}, g int, PRIMARY KEY (k, l))"
        bench.execute(statement, *_inserts(number, values, range(1, _ROWS), postgres=postgres))
    source = snapshot_source(bench, tables=(f"{schema}.t*",))
    chunks = list(source.snapshots().plan(None, 5))
    for number, values in enumerate(keys.values()):
        bench.execute(*_inserts(number, values, range(_ROWS, _ROWS + 1), postgres=postgres))
    assert [Chunk.from_json(chunk.to_json()) for chunk in chunks] == chunks
    found = read_all(source, chunks)

    for number, columns in enumerate(keys):
        mine = [
            [json.loads(row["after"])["g"] for row in rows]
            for chunk, rows in zip(chunks, found, strict=True)
            if chunk.table == f"{schema}.t{number}"
        ]
        assert sorted(itertools.chain(*mine)) == list(range(1, _ROWS + 1)), columns
        assert len(mine) == 4, columns
        assert max(map(len, mine)) <= 6, columns


def _inserts(number: int, values: str, ids: range, *, postgres: bool) -> list[str]:
    if postgres:
        series = f"generate_series({ids[0]}, {ids[-1]}) g"
        return [f"INSERT INTO t{number} SELECT {values}, g FROM {series}"]
    return [
        f"INSERT INTO t{number} SELECT {values}, g FROM (SELECT {one} AS g) AS one" for one in ids
    ]


def test_rows_are_those_of_the_stream(journal: tuple[Any, Journal]) -> None:
    """A row has the image, the key and the table version that the stream has for it, and no place in the
    log; what it is called is the same in no other read.
    """  # noqa: D205 - one sentence
    made, captured = journal
    made.execute("INSERT INTO orders VALUES (1, 'é \"\\ 1'), (2, NULL)")
    captured.wait(lambda: sum(map(len, map(captured.rows, captured.batches))) >= 2)
    logged = [row for batch in captured.batches for row in captured.rows(batch)]
    source = snapshot_source(made)
    snapshots = source.snapshots()
    (chunk,) = [one for one in snapshots.plan(None, 1000) if one.table.endswith(".orders")]
    with snapshots.reader() as reader:
        read = reader.read(chunk, snapshots.watermark())
        first = rows_of(read)
        second = rows_of(reader.read(chunk, snapshots.watermark()))

    ours, theirs = ({r["key"]: r for r in rows} for rows in (first, logged))
    assert ours.keys() == theirs.keys() == {'{"id":1}', '{"id":2}'}
    for key, row in ours.items():
        for name in ("db", "schema", "table", "after"):
            assert row[name] == theirs[key][name]
        assert (row["op"], row["before"], row["tx_id"], row["pos"]) == ("r", None, None, None)
        assert abs(row["ts_us"] - theirs[key]["ts_us"]) < 600_000_000
    assert read.table in [table for table, _ in captured.versions.registered]
    ids = [row["event_id"] for row in (*first, *second, *logged)]
    assert len(set(ids)) == 6
    assert [row["row"] for row in first] == [0, 1]


def test_snapshot_and_changes_make_the_table(journal: tuple[Any, Journal]) -> None:
    """While two writers insert, update, delete and change keys, chunks are read; put behind what was
    captured up to their position, without the keys of changes that were not visible, they and the changes make
    the table, and no row ever becomes older.
    """  # noqa: D205 - one sentence
    check_splices(*journal)


def check_splices(made: Any, captured: Journal) -> None:
    """Check that a snapshot and what is captured beside it make the table."""
    made.execute("INSERT INTO orders VALUES " + ", ".join(f"({n}, '0')" for n in range(1, 200)))
    source = snapshot_source(made)
    stop = threading.Event()
    writers = [
        threading.Thread(
            target=_write,
            args=(made, stop, seed, range(1000 * (seed + 1), 1000 * (seed + 1) + 300)),
        )
        for seed in range(2)
    ]
    for writer in writers:
        writer.start()
    snapshots = source.snapshots()
    reads: list[tuple[ChunkRead, list[dict[str, Any]]]] = []
    try:
        with snapshots.reader() as reader:
            watermark = snapshots.watermark()
            for chunk in snapshots.plan([_orders(made)], 20):
                read = reader.read(chunk, watermark)
                reads.append((read, rows_of(read)))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    # A chunk may stand at a place of PostgreSQL's log that is not durable yet, and so behind its head.
    ends = [made.source().head(), *(read.position for read, _ in reads)]
    captured.wait(
        lambda: captured.ended is not None and all(_reached(captured.ended, end) for end in ends)
    )

    state: dict[str, int] = {}
    newest: dict[str, int] = {}
    for batch, spliced in _spliced(captured, reads):
        for row in [*captured.rows(batch), *spliced]:
            if row["table"] == "orders":
                _apply(state, row)
                value = state.get(row["key"], newest.get(row["key"], 0))
                assert newest.get(row["key"], 0) <= value
                newest[row["key"]] = value
    assert state == {f'{{"id":{id_}}}': int(v) for id_, v in table_of(made).items()}
    assert len(reads) > 5


def _orders(made: Any) -> str:
    return "public.orders" if isinstance(made, PostgresBench) else f"{made.database}.orders"


def _reached(position: Position, end: Position) -> bool:
    return end <= position


def _write(made: Any, stop: threading.Event, seed: int, ids: range) -> None:
    """Change rows of its own until asked to stop; values of a row grow."""
    choose = random.Random(seed)
    connection = connection_of(made)
    value = itertools.count(1)
    lost = (pymysql.MySQLError, psycopg.Error, sqlite3.Error, turso.Error)
    while not stop.is_set():
        one, other = choose.choice([*ids, *range(1 + seed, 200, 2)]), choose.choice(ids)
        statement = choose.choice(
            [
                f"INSERT INTO orders VALUES ({other}, '{{0}}')",
                f"UPDATE orders SET v = '{{0}}' WHERE id = {one}",
                f"UPDATE orders SET v = '{{0}}' WHERE id = {one}",
                f"DELETE FROM orders WHERE id = {other}",
                f"UPDATE orders SET id = {other}, v = '{{0}}' WHERE id = {choose.choice(ids)}",
            ]
        )
        try:
            run(connection, statement.format(next(value)))
        except lost:
            continue  # the key is taken, or two writers waited for each other
    if not isinstance(connection, FileBench):
        connection.close()


def _spliced(
    captured: Journal, reads: list[tuple[ChunkRead, list[dict[str, Any]]]]
) -> Iterator[tuple[ChangeBatch, list[dict[str, Any]]]]:
    """Yield batches, each with the rows of chunks that stand behind it."""
    waiting = list(reads)
    before: list[pa.RecordBatch] = []
    for batch in captured.batches:
        if batch.rows is not None:
            before.append(batch.rows)
        now = [one for one in waiting if batch.end is not None and one[0].position <= batch.end]
        waiting = [one for one in waiting if one not in now]
        yield batch, [row for read, rows in now for row in _kept(read, rows, before)]
    assert not waiting


def _kept(
    read: ChunkRead, rows: list[dict[str, Any]], before: list[pa.RecordBatch]
) -> list[dict[str, Any]]:
    read_view = parse_read_view(read.read_view.to_json())
    changed = set()
    for batch in before:
        for row, not_visible in zip(
            batch.to_pylist(), read_view.not_visible(batch).to_pylist(), strict=True
        ):
            if not_visible and row["table"] == "orders":
                changed |= {row["key"], *map(_key, filter(None, (row["before"], row["after"])))}
    return [row for row in rows if row["key"] not in changed]


def _key(image: str) -> str:
    return json.dumps({"id": json.loads(image)["id"]}, separators=(",", ":"))


def _apply(state: dict[str, int], row: Mapping[str, Any]) -> None:
    if row["before"] is not None and _key(row["before"]) != row["key"]:
        state.pop(_key(row["before"]), None)
    if row["op"] == "d":
        state.pop(row["key"], None)
        return
    assert row["op"] in {"c", "u", "r"}
    state[row["key"]] = int(json.loads(row["after"])["v"])


def test_tables_that_are_not_captured_are_refused(bench: Any) -> None:  # noqa: F811 - a fixture
    """A snapshot of a table that the stream does not have would miss its changes; without one asked
    for, all that are captured are read, and nothing else.
    """  # noqa: D205 - one sentence
    snapshots = snapshot_source(bench).snapshots()
    planned = {chunk.table.split(".")[1] for chunk in snapshots.plan(None, 10)}
    assert planned == {"orders", "items"}
    schema = _orders(bench).split(".", maxsplit=1)[0]
    for name in ("other", "nothing"):
        with pytest.raises(SourceMisconfigured, match=f"not captured: {schema}.{name}"):
            list(snapshots.plan([f"{schema}.{name}"], 10))


def test_a_condition_selects_rows(bench: Any) -> None:  # noqa: F811 - a fixture
    """With `where` a chunk has the rows that fulfil it; one that is no condition is refused at once."""
    bench.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b'), (3, 'a')")
    source = snapshot_source(bench)
    chunks = list(source.snapshots().plan([_orders(bench)], 2, "v = 'a' OR FALSE"))
    found = [row["key"] for rows in read_all(source, chunks) for row in rows]
    assert found == ['{"id":1}', '{"id":3}']
    with pytest.raises(Exception, match="nothing"):
        list(source.snapshots().plan([_orders(bench)], 2, "nothing = 1"))


def test_what_the_servers_keep_is_looked_at(bench: Any) -> None:  # noqa: F811 - a fixture
    """Before: whether slot, publication and log are there; meanwhile: whether they still are."""
    source = snapshot_source(bench)
    snapshots = source.snapshots()
    assert {one.level for one in snapshots.preflight(None, 2)} == {"ok"}
    start = source.head()
    assert snapshots.guard(start) == []
    bench.execute("INSERT INTO orders VALUES (1, 'a')")
    bench.drop_slot() if isinstance(bench, PostgresBench) else bench.forget()
    assert [one.level for one in snapshots.guard(start)] == ["error"]
