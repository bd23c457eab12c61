"""Tables of Delta and Iceberg that are compared with the source, and repaired, by Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.pipeline.lake.target import configure
from deltaforge_dagster.pipeline.reconcile.reports import TableReport
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.sinks.registry import LakeSinkType, sink_types
from tests.e2e.conftest import Shop
from tests.e2e.deployment import eventually
from tests.pipeline.lake.lake_tables import FORMATS, Format
from tests.pipeline.reconcile.copies import Copied, MakeCopied, goods, rows, shown
from tests.pipeline.snapshotting import Writers, fill

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.mysql]

PLACES = {
    "delta": 'path: "{folder}"',
    "iceberg": 'catalog: lake, catalog_properties: {{{{type: hadoop, warehouse: "{folder}"}}}}',
}
SINK = "    - {{{{type: {format}, config: {{{{id: {id}, {place}, table: shop.{id}, commit_seconds: 0.1{more}}}}}}}}}\n"


@dataclass
class Lake:
    """A table and its copies in a lake: each sink has one, `shop.<id of the sink>`."""

    copied: Copied
    spark: Any

    def damage(self, *statements: str, sink: str = "copy") -> None:
        """Execute statements in which `TABLE` is the table of a sink."""
        blocks = {block.config.id: block for block in self.copied.feed.loaded.spec.spec.sinks}
        kind, config = sink_types()[blocks[sink].type], blocks[sink].config
        assert isinstance(kind, LakeSinkType)
        name = kind.dialect(config).table(("shop", sink))
        for statement in statements:
            self.spark.sql(statement.replace("TABLE", name))


MakeLake = Callable[..., Lake]


@pytest.fixture
def make_lake(make_copied: MakeCopied, tmp_path: Path) -> Iterator[MakeLake]:
    """Make a table, and a pipeline that copies it into sinks, given by their options by id."""
    with ExitStack() as stack:

        def make(
            form: Format,
            sinks: dict[str, str],
            kind: str = "postgres",
            table: str = "goods",
            make_table: Callable[[Shop], None] = goods,
        ) -> Lake:
            place = PLACES[form].format(folder=tmp_path / "lake")
            text = "".join(
                SINK.format(format=form, id=name, place=place, more=more)
                for name, more in sinks.items()
            )
            copied = make_copied(kind, table, make_table, text)
            feed = copied.feed
            sessions = stack.enter_context(
                build_run_context(feed.opened, feed.loaded).replay_sessions()
            )
            block = feed.loaded.spec.spec.sinks[0]
            sink_kind = sink_types()[block.type]
            assert isinstance(sink_kind, LakeSinkType)
            configure(sessions.session(), sink_kind.dialect(block.config).settings)
            return Lake(copied, sessions.session())

        yield make


COLUMNS = "name, note, first, last, price, weight, at, df_event_time, df_position, df_ordinal"


def copy_of(key: int, template: int) -> str:
    """Return the statement that adds a row like another one."""
    return f"INSERT INTO TABLE (id, {COLUMNS}) SELECT {key}, {COLUMNS} FROM TABLE WHERE id = {template}"


def test_damage_is_found_and_repaired(make_lake: MakeLake) -> None:
    """A row that was removed, one that was added and one that was changed are named, and repaired; the rest is equal."""
    lake = make_lake("iceberg", {"copy": ""})
    copied = lake.copied
    copied.deliver(rows(1, 12))
    assert copied.compare()["copy"].whole
    lake.damage(
        "DELETE FROM TABLE WHERE id = 1",
        "UPDATE TABLE SET name = 'another', weight = -0.0 WHERE id = 3",
        copy_of(1000, 2),
    )

    repaired = copied.compare(window_rows=8, repair=True)["copy"]
    assert (repaired.problem, repaired.windows) == (None, 2)
    assert shown(repaired) == {
        1: ("missing", []),
        3: ("different", ["name", "weight"]),
        1000: ("extra", []),
    }
    assert copied.compare()["copy"].whole
    copied.deliver("UPDATE goods SET name = 'newer' WHERE id IN (1, 3)")
    after = copied.compare()["copy"]
    assert (after.problem, after.shown, after.rows) == (None, [], 12)


@pytest.mark.soak("reconcile")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_ten_kinds_of_damage(make_lake: MakeLake, form: Format, kind: str) -> None:
    """Each of ten kinds of damage is found, named and repaired, also beside pending changes; in a history it is found."""
    sinks = {"copy": "", "soft": ", soft_deletes: true", "late": ", pending: true"}
    lake = make_lake(form, sinks | {"past": ", mode: history"}, kind)
    copied = lake.copied
    copied.deliver(rows(1, 40))
    copied.deliver(
        "UPDATE goods SET name = 'newer', first = 0 WHERE id = 5", "DELETE FROM goods WHERE id = 8"
    )
    before = copied.compare(window_rows=15)
    assert [(report.problem, report.differs, report.whole) for report in before.values()] == [
        (None, False, True)
    ] * 4
    for sink in sinks:
        former = copy_of(8, 9)
        if sink == "soft":
            former = "UPDATE TABLE SET df_deleted = false WHERE id = 8"
        lake.damage(
            "DELETE FROM TABLE WHERE id = 1",
            copy_of(1000, 2).replace("df_event", "df_deleted, df_event")
            if sink == "soft"
            else copy_of(1000, 2),
            "UPDATE TABLE SET name = CASE id WHEN 3 THEN 'another' ELSE 'name 5' END, first = id WHERE id IN (3, 5)",
            "UPDATE TABLE SET first = last, last = first WHERE id = 6",
            "UPDATE TABLE SET note = left(note, 10) WHERE id = 7",
            former,
            "INSERT INTO TABLE SELECT * FROM TABLE WHERE id = 10",
            "UPDATE TABLE SET price = round(price, 4) WHERE id = 11",
            "UPDATE TABLE SET at = at + interval 1 hour WHERE id = 12",
            sink=sink,
        )
    lake.damage("UPDATE TABLE SET name = 'another' WHERE id = 3 AND df_is_current", sink="past")
    reports = copied.compare(window_rows=15)
    assert shown(reports.pop("past")) == {3: ("different", ["name"])}
    for report in reports.values():
        assert (report.problem, shown(report)) == (
            None,
            {
                1: ("missing", []),
                1000: ("extra", []),
                3: ("different", ["name"]),
                5: ("different", ["name", "first"]),
                6: ("different", ["first", "last"]),
                7: ("different", ["note"]),
                8: ("extra", []),
                10: ("duplicate", []),
                11: ("different", ["price"]),
                12: ("different", ["at"]),
            },
        )
        assert (report.missing, report.extra, report.different, report.duplicate) == (1, 2, 6, 1)
    repaired = copied.compare(window_rows=15, repair=True)
    assert "with mode history" in (repaired["past"].problem or "")
    assert "`pending`" in (repaired["late"].problem or "")
    assert [repaired[sink].problem for sink in ("copy", "soft")] == [None, None]
    copied.deliver("UPDATE goods SET name = 'newest' WHERE id IN (1, 3, 10, 20)")
    for sink in ("copy", "soft"):
        after = copied.compare(sink=sink)[sink]
        assert (after.problem, after.shown, after.rows, after.whole) == (None, [], 39, True)


@pytest.mark.soak("reconcile")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMATS)
def test_no_false_alarm_under_load(make_lake: MakeLake, form: Format) -> None:
    """While rows come, go, change and get other keys, and the table is truncated, nothing differs; damage is repaired."""
    sinks = {"copy": "", "late": ", pending: true", "past": ", mode: history"}
    lake = make_lake(form, sinks, table="hot", make_table=lambda shop: fill(shop, "hot", 1))
    copied = lake.copied
    copied.deliver("TRUNCATE hot")
    copied.feed.begin()
    writers = Writers(copied.feed.shop, "hot")
    reports: list[TableReport] = []
    with writers.hammering():
        eventually(lambda: writers.transactions > 300)
        truncating = threading.Timer(10.0, lambda: copied.feed.shop.execute("TRUNCATE hot"))
        truncating.start()
        for _ in range(3):
            reports += copied.compare(window_rows=400).values()
        truncating.join()
    copied.feed.end_all()
    assert [(report.problem, report.shown) for report in reports] == [(None, [])] * 9
    assert sum(report.rows for report in reports) > 100
    copied.deliver()
    lake.damage("UPDATE TABLE SET t = concat('z', t)")
    assert copied.compare(sink="copy", repair=True)["copy"].problem is None
    assert copied.compare(sink="copy")["copy"].shown == []
