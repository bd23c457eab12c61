"""Every version of PostgreSQL: identities, keys, names, partitions, truncates and what came later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql

from deltaforge_dagster.config.engine import PostgresOptions
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.testing.sources import (
    Taken,
    insert,
    is_quiet,
    take,
    whole,
)
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_postgres import POSTGRES_VERSIONS, StartPostgres
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres

ALL = {"tables": ("*.*",)}


@pytest.fixture(params=POSTGRES_VERSIONS)
def bench(
    request: pytest.FixtureRequest, postgres_version: Callable[[int], PostgresServer]
) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other` on a server of each version."""
    with PostgresBench(postgres_version(request.param).create_database()) as made:
        yield made


def version(bench: PostgresBench) -> int:
    """Return the server's version."""
    return bench.connection.info.server_version // 10000


def changes(taken: Taken) -> list[tuple[object, ...]]:
    """Return (op, before, after, key) of each row, images as values."""
    return [
        (
            row["op"],
            *(None if row[name] is None else json.loads(str(row[name])) for name in IMAGES),
        )
        for row in taken.rows
    ]


IMAGES = ("before", "after", "key")


def test_replica_identities_and_keys_that_change(bench: PostgresBench) -> None:
    """What an update says of the old row, and which key each event has."""
    bench.execute(
        "CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE, v text)",
        "CREATE UNIQUE INDEX by_other ON t (other)",
        "INSERT INTO t VALUES (1, 10, 'a')",
    )
    start = bench.source(**ALL).ensure_start()
    statements = ["UPDATE t SET v = 'b'", "UPDATE t SET id = id + 1, other = other + 1"]
    for identity in ("DEFAULT", "USING INDEX by_other", "FULL"):
        bench.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}", *statements)
    bench.execute("DELETE FROM t")

    taken = take(bench, start, whole(7), source=bench.source(**ALL))

    def row(number: int) -> dict[str, object]:
        return {"id": number, "other": number + 9, "v": "b"}

    assert changes(taken) == [
        ("u", None, row(1), {"id": 1}),
        ("u", {"id": 1, "other": None, "v": None}, row(2), {"id": 2}),
        ("u", None, row(2), {"other": 11}),
        ("u", {"id": None, "other": 11, "v": None}, row(3), {"other": 12}),
        ("u", row(3), row(3), {"id": 3}),
        ("u", row(3), row(4), {"id": 4}),
        ("d", row(4), None, {"id": 4}),
    ]


def test_tables_without_a_key_or_without_columns(bench: PostgresBench) -> None:
    """Inserts of such tables have no key; a row without columns is an empty object."""
    bench.execute(
        "CREATE TABLE empty ()",
        "CREATE TABLE bare (v text)",
        "CREATE PUBLICATION p FOR TABLE empty, bare",
    )
    tables = {"tables": ("empty", "bare")}
    start = bench.source(**tables).ensure_start()
    bench.execute("INSERT INTO empty DEFAULT VALUES", "INSERT INTO bare VALUES ('x')")

    taken = take(bench, start, whole(2), source=bench.source(**tables))

    assert changes(taken) == [("c", None, {}, None), ("c", None, {"v": "x"}, None)]


def test_every_legal_name(bench: PostgresBench) -> None:
    """Case, spaces, quotes, dots, percent signs, backslashes and other scripts arrive as they are."""
    names = [
        "MixedCase",
        "two words",
        'quo"te',
        "dot.ted",
        "per%cent",
        "back\\slash",
        "名前",
        "'; --",
    ]
    for schema, name in zip([*names[1:], names[0]], names, strict=True):
        bench.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        bench.connection.execute(
            sql.SQL("CREATE TABLE {} ({} int PRIMARY KEY)").format(
                sql.Identifier(schema, name), sql.Identifier(name)
            )
        )
    start = bench.source(**ALL).ensure_start()
    for schema, name in zip([*names[1:], names[0]], names, strict=True):
        bench.connection.execute(
            sql.SQL("INSERT INTO {} VALUES (1)").format(sql.Identifier(schema, name))
        )

    taken = take(bench, start, whole(len(names)), source=bench.source(**ALL))

    assert [row["table"] for row in taken.rows] == names
    assert [row["schema"] for row in taken.rows] == [*names[1:], names[0]]
    assert [json.loads(str(row["after"])) for row in taken.rows] == [{name: 1} for name in names]


def test_partitions_come_as_their_table(bench: PostgresBench) -> None:
    """With publish_via_partition_root, which PostgreSQL 12 lacks: there as the partitions."""
    bench.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    )
    if version(bench) == 12:
        bench.execute("CREATE PUBLICATION p FOR TABLE parted_1, orders, items, other")
    start = bench.source(**ALL).ensure_start()
    bench.execute(insert("parted", 1), "TRUNCATE parted")

    taken = take(bench, start, whole(2), source=bench.source(**ALL))

    name = "parted_1" if version(bench) == 12 else "parted"
    assert [(row["op"], row["table"]) for row in taken.rows] == [("c", name), ("t", name)]


