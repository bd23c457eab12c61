"""The stage of the examples, shared by all of them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.resources.platform import Platform
from tests.e2e.deployment import eventually
from tests.examples.stage import EXAMPLES, Example, Play, Stage, text_of
from tests.fix_spark import SparkAddress


@pytest.fixture(scope="session")
def stage(spark_server: SparkAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One installation for every example."""
    home = tmp_path_factory.mktemp("examples")
    settings = Settings.from_env({"DELTAFORGE_HOME": str(home), **spark_server.settings(home)})
    with Platform(settings, single_process=True).open() as opened:
        yield Stage(opened)


@pytest.fixture
def play(
    stage: Stage,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Play]:
    """Put an example on the stage: `play(name, *schema)`, on the servers that its file names."""
    addresses: dict[str, Callable[[], str]] = {
        "MYSQL_DSN": lambda: request.getfixturevalue("mysql_dsn"),
        "POSTGRES_DSN": lambda: request.getfixturevalue("postgres_dsn"),
        "KAFKA_BROKERS": lambda: request.getfixturevalue("kafka_server").brokers,
        "REDIS_URI": lambda: request.getfixturevalue("redis_server").uri,
        "NATS_URL": lambda: request.getfixturevalue("nats_server").url,
        "SCHEMA_REGISTRY_URL": lambda: request.getfixturevalue("schema_registry").url,
        "TURSO_URL": lambda: str(tmp_path / "shop.db"),
    }
    own = f"x{secrets.token_hex(4)}"
    with ExitStack() as stack:

        def begin(name: str, *schema: str, **environment: str) -> Example:
            text = (EXAMPLES / f"{name}.yaml").read_text()
            for variable, address in addresses.items():
                if f"${{{variable}}}" in text:
                    environment.setdefault(variable, address())
            for variable, value in environment.items():
                monkeypatch.setenv(variable, value)
            databases = ("MYSQL_DSN", "POSTGRES_DSN", "TURSO_URL")
            dsn = next(environment[one] for one in databases if one in environment)
            path = tmp_path / f"{name}.yaml"
            path.write_text(text_of(name, own, dsn))
            example = Example(stage, path, dsn, own)
            example.change(*schema)
            if "POSTGRES_DSN" in environment:
                stack.callback(_drop_slots, dsn)
            example.start()
            return example

        yield begin


def _drop_slots(dsn: str) -> None:
    """Drop the slots of a database, once those who read them have ended."""
    slots = "FROM pg_replication_slots WHERE database = current_database()"
    with psycopg.connect(dsn, autocommit=True) as connection:

        def dropped() -> bool:
            connection.execute(f"SELECT pg_terminate_backend(active_pid) {slots} AND active")
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots}")
            return connection.execute(f"SELECT {slots}").fetchone() is None

        eventually(dropped)
