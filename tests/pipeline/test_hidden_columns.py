"""Column rules in real runs: what they hide is in no file that a run leaves, and in no message."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltaforge_dagster.pipeline.replay.recapture import recapture
from deltaforge_dagster.resources.platform import build_source
from deltaforge_lab.servers import mysql
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import MysqlShop, wait_for_readers
from tests.pipeline.live import Feed, opened_feed

pytestmark = pytest.mark.spark

SECRET, OPEN = "q7Zk-secret", "q7Zk-public"
LARGE = SECRET * 1000
SALT = "sixteen or more characters"
PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {source}
  sinks:
    - {{type: file, config: {{id: out, path: "{folder}/out.jsonl"}}}}
    - {{type: file, config: {{id: lost, path: "{folder}/${{after.nothing}}.jsonl"}}}}
  journal: {{enabled: true}}
  engine:
    values: {{toast: reselect}}
    columns:
      exclude: ["{schema}.people.ssn"]
      hash: {{columns: [people.id, "*.mail", people.doc, people.large], salt: {salt}}}
      mask: {{people.card: "****"}}
      truncate: {{people.note: 6}}
"""
COLUMNS = "ssn varchar(99), mail varchar(99), card varchar(99), note varchar(99), open varchar(99)"
INSERT = (
    "INSERT INTO people (id, ssn, mail, card, note, open, doc, large) VALUES "
    + ", ".join(
        f"('{SECRET}-{n}', '{SECRET}', '{SECRET}@example.com', '{SECRET}', 'note: {SECRET}', "
        f"'{OPEN}', '{{\"a\": [\"{SECRET}\"]}}', '{LARGE}')"
        for n in (1, 2)
    ),
)
CHANGES = (
    f"UPDATE people SET open = '{OPEN} 2', doc = CHANGED WHERE id = '{SECRET}-1'",
    f"UPDATE people SET id = '{SECRET}-3', card = NULL WHERE id = '{SECRET}-1'",
    f"DELETE FROM people WHERE id = '{SECRET}-2'",
)


def hashed(text: str) -> str:
    """Return the hash of a text, computed by hand."""
    return hashlib.sha256((SALT + text).encode()).hexdigest()


