"""Column rules on PostgreSQL's log."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.source import PostgresSource
from deltaforge_dagster.testing.sources import Versions, insert
from deltaforge_lab.synthetic import postgres_messages as samples
from tests.chance import examples
from tests.sources.hidden import SALT, hidden_row, rules
from tests.sources.postgres.bench import PIPELINE, PostgresBench
from tests.sources.postgres.decode.test_decoder import RELATION, decode, rows_of, transaction
from tests.sources.postgres.decode.test_decoder import insert as inserted
from tests.strategies import streams


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(40))
@given(streams(), st.booleans(), st.none() | st.sampled_from("abcinq"))
def test_what_is_not_hidden_stays_as_it_is(
    stream: bytes, hash_all: bool, letter: str | None
) -> None:
    """Any stream gives the rows that it gives without rules, but for what these hide."""
    rows = rows_of(decode(stream)[0])
    hidden, error = decode(
        stream,
        rules=rules(
            include=[] if letter is None else [f"*.{letter}*"],
            hash=["*.*"] if hash_all else ["-.-"],
        ),
    )

    assert error is None
    stamps = {"schema_version": None, "schema_sequence": None}
    assert [row | stamps for row in rows_of(hidden)] == [
        row | stamps
        if row["schema"] == "__wal_message"
        else row | hidden_row(row, letter, hash_all=hash_all) | stamps
        for row in rows
    ]


@pytest.mark.postgres
def test_a_server_is_looked_at_as_its_rows_show_it(postgres_dsn: str) -> None:
    """What is registered is what `schema` says, and a rule that cannot be stops, announced."""
    good = ColumnOptions.model_validate({"mask": {"orders.v": "x"}})
    bad = ColumnOptions.model_validate({"exclude": ("public.orders.id",)})
    secret = ColumnOptions.model_validate({"hash": {"columns": ("orders.id",), "salt": SALT}})
    with PostgresBench(postgres_dsn) as bench:
        first = PostgresSource(bench.config(), PIPELINE, columns=good)
        start = first.ensure_start()
        bench.execute(insert("orders", 1))
        versions = Versions()
        limits = ReadLimits(max_wait=0.05)
        rows = next(batch.rows for batch in first.read(start, limits, versions) if batch.rows)
        first.close()
        shown = first.schema("public.orders")
        found = [one.level for one in first.preflight(None, None) if one.subject == "columns"]
        third = PostgresSource(bench.config(), PIPELINE, columns=secret)
        chunks = list(third.snapshots().plan(["public.orders", "public.items"], 1))
        second = PostgresSource(bench.config(), PIPELINE, columns=bad)
        (refused,) = [one for one in second.preflight(None, None) if one.subject == "columns"]
        with pytest.raises(SourceMisconfigured, match=r"column id of table public\.orders"):
            list(second.read(start, limits, versions))
        second.close()

    assert rows.column("after").to_pylist() == ['{"id":1,"v":"x"}']
    assert [table for table, _ in versions.registered] == [shown]
    assert [column.data_type for column in shown.columns] == ["integer", "text"]
    assert found == ["ok"]
    assert refused.level == "error"
    assert [one.kind for one in chunks if one.table == "public.orders"] == ["whole"]
    assert {one.kind for one in chunks if one.table == "public.items"} == {"key"}


def test_a_table_with_hidden_columns_is_never_held() -> None:
    """Kept back would be the log as it is, hidden values and all: the pipeline stops instead."""
    unknown = samples.relation(
        7, "public", "users", (("id", 20, -1, True), ("v", 99_999, -1, False))
    )
    stream = transaction(unknown, samples.insert(7, [b"1", b"secret"]))
    known = transaction(RELATION, inserted(1))
    hide = rules(exclude=["users.v"])

    kept, _ = decode(stream)
    batches, error = decode(stream, rules=hide)
    _, again = decode(known, holds={"public.users": "why"}, rules=hide)

    assert [event.table for batch in kept for event in batch.parked] == ["public.users"]
    assert not any(batch.parked for batch in batches)
    assert isinstance(error, SourceMisconfigured)
    assert "column v" in str(error)
    assert isinstance(again, SourceMisconfigured)
