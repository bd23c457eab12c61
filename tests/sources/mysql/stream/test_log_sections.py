"""Log sections of MySQL's log, read by themselves: together they are what one reader reads."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import SourceUnavailable, UnsupportedEvent
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import LogSection, ReadLimits
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.stream.log_sections import BinlogSection, SectionTables
from deltaforge_dagster.testing.sources import Versions, insert
from tests.fix_mysql import MysqlVersion, StartMysql
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

SMALL = 1 << 10


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other`."""
    with MysqlBench(mysql_dsn) as made:
        yield made


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planner look at little at a time, so that it finds many places to cut at."""
    monkeypatch.setattr("deltaforge_dagster.sources.mysql.stream.log_sections.BUFFER_BYTES", 1)
    monkeypatch.setattr("deltaforge_dagster.sources.stream._LEAST_BUFFER_BYTES", SMALL)


def planned(
    bench: MysqlBench, start: Position, versions: Versions | None = None, log_bytes: int = SMALL
) -> list[LogSection]:
    """Return the log sections from `start` on."""
    found = bench.source().plan_sections(start, versions or Versions(), lambda: log_bytes)
    return [one for one in found if one is not None]


def read(bench: MysqlBench, section: LogSection, reader: int = 0) -> list[pa.RecordBatch]:
    """Return the rows of a log section, read by a source that was pickled."""
    source = pickle.loads(pickle.dumps(bench.source()))
    sent = pickle.loads(pickle.dumps(section))
    batches = list(source.read_section(sent, ReadLimits(max_wait=0.05), reader))
    assert batches[-1].end == section.end
    return [batch.rows for batch in batches if batch.rows is not None]


def read_on(
    bench: MysqlBench, start: Position, end: Position, versions: Versions
) -> list[pa.RecordBatch]:
    """Return the rows between two positions, as one reader reads them."""
    rows: list[pa.RecordBatch] = []
    source = bench.source()
    for batch in source.read(start, ReadLimits(max_wait=0.05), versions):
        if batch.rows is not None:
            rows.append(batch.rows)
        if batch.end is not None and end <= batch.end:
            break
    source.close()
    return rows


def content(rows: list[pa.RecordBatch]) -> tuple[int, str]:
    """Return how many rows there are, and the hash of all they say."""
    found = ContentHash(CAPTURED)
    table = pa.Table.from_batches(rows, CAPTURED).unify_dictionaries()
    found.update(table)
    return table.num_rows, found.hexdigest()


def fill(bench: MysqlBench) -> None:
    """Write three files of a log, and a little of the fourth."""
    for number in range(0, 90, 3):
        bench.execute(insert("orders", number), insert("items", number, number + 1))
        bench.execute(insert("other", number))
        bench.execute(f"UPDATE orders SET v = repeat('x', 50) WHERE id = {number}")
        if number % 30 == 27:
            bench.run("FLUSH BINARY LOGS")
    bench.execute("DELETE FROM items")


def check_equal(bench: MysqlBench, start: Position) -> list[LogSection]:
    """Prove that all log sections together have what one reader reads, and return them."""
    sections = planned(bench, start)
    parts = [read(bench, one, reader) for reader, one in enumerate(sections)]
    whole = read_on(bench, start, sections[-1].end, Versions())

    assert len(sections) > 5
    assert sections[0].start == start
    assert all(one.end == two.start for one, two in itertools.pairwise(sections))
    assert all(parts)
    assert content([rows for part in parts for rows in part]) == content(whole)
    assert content(whole)[0] == 30 * 4 + 60
    assert {str(one.end.gtid_set) for one in sections if isinstance(one.end, BinlogPosition)}
    return sections


@pytest.mark.parametrize(
    "version",
    [
        "8.0",
        *(
            pytest.param(one, marks=pytest.mark.soak("versions"))
            for one in ("5.7", "9.7", "mariadb")
        ),
    ],
)
def test_sections_contain_what_one_reader_reads(mysql_version: MysqlVersion, version: Any) -> None:
    """Several files, cut between transactions: the same rows, ids, positions and versions."""
    with MysqlBench(mysql_version(version).create_database()) as bench:
        start = bench.source().ensure_start()
        fill(bench)
        check_equal(bench, start)


def test_also_without_gtids(start_mysql: StartMysql) -> None:
    """Place and ids by file and offset do as well."""
    server = start_mysql({"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"})
    with MysqlBench(server.create_database()) as bench:
        start = bench.source().ensure_start()
        fill(bench)
        sections = check_equal(bench, start)

        assert all(not one.end.gtid_set for one in sections if isinstance(one.end, BinlogPosition))


def test_a_definition_ends_the_last_section(bench: MysqlBench) -> None:
    """Nothing behind an ALTER, an XA transaction or a TRUNCATE is planned as a section, everything before it is."""
    start = bench.source().ensure_start()
    for ending in (
        ["ALTER TABLE other ADD COLUMN n int"],
        ["TRUNCATE TABLE other"],
        ["XA START 'x'", "DELETE FROM orders", "XA END 'x'", "XA PREPARE 'x'", "XA COMMIT 'x'"],
    ):
        bench.execute("INSERT INTO orders (id, v) VALUES (1, 'a')")
        before = bench.source().head()
        bench.run(*ending)
        bench.execute(insert("items", 1))
        sections = planned(bench, start)
        bench.execute("DELETE FROM items", "DELETE FROM orders")

        assert [one.end.to_json() for one in sections][-1] == before.to_json()
        start = bench.source().head()


def test_log_without_captured_changes_is_no_section(bench: MysqlBench) -> None:
    """What is not captured goes with what is, however much log it is."""
    start = bench.source().ensure_start()
    for number in range(40):
        bench.execute(insert("other", *range(20 * number, 20 * number + 20)))
    assert planned(bench, start) == []
    bench.execute(insert("orders", 1))

    (section,) = planned(bench, start)

    assert section.start == start
    assert sum(rows.num_rows for rows in read(bench, section)) == 1


def test_one_transaction_is_never_split(bench: MysqlBench) -> None:
    """A transaction that is larger than a log section may get is one."""
    start = bench.source().ensure_start()
    bench.execute(*(insert("orders", *range(100 * n, 100 * n + 100)) for n in range(20)))
    bench.execute(insert("items", 1))

    first, *_ = planned(bench, start)

    assert sum(rows.num_rows for rows in read(bench, first)) >= 2000


def test_what_was_not_foreseen_fails_the_section(bench: MysqlBench) -> None:
    """A table version that was not registered before: its reader asks nobody and gives up."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1))
    (section,) = planned(bench, start)
    assert isinstance(section, BinlogSection)

    with pytest.raises(UnsupportedEvent, match="not foreseen"):
        read(bench, replace(section, tables=SectionTables({}, section.tables.definitions)))
    with pytest.raises(UnsupportedEvent, match="not foreseen"):
        read(bench, replace(section, tables=SectionTables(section.tables.stamps, {})))


def test_a_section_belongs_to_one_server(bench: MysqlBench) -> None:
    """On another server the same place is another one; a log that is shorter now is noticed."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1))
    (section,) = planned(bench, start)
    assert isinstance(section, BinlogSection)

    with pytest.raises(SourceUnavailable, match="another server"):
        read(bench, replace(section, server="somebody"))
    beyond = replace(section.end, pos=section.end.pos + 1_000_000)
    with pytest.raises(SourceUnavailable, match="ended the stream"):
        read(bench, replace(section, end=beyond))


def test_versions_are_registered_when_sections_are_planned(bench: MysqlBench) -> None:
    """In the log's order, so that numbers do not depend on who reads."""
    start = bench.source().ensure_start()
    bench.execute(insert("items", 1))
    bench.execute(insert("other", 1))
    bench.execute(insert("orders", 1))
    planner_versions, versions = Versions(), Versions()

    sections = planned(bench, start, planner_versions)
    read_on(bench, start, sections[-1].end, versions)

    assert [table.table for table, _ in planner_versions.registered] == ["items", "orders"]
    assert planner_versions.registered == versions.registered
