"""Timestamps in both of their forms: through a real log, a snapshot, a key, a hash and a question for now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
import pytest

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.source import PostgresSource
from tests.sources.hidden import SALT
from tests.sources.postgres.bench import PIPELINE, PostgresBench
from tests.sources.postgres.reference import Registry

pytestmark = pytest.mark.postgres

Form = Literal["text", "iso"]

MOMENTS = (
    "2026-03-01 12:34:56.789",
    "2026-03-01 12:34:56",
    "0001-01-01 00:00:00.000001",
    "0044-03-15 12:00:00 BC",
    "4713-01-01 00:00:00 BC",
    "9999-12-31 23:59:59.999999",
    "10000-01-01 00:00:00",
    "294276-12-31 23:59:59.999999",
    "infinity",
    "-infinity",
)
COLUMNS = {
    "plain": "timestamp",
    "rounded": "timestamp(1)",
    "zoned": "timestamptz",
    "named": "moment",
    "plains": "timestamp[]",
    "zoneds": "timestamptz[]",
}
"""Columns whose form is chosen; those below stay text."""
OTHERS = {"range": "tstzrange", "pair": "pair", "day": "date", "clock": "timetz"}


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database whose table `moments` has timestamps of every kind, and a timestamp as key."""
    described = ", ".join(f"{name} {type_}" for name, type_ in (COLUMNS | OTHERS).items())
    with PostgresBench(postgres_dsn) as made:
        made.execute(
            "CREATE DOMAIN moment AS timestamptz",
            "CREATE TYPE pair AS (at timestamp, until timestamptz)",
            f"CREATE TABLE moments (at timestamptz PRIMARY KEY, {described})",
            "ALTER TABLE moments ALTER plains SET STORAGE EXTERNAL",
        )
        yield made


def source(bench: PostgresBench, form: Form, **changed: Any) -> PostgresSource:
    """Return a source of that table with timestamps of that form."""
    values = ValueOptions(postgres_timestamp=form, toast="reselect")
    return PostgresSource(bench.config(tables=("public.moments",)), PIPELINE, values, **changed)


def captured(reading: PostgresSource, start: Any, rows: int) -> list[dict[str, Any]]:
    """Read that many rows of the log."""
    found: list[dict[str, Any]] = []
    for batch in reading.read(start, ReadLimits(), Registry()):
        found += batch.rows.to_pylist() if batch.rows else []
        if len(found) >= rows:
            break
    reading.close()
    return found


def selected(reading: PostgresSource) -> list[tuple[str, str]]:
    """Read keys and rows as a snapshot does."""
    snapshots = reading.snapshots()
    (chunk,) = snapshots.plan(None, 1000)
    with snapshots.reader() as reader:
        batches = list(reader.read(chunk, snapshots.watermark()).batches)
    rows = pa.Table.from_batches(batches).to_pylist()
    return sorted((row["key"], row["after"]) for row in rows)


def expected(bench: PostgresBench, form: Form) -> list[tuple[str, str]]:
    """Return keys and rows as the server itself writes them: by `to_json`, or as text."""

    def value(name: str, type_: str) -> str:
        as_text = f"to_jsonb({name}::text)" if "[]" not in type_ else f"to_jsonb({name}::text[])"
        return f"to_json({name})" if form == "iso" and name in {"at", *COLUMNS} else as_text

    columns = {"at": "timestamptz"} | COLUMNS | OTHERS
    asked = ", ".join(f"{value(name, type_)}::text" for name, type_ in columns.items())
    bench.connection.execute("SET timezone = 'UTC'")
    found = bench.connection.execute(f"SELECT {asked} FROM moments").fetchall()
    values = ([one and json.loads(one) for one in row] for row in found)
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    compact = {"separators": (",", ":"), "ensure_ascii": False}
    return sorted(
        (json.dumps({"at": row["at"]}, **compact), json.dumps(row, **compact))  # type: ignore[arg-type]
        for row in rows
    )