@contextmanager
def postgres_feed(server: PostgresServer, folder: Path, spark: SparkAddress) -> Iterator[Feed]:
    """A table whose old rows are in the log but for large values, which are asked for again."""
    shop = Shop(server.create_database(), "")
    shop.execute(
        f"CREATE TABLE people (id text PRIMARY KEY, {COLUMNS}, doc jsonb, large text)",
        "ALTER TABLE people ALTER large SET STORAGE EXTERNAL",
    )
    slot = f"hidden_{urlsplit(shop.dsn).path.strip('/')}"
    source = (
        f'{{type: postgres, config: {{id: db, dsn: "{shop.dsn}", slot: {slot}, '
        f"publication: hidden, tables: [public.people]}}}}"
    )
    text = PIPELINE.format(source=source, folder=folder, schema="public", salt=SALT)
    with opened_feed(shop, folder / "feed.yaml", text, spark) as feed:
        yield feed
    wait_for_readers(shop.dsn)
    with psycopg.connect(shop.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


@contextmanager
def mysql_feed(dsn: str, folder: Path, spark: SparkAddress) -> Iterator[Feed]:
    """A table whose updates have only the part of a document that changes."""
    shop = MysqlShop(dsn, "")
    shop.execute(f"CREATE TABLE people (id varchar(99) PRIMARY KEY, {COLUMNS}, doc json, large text)")  # fmt: skip
    database = urlsplit(dsn).path.strip("/")
    source = f'{{type: mysql, config: {{id: db, dsn: "{dsn}", tables: [{database}.people]}}}}'
    text = PIPELINE.format(source=source, folder=folder, schema=database, salt=SALT)
    with opened_feed(shop, folder / "feed.yaml", text, spark) as feed:
        yield feed


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield every file as it is, and what those say that are compressed."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        yield path, path.read_bytes()
        if path.suffix == ".parquet":
            yield path, str(pq.read_table(path).to_pylist()).encode()
        elif path.suffix == ".arrow":
            with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    yield path, b"".join(one for one in batch.column(0).to_pylist() if one)


def check(feed: Feed, folder: Path, log: str) -> list[dict[str, Any]]:
    """Run to the end; nothing secret is anywhere, and what is not secret is. Return the events."""
    outcome = feed.catch_up()
    assert outcome.sink_errors == {}
    found = {path for path, content in contents(folder) if OPEN.encode() in content}
    assert {path.suffix for path in found} >= {".parquet", ".jsonl", ".arrow"}
    assert any(path.name.startswith("state.db") for path in found)  # a dead letter as people see it
    assert not [path for path, content in contents(folder) if SECRET.encode() in content]
    assert SECRET not in log
    (versions,) = feed.store.schemas.versions("feed")
    described = {column.name: column.data_type for column in versions[-1].columns}
    assert "ssn" not in described
    assert described["mail"] == described["doc"] == "text"
    lines = (folder / "out.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_events(events: list[dict[str, Any]]) -> None:
    """Compare what was delivered with what the rules leave of it."""
    assert [one["op"] for one in events] == ["c", "c", "u", "u", "d"]
    first, second, changed, moved, deleted = events
    assert first["after"] | {"doc": None} == {
        "id": hashed(f"{SECRET}-1"),
        "mail": hashed(f"{SECRET}@example.com"),
        "card": "****",
        "note": "note: ",
        "open": OPEN,
        "doc": None,
        "large": hashed(LARGE),
    }
    assert second["after"]["id"] == hashed(f"{SECRET}-2") == deleted["before"]["id"]
    assert changed["after"]["doc"] not in {None, first["after"]["doc"]}
    assert changed["after"]["open"] == f"{OPEN} 2"
    assert changed["after"]["large"] == moved["after"]["large"] == hashed(LARGE)
    assert (moved["before"]["id"], moved["after"]["id"]) == (hashed(f"{SECRET}-1"), hashed(f"{SECRET}-3"))  # fmt: skip
    assert moved["after"]["card"] is None


@pytest.mark.postgres
def test_postgres_values_are_hidden_everywhere(
    postgres_server: PostgresServer,
    spark_server: SparkAddress,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Journal, state store, dead letters, log and messages have none of it, re-selected or not."""
    caplog.set_level(logging.DEBUG, "deltaforge_dagster")
    with postgres_feed(postgres_server, tmp_path, spark_server) as feed:
        feed.shop.execute(*INSERT)
        feed.shop.execute(CHANGES[0].replace("CHANGED", f"'\"{SECRET}\"'"))
        feed.catch_up()  # while the row is there to be asked for
        for change in CHANGES[1:]:
            feed.shop.execute(change)
        check_events(check(feed, tmp_path, caplog.text))


@pytest.mark.mysql
def test_mysql_values_are_hidden_everywhere(
    mysql_dsn: str, spark_server: SparkAddress, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same with documents that are logged in parts; and read again the log says the same."""
    caplog.set_level(logging.DEBUG, "deltaforge_dagster")
    with mysql_feed(mysql_dsn, tmp_path, spark_server) as feed:
        feed.shop.execute(*INSERT)
        with mysql.connect(mysql_dsn) as connection, connection.cursor() as cursor:
            cursor.execute("SET SESSION binlog_row_value_options = PARTIAL_JSON")
            for change in CHANGES:
                cursor.execute(change.replace("CHANGED", f"JSON_SET(doc, '$.a[0]', '{SECRET} 2')"))
                connection.commit()
        check_events(check(feed, tmp_path, caplog.text))
        source = build_source(feed.loaded.spec)
        numbers = [row.range for row in feed.store.ranges.read("feed")]
        journal = feed.opened.journal
        again = list(
            recapture(feed.store, journal, source, pipeline="feed", tenant="acme", ranges=numbers)
        )
        source.close()
    assert sum(one.again for one in again) == 5
    assert all(one.equal for one in again)
