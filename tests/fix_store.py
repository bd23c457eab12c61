"""State stores for tests: the same test over memory, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltaforge_lab.servers.postgres import PostgresServer

if TYPE_CHECKING:
    from deltaforge_dagster.state.store import StateStore

KINDS = ("memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres))


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty state store of each kind."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return server.create_database().replace("postgres://", "postgresql://", 1)
    return "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def store(store_url: str) -> Iterator[StateStore]:
    """An open, empty state store of each kind."""
    from deltaforge_dagster.state.store import StateStore  # noqa: PLC0415

    opened = StateStore.open(store_url)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[StateStore]:
    """An open, empty state store on SQLite, for tests that need just one kind."""
    from deltaforge_dagster.state.store import StateStore  # noqa: PLC0415

    opened = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    yield opened
    opened.close()
