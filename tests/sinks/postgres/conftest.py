"""A database for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.sinks.postgres.database import Target


@pytest.fixture
def target(postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Target]:
    """An empty database for tables."""
    made = Target(postgres_server.create_database(), tmp_path)
    with made.opened:
        yield made
