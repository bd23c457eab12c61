"""What `deltaforge check` says about tables in PostgreSQL, and the options of the sink."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from psycopg import conninfo
from pydantic import SecretStr, ValidationError

from deltaforge_dagster.errors import AuthFailed
from deltaforge_dagster.sinks.postgres.sink_type import POSTGRES, PostgresSinkConfig
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_dagster.sources.findings import Finding
from tests.pipeline.lake.lake_tables import Staging
from tests.sinks.postgres.database import Target, unguarded

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


pytestmark = pytest.mark.postgres

NAMES = ["public.orders", "shop.customers", "public.${source.table}"]


def checked(target: Target, *names: str, pipeline: str = "shop", **options: Any) -> list[Finding]:
    """Return the findings after that about the server."""
    config = target.config(**options)
    server, *found = POSTGRES.preflight(config, SinkContext(pipeline, brief=True), names or NAMES)
    assert (server.level, "PostgreSQL" in server.text) == ("ok", True)
    return found


def test_a_database_that_is_ready(target: Target) -> None:
    """What exists and what will be made; nothing is written. A table of another sink is an error, with the remedy."""
    made = Finding("sink copy", "ok", "will make public.orders, shop.customers")
    unknown = "tables 'public.${source.table}' depend on the changes: whether they exist and may be written is not known"
    assert checked(target) == [made, Finding("sink copy", "note", unknown)]
    assert target.rows("nspname", "pg_namespace WHERE nspname IN ('deltaforge', 'shop')") == []

    target.writer().commit(Staging(target, "current").table(), 0, unguarded)
    (found,) = checked(target, "public.orders")
    assert (found.subject, found.level) == ("table public.orders", "ok")
    (found,) = checked(target, "public.orders", pipeline="other")
    assert (found.level, "belongs to sink copy of pipeline shop" in found.text) == ("error", True)
    target.execute("CREATE TABLE full_one AS SELECT 1 AS id", *found.commands)
    assert checked(target, "public.orders", pipeline="other")[0].level == "ok"
    (found,) = checked(target, "public.full_one")
    assert (found.level, "rows that are not from DeltaForge" in found.text) == ("error", True)
    assert found.commands
    target.execute(*found.commands)
    assert checked(target, "public.full_one")[0].level == "ok"


def test_rights_that_are_missing(target: Target) -> None:
    """Each with the statement that grants it, after which nothing is left to say."""
    name = f"reader_{uuid.uuid4().hex[:8]}"
    database = conninfo.conninfo_to_dict(target.dsn)["dbname"]
    target.execute(
        f'REVOKE TEMPORARY ON DATABASE "{database}" FROM PUBLIC',
        "CREATE SCHEMA closed",
        "CREATE TABLE orders (id bigint PRIMARY KEY)",
    )
    names = ("public.orders", "closed.customers", "absent.customers")
    with target.role(name=name) as dsn:
        found = checked(target, *names, dsn=dsn)
        assert [one.level for one in found] == ["error"] * 5
        assert [one.text.partition(" may not ")[2] for one in found] == [
            "make temporary tables, through which changes are applied",
            "make the table deltaforge.commits, which says which commits tables have",
            "SELECT and INSERT and UPDATE and DELETE",
            "make tables in schema absent",
            "make tables in schema closed",
        ]
        target.execute(*(command for one in found for command in one.commands))
        (table, made) = checked(target, *names, dsn=dsn)
        assert (table.level, "does not own it" in table.text) == ("warning", True)
        assert made.text == "will make closed.customers, absent.customers"
        wrong = conninfo.make_conninfo(dsn, password="not-it")
        with pytest.raises(AuthFailed, match="wrong password"):
            checked(target, dsn=wrong)