@pytest.mark.parametrize("form", ["text", "iso"])
def test_the_log_and_a_snapshot_have_one_form(bench: PostgresBench, form: Form) -> None:
    """Images and keys of inserts, updates, deletes and snapshot rows are what the server itself writes."""
    start = source(bench, form).ensure_start()
    for moment in MOMENTS:
        value = f"'{moment}'"
        rounded = "NULL" if moment.startswith("294276") else value
        ranged = f"'[2026-01-01 00:00:00+00,\"{moment}\")'" if moment.startswith("9999") else "NULL"
        bench.execute(
            "SET LOCAL timezone = 'UTC'",
            f"INSERT INTO moments VALUES ({value}, {value}, {rounded}, {value}, {value},"
            f" ARRAY[{value}, NULL]::timestamp[], ARRAY[[{value}]]::timestamptz[], {ranged},"
            f" ROW({value}, {value}), '2026-03-01', '12:34:56+02')",
        )
    written = expected(bench, form)
    read_at_once = selected(source(bench, form))
    bench.execute("UPDATE moments SET at = at + interval '1 s' WHERE at = '2026-03-01 12:34:56+00'")
    moved = expected(bench, form)
    bench.execute("DELETE FROM moments")

    rows = captured(source(bench, form), start, 2 * len(MOMENTS) + 1)

    assert read_at_once == written
    count = len(MOMENTS)
    inserted, updated, deleted = rows[:count], rows[count], rows[count + 1 :]
    assert sorted((row["key"], row["after"]) for row in inserted) == written
    old = '{"at":"2026-03-01T12:34:56+00:00"' if form == "iso" else '{"at":"2026-03-01 12:34:56+00"'
    assert updated["before"].startswith(old)
    assert [(updated["key"], updated["after"])] == [one for one in moved if one not in written]
    assert sorted(row["key"] for row in deleted) == [key for key, _ in moved]
    assert all(row["before"].startswith(row["key"][:-1]) for row in deleted)


def test_a_value_that_is_asked_for_again(bench: PostgresBench) -> None:
    """Of the row that its key finds, whatever form the key has; in the form of all others."""
    many = "(SELECT array_agg('2026-03-01 12:00:00.5'::timestamp + n * interval '1 s') FROM generate_series(1, 500) n)"
    bench.execute(f"INSERT INTO moments (at, plains) VALUES ('0044-03-15 12:00:00+00 BC', {many})")
    start = source(bench, "iso").ensure_start()
    bench.execute("UPDATE moments SET day = '2026-03-01'")

    (row,) = captured(source(bench, "iso"), start, 1)

    assert row["key"] == '{"at":"0044-03-15T12:00:00+00:00 BC"}'
    values = json.loads(row["after"])["plains"]
    assert (len(values), values[0]) == (500, "2026-03-01T12:00:01.5")


def test_what_is_hashed_is_what_stands_there(bench: PostgresBench) -> None:
    """A rule sees the form that was chosen, in the log and in a snapshot."""
    rules = ColumnOptions.model_validate(
        {
            "hash": {"columns": ("moments.at",), "salt": SALT},
            "truncate": {"moments.plain": 11},
            "include": ("moments.at", "moments.plain"),
        }
    )
    start = source(bench, "iso").ensure_start()
    bench.execute(
        "INSERT INTO moments (at, plain) VALUES ('2026-03-01 12:34:56.5+00', '2026-03-01')"
    )

    (row,) = captured(source(bench, "iso", columns=rules), start, 1)

    key = hashlib.sha256(f"{SALT}2026-03-01T12:34:56.5+00:00".encode()).hexdigest()
    assert row["key"] == f'{{"at":"{key}"}}'
    assert row["after"] == f'{{"at":"{key}","plain":"2026-03-01T"}}'
    assert selected(source(bench, "iso", columns=rules)) == [(row["key"], row["after"])]