def test_a_prepared_transaction_comes_with_its_commit(start_postgres: StartPostgres) -> None:
    """Not when it is prepared, and not at all when it is rolled back."""
    server = start_postgres({"max_prepared_transactions": "5"})
    with PostgresBench(server.dsn) as bench:
        start = bench.source().ensure_start()
        for name, id_ in (("kept", 1), ("dropped", 2)):
            bench.connection.execute("BEGIN")
            bench.connection.execute(insert("orders", id_))
            bench.connection.execute(f"PREPARE TRANSACTION '{name}'")
        bench.execute(insert("orders", 3))
        bench.connection.execute("ROLLBACK PREPARED 'dropped'")
        bench.connection.execute("COMMIT PREPARED 'kept'")

        taken = take(bench, start, whole(2))

        assert [row["key"] for row in taken.rows] == ['{"id":3}', '{"id":1}']
        assert all(row["tx_end"] for row in taken.rows)


def test_logical_messages_where_there_are_any(bench: PostgresBench) -> None:
    """PostgreSQL sends them from version 14 on, of both kinds, each once, wherever reading begins."""
    start = bench.source().ensure_start()
    bench.execute(
        insert("orders", 1),
        "SELECT pg_logical_emit_message(true, 'a', '[1]')",
        "SELECT pg_logical_emit_message(false, 'a', '[2]')",
    )
    bench.execute("SELECT pg_logical_emit_message(false, 'a', '[3]')", insert("orders", 2))
    sent = version(bench) >= 14

    taken = take(bench, start, whole(5 if sent else 2))

    assert [row["after"] for row in taken.rows if row["table"] == "a"] == (
        ["[2]", "[1]", "[3]"] if sent else []
    )
    middle = [batch.end for batch in taken.batches if batch.end is not None]
    assert is_quiet(bench, middle[-1])


def test_rows_that_another_server_wrote(bench: PostgresBench) -> None:
    """Changes with a replication origin are changes like any other."""
    start = bench.source().ensure_start()
    name = f"origin_{bench.slot}"
    bench.value("SELECT pg_replication_origin_create(%s)", name)
    try:
        with psycopg.connect(bench.dsn, autocommit=True) as other:
            other.execute("SELECT pg_replication_origin_session_setup(%s)", (name,))
            other.execute("BEGIN")
            other.execute(
                "SELECT pg_replication_origin_xact_setup('0/1234', now() - interval '1 day')"
            )
            other.execute(insert("orders", 1))
            other.execute("COMMIT")

        assert take(bench, start, whole(1)).rows[0]["key"] == '{"id":1}'
    finally:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                bench.value("SELECT pg_replication_origin_drop(%s)", name)
            except psycopg.errors.ObjectInUse:
                time.sleep(0.05)
            else:
                break


def test_generated_columns_come_where_they_are_published(bench: PostgresBench) -> None:
    """Not before PostgreSQL 18, and there when the publication says so."""
    bench.execute(
        "CREATE TABLE g (id int PRIMARY KEY, doubled int GENERATED ALWAYS AS (id * 2) STORED)"
    )
    published = version(bench) >= 18
    if published:
        bench.execute("CREATE PUBLICATION p FOR TABLE g WITH (publish_generated_columns = stored)")
    tables = {"tables": ("g",)}
    start = bench.source(**tables).ensure_start()
    bench.execute("INSERT INTO g VALUES (4)")

    reader = bench.source(**tables)
    taken = take(bench, start, whole(1), source=reader)

    assert json.loads(str(taken.rows[0]["after"])) == (
        {"id": 4, "doubled": 8} if published else {"id": 4}
    )
    assert [column.name for column in bench.source(**tables).schema("public.g").columns] == (
        ["id", "doubled"] if published else ["id"]
    )


def test_failover_slots_where_there_are_any(bench: PostgresBench) -> None:
    """From PostgreSQL 17 on a slot can be one that replicas keep."""
    if version(bench) < 17:
        return
    bench.source(options=PostgresOptions(failover_slot=True)).ensure_start()

    assert bench.value("SELECT failover FROM pg_replication_slots WHERE slot_name = %s", bench.slot)


def test_outboxes_need_messages(bench: PostgresBench) -> None:
    """A server before 14 sends none, which is said before anything waits for them."""
    outbox = {"outbox": {"prefixes": ("out%",)}}
    if version(bench) < 14:
        with pytest.raises(SourceMisconfigured, match="PostgreSQL does from 14 on"):
            bench.source(**outbox).ensure_start()
        found = bench.source(**outbox).preflight(None, None)
        assert [one.level for one in found if one.subject == "outbox"] == ["error"]
        return
    start = bench.source(**outbox).ensure_start()
    bench.execute(
        "SELECT pg_logical_emit_message(true, 'outbox', '{}')",
        "SELECT pg_logical_emit_message(true, 'Outbox', '{}')",
    )

    taken = take(bench, start, whole(2), source=bench.source(**outbox))

    assert [row["schema"] for row in taken.rows] == ["__outbox", "__wal_message"]
    found = bench.source(**outbox).preflight(None, None)
    assert [one.level for one in found if one.subject == "outbox"] == ["ok"]
