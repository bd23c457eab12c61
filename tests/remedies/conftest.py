"""What the remedies share: deployments and databases of the end-to-end tests, and a pipeline with both kinds of sinks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop, deploy, shop
from tests.e2e.deployment import Deployment
from tests.remedies.patient import Patient

__all__ = ["deploy", "shop"]


@pytest.fixture
def patient(
    shop: Shop,
    deploy: Callable[..., Deployment],
    postgres_server: PostgresServer,
) -> Patient:
    """A pipeline from two tables of PostgreSQL to Redis and to tables in another database; nothing has run yet."""
    return Patient(shop, deploy(), postgres_server.create_database())
