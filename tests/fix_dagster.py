"""A Dagster instance in memory for a test."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """Return an ephemeral instance, whose temporary files end with the test."""
    with dg.DagsterInstance.ephemeral() as made:
        yield made
