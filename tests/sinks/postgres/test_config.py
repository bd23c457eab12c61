"""The options of the sink."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig

DSN = SecretStr("postgres://copy:not-to-be-seen@localhost/copy")


def test_the_password_is_hidden() -> None:
    """In everything that is shown."""
    config = PostgresSinkConfig(id="copy", dsn=DSN)
    assert "not-to-be-seen" not in f"{config!r} {config.model_dump_json()}"
    assert config.model_dump()["dsn"] == "postgres://copy:***@localhost/copy"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dsn": SecretStr("copy:not-to-be-seen")}, "is not a PostgreSQL connection string"),
        ({"mode": "history", "soft_deletes": True}, "soft_deletes needs mode: current"),
        ({"table": "${source.db}.${source.schema}.${source.table}"}, "table has 3 parts"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    """Each is one clear error without secrets."""
    with pytest.raises(ValidationError, match=said) as raised:
        PostgresSinkConfig(id="copy", **{"dsn": DSN, **options})
    assert "not-to-be-seen" not in str(raised.value)
