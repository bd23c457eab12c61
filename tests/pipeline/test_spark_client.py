"""What is true of PySpark wherever the product uses it."""

from __future__ import annotations

import logging.config

import pytest

from deltaforge_dagster.pipeline import spark_client

pytestmark = pytest.mark.usefixtures("logging_configured")

PRINTERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


@pytest.fixture
def logging_configured() -> None:
    """Configure logging as Dagster does in each of its processes, after all imports."""
    assert spark_client.__name__
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})


@pytest.mark.parametrize("name", PRINTERS)
def test_errors_of_spark_are_not_printed(name: str) -> None:
    """They quote values of rows, and a logger that is only disabled is enabled by Dagster again."""
    assert not logging.getLogger(name).isEnabledFor(logging.CRITICAL)
