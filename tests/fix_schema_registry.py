"""A schema registry for tests: one per session, with subjects of their own for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.started import or_fail

StartSchemaRegistry = Callable[..., SchemaRegistryServer]


@pytest.fixture(scope="session")
def schema_registry() -> Iterator[SchemaRegistryServer]:
    """A registry with `.url`; not to be stopped or changed."""
    with or_fail(SchemaRegistryServer.start) as server:
        yield server
        server.stop()  # in order, so that `make coverage` sees what it has executed


@pytest.fixture
def start_schema_registry() -> Iterator[StartSchemaRegistry]:
    """Start a registry of the test's own, to stop and configure: `start_schema_registry(user="me:secret")`."""
    with ExitStack() as stack:

        def start(**options: Any) -> SchemaRegistryServer:
            return stack.enter_context(or_fail(lambda: SchemaRegistryServer.start(**options)))

        yield start
