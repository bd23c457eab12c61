"""Large values that an update did not touch: marked, left out, or read again from the server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.errors import DeltaforgeError, PermissionMissing
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.connection import reselect
from deltaforge_dagster.sources.postgres.connection import server as connection
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.source import PostgresSource
from tests.pipeline.changes import eventually
from tests.sources.postgres.bench import PIPELINE, PostgresBench
from tests.sources.postgres.reference import Registry

pytestmark = pytest.mark.postgres

UNCHANGED = {"_unchanged": True}
BIG = "x" * 10_000


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database whose table `docs` has large values outside of the row, uncompressed."""
    with PostgresBench(postgres_dsn) as made:
        made.execute(
            "CREATE TABLE docs (id int PRIMARY KEY, n int, body text, doc jsonb)",
            "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL, ALTER doc SET STORAGE EXTERNAL",
        )
        yield made


def insert(bench: PostgresBench, *ids: int) -> None:
    """Insert rows with large values, each with its own beginning."""
    for number in ids:
        bench.execute(
            f"INSERT INTO docs VALUES ({number}, 0, '{number}' || repeat('x', 10000),"
            f" jsonb_build_object('{number}', repeat('y', 10000)))"
        )


def body(number: int) -> str:
    """Return what `insert` wrote."""
    return f"{number}{BIG}"


def captured(
    bench: PostgresBench, start: Position, rows: int, toast: Any, dsn: str | None = None
) -> list[dict[str, Any]]:
    """Read that many rows of the log with the option; row images are parsed."""
    config = bench.config(tables=("public.*",), dsn=dsn or bench.dsn)
    source = PostgresSource(config, PIPELINE, ValueOptions(toast=toast))
    found: list[dict[str, Any]] = []
    try:
        for batch in source.read(start, ReadLimits(), Registry()):
            found += batch.rows.to_pylist() if batch.rows else []
            if len(found) >= rows:
                break
    finally:
        source.close()
    for row in found:
        for image in ("before", "after", "key"):
            row[image] = row[image] and json.loads(row[image])
    return found


def start_of(bench: PostgresBench) -> Position:
    """Begin to hold the log of all tables."""
    return bench.source(tables=("public.*",)).ensure_start()


def test_marked_or_left_out(bench: PostgresBench) -> None:
    """By default the marker stands for the value; `omit` leaves the column out; both know the key."""
    insert(bench, 1)
    start = start_of(bench)
    bench.execute("UPDATE docs SET n = 1", "UPDATE docs SET n = 2, body = 'short'")

    marked = captured(bench, start, 2, "unchanged")
    omitted = captured(bench, start, 2, "omit")

    assert [row["after"] for row in marked] == [
        {"id": 1, "n": 1, "body": UNCHANGED, "doc": UNCHANGED},
        {"id": 1, "n": 2, "body": "short", "doc": UNCHANGED},
    ]
    assert [row["after"] for row in omitted] == [
        {"id": 1, "n": 1},
        {"id": 1, "n": 2, "body": "short"},
    ]
    assert [row["key"] for row in marked + omitted] == [{"id": 1}] * 4


