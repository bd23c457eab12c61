"""How long a service keeps its log, of services that no registry has; RDS is in `test_managed`."""

from __future__ import annotations

import math

import pytest

from deltaforge_dagster.sources.mysql.connection.server_log import log_retention
from deltaforge_dagster.sources.mysql.connection.service import service_of
from tests.sources.mysql.connection.test_server_log import Said


@pytest.mark.parametrize(
    ("version", "seconds", "kept"),
    [("8.0.42-azure", "0", 0), ("8.0.42-azure", "86400", 86_400), ("8.0.31-google", "0", math.inf)],
)
def test_what_no_retention_means(version: str, seconds: str, kept: float) -> None:
    """MySQL keeps its log for ever without one; Azure removes it at once, which is an error with advice."""
    session = Said(version, binlog_expire_logs_seconds=seconds)
    retention = log_retention(session, service_of(session))
    found = retention.unsafe(session)

    assert retention.seconds == kept
    assert (found is not None) == (kept == 0)
    if found is not None:
        assert (found.level, found.commands) == ("error", ())
        assert found.text.endswith(
            "; set binlog_expire_logs_seconds to 604800 in the server parameters"
        )
