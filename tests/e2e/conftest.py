"""Deployments, databases and pipeline files of the end-to-end tests."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import redis

from deltaforge_lab.servers.postgres import PostgresServer
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.deployment import Deployment
from tests.fix_spark import SparkAddress

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source:
    type: postgres
    config:
      id: {name}-source
      dsn: "{dsn}"
      slot: {slot}
      publication: {slot}
      tables: {tables}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "{redis}", stream: "{name}.${{source.table}}"}}}}
{more_sinks}  engine:
    run: {run}
    range: {range}
    deliver: {{backoff_max_seconds: 2}}
    dagster: {dagster}
"""


@dataclass(frozen=True)
class Shop:
    """A database with two tables that a pipeline captures and one that it does not.

    Attributes:
        dsn: Where it is.
        redis_uri: Where the pipeline delivers to.
    """

    dsn: str
    redis_uri: str

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction; it is durable when this returns.

        The test server's default would let the log's durable end lag behind a commit.
        """
        with psycopg.connect(self.dsn) as connection:
            connection.execute("SET LOCAL synchronous_commit = on")
            for statement in statements:
                connection.execute(statement)

    def pipeline(
        self,
        name: str,
        *,
        tables: str = "[public.customers, public.orders]",
        run: str = "{idle_seconds: 4, lease_seconds: 20, renew_seconds: 1}",
        range_: str = "{max_seconds: 3}",
        more_sinks: str = "",
        dagster: str = "{sensor_interval_seconds: 1}",
        dsn: str | None = None,
    ) -> str:
        """Return the text of a pipeline file over this database."""
        return PIPELINE.format(
            name=name,
            dsn=dsn or self.dsn,
            slot=f"{name}_{uuid.uuid4().hex[:8]}".replace("-", "_"),
            tables=tables,
            redis=self.redis_uri,
            run=run,
            range=range_,
            more_sinks=more_sinks,
            dagster=dagster,
        )

    def entries(self, stream: str) -> list[dict[str, str]]:
        """Return the fields of a stream's entries, in order."""
        client = redis.Redis.from_url(self.redis_uri, decode_responses=True, socket_timeout=None)
        try:
            return [cast("dict[str, str]", fields) for _, fields in client.xrange(stream) or []]
        finally:
            client.close()


@pytest.fixture
def shop(
    postgres_server: PostgresServer, redis_server: RedisServer, redis_client: redis.Redis
) -> Iterator[Shop]:
    """An empty shop: `customers`, `orders`, and the busy table `visits`; Redis is empty, too."""
    made = Shop(postgres_server.create_database(), redis_server.uri)
    made.execute(
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, total numeric(10,2))",
        "CREATE TABLE visits (id bigserial PRIMARY KEY, page text)",
    )
    yield made
    with psycopg.connect(made.dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE database = current_database() AND active"
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database() AND NOT active"
        )


@pytest.fixture
def deploy(tmp_path: Path, spark_server: SparkAddress) -> Iterator[Callable[..., Deployment]]:
    """Make deployments; each is stopped at the end."""
    made: list[Deployment] = []

    def make(spark: SparkAddress = spark_server, **settings: Any) -> Deployment:
        folder = tmp_path / f"deployment-{len(made)}"
        made.append(Deployment(folder, spark, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
