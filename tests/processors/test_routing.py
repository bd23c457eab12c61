"""Destinations and keys against a reference in plain Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.processors import routing
from deltaforge_dagster.processors.envelope import Origin, with_texts
from tests.processors.rows import Row, dumps, event, row, rows, write

pytestmark = pytest.mark.spark

ORIGIN = Origin("postgresql", "orders-db", "acme")


def column(spark: SparkSession, path: Path, given_rows: list[Row], made: Column) -> list[Any]:
    """Return one column over rows, in their order."""
    frame = spark.read.parquet(str(write(path, given_rows)))
    answer = with_texts(frame.coalesce(1)).select(made.alias("made")).toArrow()
    return list(answer["made"].to_pylist())


def resolved(row: Row, path: str) -> str | None:
    """Return a variable's text by walking through the event."""
    place: Any = event(row, ORIGIN)
    for name in path.split("."):
        place = place.get(name) if isinstance(place, dict) else None
    if place is None or isinstance(place, str):
        return place
    return dumps(place)


PATHS = [
    "op", "ts_ms", "tenant_id", "event_id", "transaction.id", "tx_end", "schema_sequence",
    "source.db", "source.schema", "source.table", "source.name", "source.connector",
    "source.version", "source.ts_ms", "source.lsn", "source.txId", "source.snapshot",
    "source.gtid", "after.orders", "before.orders", "after.naïve 名 😀", "after.orders.orders",
    "after", "before", "ddl.sql", "tags", "nonsense", "source.nonsense",
]  # fmt: skip


@given(st.lists(rows, min_size=30, max_size=60))
@settings(
    max_examples=5, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_variables_equal_the_reference(
    spark: SparkSession, tmp_path: Path, given_rows: list[Row]
) -> None:
    """Every kind of path gives the text of the event's value there, or null.

    Objects inside a row image are written anew by Spark, with other escapes of the same text.
    """
    given_rows = [{**one, "topic": None} for one in given_rows]
    frame = spark.read.parquet(str(write(tmp_path / "rows.parquet", given_rows)))
    columns = [
        routing.destination(compile_template(f"${{{path}}}"), ORIGIN).alias(str(number))
        for number, path in enumerate(PATHS)
    ]

    answer = with_texts(frame.coalesce(1)).select(*columns).toArrow()

    for number, path in enumerate(PATHS):
        for found, one in zip(answer[str(number)].to_pylist(), given_rows, strict=True):
            expected = resolved(one, path)
            same = found == expected or json.loads(found or "") == json.loads(expected or "")
            assert same, path


def test_destination(spark: SparkSession, tmp_path: Path) -> None:
    """An override comes first, an empty one counts as none, then the template."""
    template = compile_template("df:${source.schema}.${source.table}:${after.id}")
    given_rows = [
        row(),
        row(topic="audit"),
        row(topic=""),
        row(after='{"id":null}'),
        row(after=None, topic="audit"),
        row(schema=None),
    ]

    path = tmp_path / "rows.parquet"
    found = column(spark, path, given_rows, routing.destination(template, ORIGIN))
    made = routing.unresolved(template, ORIGIN)
    assert made is not None
    missing = column(spark, path, given_rows, made)

    plain = "df:public.orders:1"
    assert found == [plain, "audit", plain, None, "audit", None]
    assert missing == [None, None, None, "after.id", "after.id", "source.schema"]


def test_destination_that_always_resolves() -> None:
    """A template of variables that every event has needs no column for what is missing."""
    template = compile_template("${tenant_id}.${source.db}.${source.table}.${op}")

    assert routing.unresolved(template, ORIGIN) is None


def test_key(spark: SparkSession, tmp_path: Path) -> None:
    """An override comes first, then the template with nothing for what is unresolved."""
    template = compile_template("${after.id}/${before.id}")
    given_rows = [row(), row(route_key="k"), row(after=None, before='{"id":"q\\"7"}')]

    found = column(
        spark, tmp_path / "rows.parquet", given_rows, routing.message_key(template, ORIGIN)
    )

    assert found == ["1/", "k", '/q"7']


def test_default_key(spark: SparkSession, tmp_path: Path) -> None:
    """Without a template the key is the event id, unless a processor set one."""
    given_rows = [row(), row(route_key="k")]

    found = column(spark, tmp_path / "rows.parquet", given_rows, routing.message_key(None, ORIGIN))

    assert found == [row()["event_id"], "k"]


def test_row_key(spark: SparkSession, tmp_path: Path) -> None:
    """The row's primary key, the event id of a table without one, and overrides before both."""
    given_rows = [row(), row(key=None), row(route_key="k")]

    found = column(spark, tmp_path / "rows.parquet", given_rows, routing.row_key())

    assert found == ['{"id":1}', row()["event_id"], "k"]


def test_idempotency_key(spark: SparkSession, tmp_path: Path) -> None:
    """Tenant, table, transaction and event id; nothing for a transaction that is not there."""
    given_rows = [row(), row(tx_id=None)]

    found = column(spark, tmp_path / "rows.parquet", given_rows, routing.idempotency_key(ORIGIN))

    event_id = row()["event_id"]
    assert found == [f"acme|shop.orders|731|{event_id}", f"acme|shop.orders||{event_id}"]


def test_column_names_of_any_kind(spark: SparkSession, tmp_path: Path) -> None:
    """Column names with blanks, brackets, quotes and stars of other notations are just names."""
    fields = ["with blank", "a[0]", 'quo"ted', "$", "@x", "0"]
    image = json.dumps({name: name.upper() for name in fields})
    template = compile_template("|".join(f"${{after.{name}}}" for name in fields))

    found = column(
        spark, tmp_path / "rows.parquet", [row(after=image)], routing.destination(template, ORIGIN)
    )

    assert found == ["|".join(name.upper() for name in fields)]


@pytest.mark.parametrize("name", ["it's[0]", "*"])
def test_column_names_that_cannot_be_named(name: str) -> None:
    """What Spark's JSON paths cannot say is refused by name."""
    with pytest.raises(SpecError, match="cannot name the column"):
        routing.message_key(compile_template(f"${{after.{name}}}"), ORIGIN)
