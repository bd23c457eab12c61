"""What libpq says about a connection, as PostgreSQL 18 words it, becomes an error that says who can mend it."""

from __future__ import annotations

import psycopg
import pytest

from deltaforge_dagster.errors import AuthFailed, DeltaforgeError, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.postgres.server import connection_error

FAILED = 'connection failed: connection to server at "10.0.0.1", port 5432 failed: '


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ('FATAL:  password authentication failed for user "ann"', AuthFailed, "wrong password"),
        ('FATAL:  role "ann" does not exist', AuthFailed, "login of role 'ann' refused"),
        (
            'FATAL:  no pg_hba.conf entry for host "10.0.0.2", user "ann", database "shop", no encryption',
            AuthFailed,
            "login of role 'ann' refused: no pg_hba.conf entry",
        ),
        (
            'FATAL:  no pg_hba.conf entry for host "10.0.0.2", user "ann", database "shop", SSL encryption',
            AuthFailed,
            "login of role 'ann' refused: no pg_hba.conf entry",
        ),
        (
            'FATAL:  pg_hba.conf rejects connection for host "10.0.0.2", user "ann", database "shop"',
            AuthFailed,
            "login of role 'ann' refused: pg_hba.conf rejects",
        ),
        ('FATAL:  database "shop" does not exist', SinkRejected, "the database does not exist"),
        ("server does not support SSL, but SSL was required", SinkRejected, "see sslmode"),
        ("Connection refused", SinkUnavailable, "Connection refused"),
    ],
)
def test_connections(text: str, kind: type[DeltaforgeError], shown: str) -> None:
    """A refused login is not tried again as an outage is."""
    error = connection_error(psycopg.OperationalError(FAILED + text), "10.0.0.1/shop", "ann")

    assert type(error) is kind
    assert shown in str(error)
