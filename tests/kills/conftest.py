"""Campaigns over real servers, one Spark server for all their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.http import HttpServer
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_redis import StartRedis
from tests.fix_spark import SparkAddress
from tests.kills.campaign import Campaign
from tests.kills.databases import MysqlDatabase, PostgresDatabase
from tests.kills.destinations import (
    ClickhouseDestination,
    HttpDestination,
    KafkaDestination,
    NatsDestination,
    ObjectsDestination,
    PostgresDestination,
    RedisDestination,
)
from tests.kills.ends import Database, Destination

Ends = tuple[Database, Destination]
MakeCampaign = Callable[..., Campaign]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Ends:
    """A source and a sink, by their names: `postgres-redis`."""
    source, _, sink = request.param.partition("-")
    return request.getfixturevalue(f"{source}_end"), request.getfixturevalue(f"{sink}_end")


@pytest.fixture
def exactly_once(request: pytest.FixtureRequest) -> bool:
    """Whether the sink keeps its own position."""
    return bool(request.param)


@pytest.fixture
def postgres_end(postgres_dsn: str) -> Iterator[PostgresDatabase]:
    """A database of the session's server."""
    database = PostgresDatabase(postgres_dsn)
    yield database
    database.drop_slot()


@pytest.fixture
def mysql_end(mysql_dsn: str) -> MysqlDatabase:
    """A database of the session's server."""
    return MysqlDatabase(mysql_dsn)


@pytest.fixture
def redis_end(start_redis: StartRedis) -> Iterator[RedisDestination]:
    """A stream of a server of the test's own."""
    destination = RedisDestination(start_redis({"appendonly": "no"}).uri)
    yield destination
    destination.close()


@pytest.fixture
def kafka_end(kafka_server: KafkaServer) -> Iterator[KafkaDestination]:
    """A topic of the session's broker."""
    destination = KafkaDestination(kafka_server)
    yield destination
    destination.close()


@pytest.fixture
def compacted_end(kafka_server: KafkaServer) -> Iterator[KafkaDestination]:
    """A topic of the session's broker that gets tombstones, and updates of keys in two halves."""
    destination = KafkaDestination(kafka_server, compacted=True)
    yield destination
    destination.close()


@pytest.fixture
def nats_end(nats_server: NatsServer) -> Iterator[NatsDestination]:
    """A stream of the session's server."""
    destination = NatsDestination(nats_server.url)
    yield destination
    destination.close()


@pytest.fixture
def http_end(http_server: HttpServer) -> HttpDestination:
    """A server of the test's own."""
    return HttpDestination(http_server)


@pytest.fixture
def tables_end(postgres_server: PostgresServer) -> Iterator[PostgresDestination]:
    """A database of the session's server, which is not the source."""
    destination = PostgresDestination(postgres_server.create_database())
    yield destination
    destination.close()


@pytest.fixture
def clickhouse_end(
    clickhouse_server: ClickhouseServer, clickhouse_database: str
) -> ClickhouseDestination:
    """A database of the session's server."""
    return ClickhouseDestination(clickhouse_server, clickhouse_database)


@pytest.fixture
def objects_end(tmp_path: Path) -> ObjectsDestination:
    """A folder of the test's own."""
    return ObjectsDestination(tmp_path / "objects")


@pytest.fixture
def make_campaign(
    ends: Ends, exactly_once: bool, tmp_path: Path, spark_server: SparkAddress, seed: int
) -> Iterator[MakeCampaign]:
    """Make a campaign; its runs are ended afterwards."""
    made: list[Campaign] = []

    def make(**parts: Any) -> Campaign:
        parts = {"spark": spark_server, "seed": seed + len(made), **parts}
        made.append(Campaign(tmp_path, *ends, exactly_once, **parts))
        return made[-1]

    yield make
    for one in made:
        one.close()
