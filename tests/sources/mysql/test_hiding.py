"""Column rules on MySQL's log."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.mysql.events.binlog import WRITE_ROWS_2
from deltaforge_dagster.sources.mysql.events.table_map import Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.testing.sources import Versions, insert
from deltaforge_lab.synthetic import mysql_events as samples
from deltaforge_lab.synthetic.mysql_events import ORDERS, SyntheticLog, bitmap, orders_row, packed
from tests.chance import examples
from tests.sources.hidden import SALT, hashed, hidden_row, rules
from tests.sources.mysql.bench import PIPELINE, MysqlBench
from tests.sources.mysql.decode.test_decoder import decode, rows_of
from tests.sources.mysql.reference import Catalog
from tests.sources.mysql.strategies import Made, streams


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(30))
@given(streams(), st.booleans(), st.none() | st.sampled_from("abcdefghijklmnopqrstuvwxyz0123"))
def test_what_is_not_hidden_stays_as_it_is(made: Made, hash_all: bool, letter: str | None) -> None:
    """Any stream gives the rows that it gives without rules, but for what these hide."""
    rows = rows_of(decode(made.stream)[0])
    include = [] if letter is None else [f"*.{letter}*"]
    hidden, error = decode(
        made.stream, rules=rules(include=include, hash=["*.*"] if hash_all else ["-.-"])
    )

    assert error is None
    stamps = {"schema_version": None, "schema_sequence": None}
    assert [row | stamps for row in rows_of(hidden)] == [
        row | hidden_row(row, letter, hash_all=hash_all) | stamps for row in rows
    ]


class NotCertain(Catalog):
    """A catalog that cannot say how a table was."""

    def table(self, *about: Any, charsets: bool = False) -> Any:
        """Know nothing."""
        del about, charsets
        return Unknown("table shop.orders may have been altered")


def test_a_table_with_hidden_columns_is_never_held() -> None:
    """Kept back would be the log as it is, hidden values and all: the pipeline stops instead."""
    nameless = samples.description("shop", "orders", ORDERS, full=False)
    content = packed(len(ORDERS)) + bitmap([True] * len(ORDERS)) + orders_row(1)
    stream = (
        SyntheticLog()
        .start()
        .begin(1)
        .table(108, nameless)
        .rows(WRITE_ROWS_2, 108, content)
        .commit()
    )
    hide = rules(exclude=["*.note"])

    kept, _ = decode(stream.stream(), catalog=NotCertain())
    batches, error = decode(stream.stream(), catalog=NotCertain(), rules=hide)
    _, again = decode(stream.stream(), holds={"shop.orders": "why"}, rules=hide)

    assert [event.table for batch in kept for event in batch.parked] == ["shop.orders"]
    assert not any(batch.parked for batch in batches)
    assert isinstance(error, SourceMisconfigured)
    assert "may have been altered. Its changes are not held" in str(error)
    assert isinstance(again, SourceMisconfigured)


@pytest.mark.mysql
def test_every_reader_of_a_server_hides_the_same(mysql_dsn: str) -> None:
    """Log sections read by a pickled source are what one reader reads, and tables are what rows show."""
    options = ColumnOptions.model_validate(
        {
            "exclude": ("items.v",),
            "hash": {"columns": ("orders.*", "items.nothing"), "salt": SALT},
        }
    )
    with MysqlBench(mysql_dsn) as bench:
        source = MysqlSource(bench.config(), PIPELINE, None, options)
        start = source.ensure_start()
        bench.execute(insert("orders", 1, 2), insert("items", 3))
        versions = Versions()
        (section,) = [one for one in source.plan_sections(start, versions, lambda: 1 << 20) if one]
        again = pickle.loads(pickle.dumps(source))
        parts = again.read_section(section, ReadLimits(max_wait=0.05), 0)
        apart = rows_of(list(parts))
        together: list[dict[str, Any]] = []
        for batch in source.read(start, ReadLimits(max_wait=0.05), Versions()):
            together += rows_of([batch])
            if isinstance(batch.end, BinlogPosition) and section.end <= batch.end:
                break
        source.close()
        tables = [f"{bench.database}.{name}" for name in ("orders", "items")]
        shown = [source.schema(name) for name in tables]
        findings = source.preflight(None, None)
        chunks = list(source.snapshots().plan(tables, 1))

    hashes = [(hashed(str(n)), hashed(f'"{n}"')) for n in (1, 2)]
    images = [f'{{"id":{key},"v":{value}}}' for key, value in hashes]
    assert [row["after"] for row in together] == [*images, '{"id":3}']
    assert [row["key"] for row in together] == [f'{{"id":{key}}}' for key, _ in hashes] + ['{"id":3}']  # fmt: skip
    assert apart == together
    assert [table for table, _ in versions.registered] == shown
    kinds = {(one.table, one.kind, one.upto) for one in chunks}
    assert (tables[0], "whole", None) in kinds  # the hidden key is no bound
    assert {kind for table, kind, _ in kinds if table == tables[1]} == {"key"}
    (finding,) = [one for one in findings if one.subject == "columns"]
    assert finding.level == "warning"
    assert "items.nothing" in finding.text