def test_questions_share_a_connection(
    bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One as long as the source reads, closed with it."""
    monkeypatch.setattr(connection, "_IDLE_SECONDS", 600.0)
    insert(bench, 1, 2, 3)
    start = start_of(bench)
    for number in range(3):
        bench.execute(f"UPDATE docs SET n = {number}")
    source = PostgresSource(
        bench.config(tables=("public.*",)), PIPELINE, ValueOptions(toast="reselect")
    )
    opened: list[PostgresSourceServer | None] = []
    connect = PostgresSourceServer.connect

    def pluralize(self: PostgresSourceServer, *given: Any, **named: Any) -> psycopg.Connection:
        opened.append(self)
        return connect(self, *given, **named)

    reading = source.read(start, ReadLimits(), Registry())
    found: list[Any] = []
    for batch in reading:
        found += batch.rows.column("after").to_pylist() if batch.rows else []
        if len(found) == 9 and not opened:
            opened.append(None)
            monkeypatch.setattr(PostgresSourceServer, "connect", pluralize)
            bench.execute("UPDATE docs SET n = 7")
        if len(found) >= 12:
            break
    sessions = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query = 'ROLLBACK'"
    )
    assert bench.value(sessions) == 1
    reading.close()
    source.close()

    assert UNCHANGED not in [json.loads(one)["body"] for one in found]
    assert opened == [None]
    eventually(lambda: bench.value(sessions) == 0)


def test_reselected_values_are_of_now(bench: PostgresBench) -> None:
    """The row's value of now stands there; a row that is gone keeps the marker."""
    insert(bench, 1, 2, 3, 4)
    start = start_of(bench)
    bench.execute("UPDATE docs SET n = 1")
    bench.execute("UPDATE docs SET body = 'new' WHERE id = 2", "DELETE FROM docs WHERE id = 3")
    bench.execute("UPDATE docs SET id = 40, doc = NULL WHERE id = 4")

    rows = captured(bench, start, 7, "reselect")

    one = {"1": "y" * 10_000}
    assert [row["after"] for row in rows] == [
        {"id": 1, "n": 1, "body": body(1), "doc": one},
        {"id": 2, "n": 1, "body": "new", "doc": {"2": "y" * 10_000}},
        {"id": 3, "n": 1, "body": UNCHANGED, "doc": UNCHANGED},
        {"id": 4, "n": 1, "body": UNCHANGED, "doc": UNCHANGED},
        {"id": 2, "n": 1, "body": "new", "doc": {"2": "y" * 10_000}},
        None,
        {"id": 40, "n": 1, "body": body(4), "doc": None},
    ]


def test_the_old_row_has_the_value_of_then(bench: PostgresBench) -> None:
    """With replica identity FULL the value is taken from the log, and is that of the change."""
    bench.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
    insert(bench, 1)
    start = start_of(bench)
    bench.execute("UPDATE docs SET n = 1")
    bench.execute("UPDATE docs SET body = 'new'")

    first, second = captured(bench, start, 2, "reselect")

    assert first["after"]["body"] == first["before"]["body"] == second["before"]["body"] == body(1)
    assert second["after"]["body"] == "new"


def test_one_question_for_a_table_and_batch(
    bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand updates in one batch are one SELECT; a large answer comes in parts, in order."""
    asked = []
    answer = reselect.Reselection.answer

    def pluralize(self: reselect.Reselection, question: Any) -> Any:
        asked.append(question.rows)
        return answer(self, question)

    monkeypatch.setattr(reselect.Reselection, "answer", pluralize)
    insert(bench, *range(5))
    bench.execute(
        "INSERT INTO docs SELECT i, 0, i || repeat('x', 10000) FROM generate_series(5, 999) i"
    )
    start = start_of(bench)
    bench.execute("UPDATE docs SET n = 1")

    def few_questions() -> bool:
        asked.clear()
        rows[:] = captured(bench, start, 1000, "reselect")
        assert [row["after"]["body"] for row in rows] == [body(row["after"]["id"]) for row in rows]
        assert sum(asked) == 1000
        return len(asked) <= 3

    rows: list[dict[str, Any]] = []
    eventually(few_questions, 120)  # a server that is not let run sends a batch in pieces
    asked.clear()
    monkeypatch.setattr(reselect, "_ANSWER_BYTES", 2_000_000)
    again = captured(bench, start, 1000, "reselect")
    assert [row["after"] for row in again] == [row["after"] for row in rows]
    assert len(asked) >= 5


KEYS = {
    "text": ("'it''s'", "'b\\\"'"),
    "char(5)": ("'ab'", "'cd'"),
    "numeric(10,2)": ("1.10", "2"),
    "timestamptz": ("'2026-03-01 12:34:56.1+02'", "'infinity'"),
    "mood": ("'sad'", "'ok'"),
    "small": ("1", "2"),
    "citext": ("'Ab'", "'cD'"),
    "bytea": ("'\\x00ff'", "'\\x01'"),
    "int[]": ("'{1,2}'", "'{3}'"),
    "int4range": ("'[1,3)'", "'empty'"),
    "float8": ("0.1", "1e300"),
    "boolean": ("true", "false"),
    "pair": ("ROW(1, 'a')", "ROW(2, 'b')"),
}


def test_keys_of_every_kind_find_their_rows(bench: PostgresBench) -> None:
    """Whatever the key's type, name and table, two rows get each its own value."""
    bench.execute(
        "CREATE SCHEMA ext",
        "CREATE EXTENSION citext SCHEMA ext",
        "SET LOCAL search_path = public, ext",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN small AS int",
        "CREATE TYPE pair AS (n int, t text)",
        *(
            f'CREATE TABLE "T {number}" (n int DEFAULT 0, "k ""1" {name}, k2 int, body text,'
            ' PRIMARY KEY ("k ""1", k2))'
            for number, name in enumerate(KEYS)
        ),
        *(
            f'ALTER TABLE "T {number}" ALTER body SET STORAGE EXTERNAL'
            for number in range(len(KEYS))
        ),
        *(
            f"INSERT INTO \"T {number}\" VALUES (0, {value}, 7, '{row}' || repeat('x', 10000))"
            for number, values in enumerate(KEYS.values())
            for row, value in enumerate(values)
        ),
    )
    start = start_of(bench)
    bench.execute(*(f'UPDATE "T {number}" SET n = 1' for number in range(len(KEYS))))

    rows = captured(bench, start, 2 * len(KEYS), "reselect")

    assert [row["after"]["body"] for row in rows] == [body(0), body(1)] * len(KEYS)


def test_partitions_and_children(bench: PostgresBench) -> None:
    """Rows of a partitioned table are found through it, of a parent only its own."""
    bench.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, n int, body text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "ALTER TABLE part ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO parted VALUES (1, 0, '1' || repeat('x', 10000))",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (docs)",
        "INSERT INTO child VALUES (1, 0, 'of the child')",
    )
    insert(bench, 1)
    start = start_of(bench)
    bench.execute("UPDATE parted SET n = 1", "UPDATE ONLY docs SET n = 1")

    rows = captured(bench, start, 2, "reselect")

    assert [row["after"]["body"] for row in rows] == [body(1), body(1)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DROP TABLE docs", UNCHANGED),
        ("ALTER TABLE docs RENAME TO renamed", body(1)),
        ("ALTER TABLE docs DROP COLUMN body", UNCHANGED),
        ("ALTER TABLE docs ALTER body TYPE varchar", UNCHANGED),
        ("ALTER TABLE docs RENAME n TO m", body(1)),
        ("ALTER TABLE docs ALTER id TYPE bigint", UNCHANGED),
    ],
)
def test_changed_tables(bench: PostgresBench, change: str, found: object) -> None:
    """A table that no longer has the key or the column as it was keeps the marker."""
    insert(bench, 1)
    start = start_of(bench)
    bench.execute("UPDATE docs SET n = 1")
    bench.execute(change)

    (row,) = captured(bench, start, 1, "reselect")

    assert row["after"]["body"] == found


@pytest.mark.parametrize("policy", [False, True])
def test_a_role_that_may_not_read(bench: PostgresBench, policy: bool) -> None:
    """Without SELECT, or behind a policy, the pipeline stops with the grant, not with less."""
    role = f"df_role_{secrets.token_hex(4)}"
    insert(bench, 1)
    start = start_of(bench)
    bench.execute(
        "UPDATE docs SET n = 1", f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'"
    )
    if policy:
        bench.execute(
            f"GRANT SELECT ON docs TO {role}",
            "CREATE POLICY few ON docs USING (id > 1)",
            "ALTER TABLE docs ENABLE ROW LEVEL SECURITY",
        )
    try:
        dsn = conninfo.make_conninfo(bench.dsn, user=role, password="secret")
        with pytest.raises(PermissionMissing) as refused:
            captured(bench, start, 1, "reselect", dsn)
    finally:
        with psycopg.connect(bench.dsn, autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")

    assert isinstance(refused.value, DeltaforgeError)
    assert f'GRANT SELECT ON "public"."docs" TO "{role}"' in str(refused.value)
