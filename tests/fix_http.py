"""An HTTP server for tests, each with its own; it starts in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltaforge_lab.servers.http import HttpServer


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    """A server that accepts everything."""
    with HttpServer.start() as server:
        yield server
