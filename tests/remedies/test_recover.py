"""`deltaforge recover`, after the source's log has lost the pipeline's position."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from pymysql.cursors import DictCursor

from deltaforge_lab.servers import mysql
from deltaforge_lab.servers.postgres import PostgresServer
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment
from tests.fix_mysql import StartMysql
from tests.pipeline.ends import MysqlDatabase, MysqlShop
from tests.remedies.patient import NAME, TABLES, Patient

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
]


def test_a_slot_that_is_gone(patient: Patient) -> None:
    """Tables equal the source, and Redis has every row; changes that a sink lacks from before are delivered first."""
    patient.begin()
    patient.shop.execute(
        "INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob'), (3, 'Cyd')",
        "INSERT INTO orders VALUES (1, 1, 1)",
    )
    patient.run()
    assert patient.unequal() == []
    refused = patient.deltaforge("recover", "shop")
    assert refused.process.exitcode != 0
    assert "has lost nothing" in refused.output

    with psycopg.connect(patient.shop.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (patient.slot,))
    patient.shop.execute(
        "DELETE FROM customers WHERE id = 2",
        "UPDATE customers SET name = 'Cid' WHERE id = 3",
        "INSERT INTO customers VALUES (4, 'Dee')",
        "TRUNCATE orders",
    )
    patient.run()
    assert patient.status["status"] == "failed"
    assert patient.cure("source") == ["deltaforge recover shop"]
    output = patient.deployment.commands[-1].output
    assert "empty 2 tables of copy and load them again: copied.customers, copied.orders" in output
    assert "send redis every row that exists now; rows that were deleted after" in output

    patient.shop.execute("INSERT INTO customers VALUES (5, 'Eve')")
    patient.catch_up()
    patient.shop.execute("DELETE FROM customers WHERE id = 1")
    patient.run()
    assert patient.problems == []
    assert patient.unequal("customers") == ["messages of customers"]
    assert patient.told("customers") == [2, 3, 4, 5]  # that 2 was deleted cannot be known
    assert patient.rows(patient.copy, "copied.orders") == []


OTHER_SOURCE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source: {source}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "{redis}", stream: "shop.${{source.table}}"}}}}
{copy}  engine:
    run: {{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}}
    dagster: {{sensor_interval_seconds: 1}}
"""


@dataclass
class OtherPatient(Patient):
    """A pipeline over `customers` of another kind of source.

    Attributes:
        yaml: The source in the pipeline's file.
        query: Returns the rows of a statement.
    """

    yaml: str
    query: Callable[[str], list[dict[str, Any]]]

    def write(self, **_pipeline: Any) -> None:
        """Write its file."""
        copy = TABLES.format(copy=self.copy)
        text = OTHER_SOURCE.format(source=self.yaml, redis=self.shop.redis_uri, copy=copy)
        self.deployment.add(NAME, text)

    def source(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table of the source."""
        return self.plain(self.query(f"SELECT * FROM {table}"))


def recovers(patient: OtherPatient, lose: Callable[[], None]) -> None:
    """Check that a pipeline whose position is lost is recovered by what it prints, with equal sinks."""
    patient.begin()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
    patient.run()
    assert patient.unequal("customers") == []
    patient.shop.execute("DELETE FROM customers WHERE id = 2")
    patient.shop.execute("INSERT INTO customers VALUES (3, 'Cyd')")
    lose()
    patient.run()
    assert patient.cure("source") == ["deltaforge recover shop"]
    patient.catch_up()
    patient.shop.execute("INSERT INTO customers VALUES (4, 'Dee')")
    patient.run()
    assert patient.problems == []
    assert patient.unequal("customers") == ["messages of customers"]
    assert patient.told("customers") == [1, 2, 3, 4]


@pytest.mark.mysql
@pytest.mark.soak("remedies")
def test_a_binary_log_that_was_purged(
    start_mysql: StartMysql,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    deploy: Callable[..., Deployment],
    postgres_server: PostgresServer,
) -> None:
    """The same with MySQL."""
    database = MysqlDatabase(start_mysql().create_database())
    shop = MysqlShop(database.shop.dsn, redis_server.uri)

    def query(statement: str) -> list[dict[str, Any]]:
        with mysql.connect(shop.dsn) as connection, connection.cursor(DictCursor) as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def purge() -> None:
        query("FLUSH BINARY LOGS")
        newest = query("SHOW BINARY LOGS")[-1]["Log_name"]
        query(f"PURGE BINARY LOGS TO '{newest}'")

    copy = postgres_server.create_database()
    recovers(OtherPatient(shop, deploy(), copy, database.source(NAME), query), purge)


@pytest.mark.soak("remedies")
def test_changes_that_somebody_deleted(
    tmp_path: Path,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    deploy: Callable[..., Deployment],
    postgres_server: PostgresServer,
) -> None:
    """The same with SQLite, whose change table was emptied."""
    patient = sqlite_patient(tmp_path, redis_server, deploy(), postgres_server.create_database())
    recovers(patient, lambda: patient.shop.execute("DELETE FROM _df_cdc_changes"))


@pytest.mark.soak("remedies")
def test_a_table_of_sqlite_that_was_made_again(
    tmp_path: Path,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    deploy: Callable[..., Deployment],
    postgres_server: PostgresServer,
) -> None:
    """Its triggers are gone with the former table; rows from before they were made again are missing until loaded."""
    patient = sqlite_patient(tmp_path, redis_server, deploy(), postgres_server.create_database())
    patient.begin()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
    patient.run()
    assert (patient.unequal("customers"), patient.problems) == ([], [])
    patient.shop.execute(
        "DROP TABLE customers",
        "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)",
        "INSERT INTO customers VALUES (2, 'Cyd'), (3, 'Dee')",
    )
    patient.run()
    assert patient.cure("table main.customers") == [
        "deltaforge snapshot start shop --tables main.customers --sinks redis",
        "deltaforge resync shop --sink copy --tables main.customers",
    ]
    patient.shop.execute("INSERT INTO customers VALUES (4, 'Eve')")
    patient.catch_up()
    patient.catch_up()
    assert patient.problems == []
    assert patient.unequal("customers") == ["messages of customers"]
    assert patient.told("customers") == [1, 2, 3, 4]  # that 1 is gone cannot be known


def sqlite_patient(
    folder: Path, redis_server: RedisServer, deployment: Deployment, copy: str
) -> OtherPatient:
    """Return a pipeline over a file of SQLite, with triggers that it makes."""
    shop = SqliteShop(str(folder / "shop.db"), redis_server.uri)
    shop.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
    source = (
        f'{{type: turso, config: {{id: shop-source, url: "file:{shop.dsn}", cdc_mode: triggers, '
        "auto_create_triggers: true, tables: [customers]}}"
    )

    def query(statement: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(shop.dsn)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(statement).fetchall()]

    return OtherPatient(shop, deployment, copy, source, query)


class SqliteShop(Shop):
    """A shop in a file of SQLite."""

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with closing(sqlite3.connect(self.dsn)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()
