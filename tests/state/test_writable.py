"""A store that cannot be written stops a run before it begins."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import StoreUnavailable
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.state.make import NAME

pytestmark = pytest.mark.postgres


def test_checkpoints_that_could_not_be_written(postgres_server: PostgresServer) -> None:
    """Taking the lease is the proof: a database that only reads refuses it, with the reason."""
    url = postgres_server.create_database().replace("postgres://", "postgresql://", 1)
    store = StateStore.open(url)
    store.pipelines.register(NAME, "spec", ["redis"])
    store.close()
    sign = "&" if "?" in url else "?"
    store = StateStore.open(f"{url}{sign}options=-c%20default_transaction_read_only%3Don")
    try:
        assert store.pipelines.get(NAME) is not None
        with pytest.raises(StoreUnavailable, match="read-only transaction"):
            store.leases.acquire(NAME, "run-1", 60)
    finally:
        store.close()
