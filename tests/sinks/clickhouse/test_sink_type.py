"""What the product asks about ClickHouse as a kind of sink."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from deltaforge_dagster.errors import AuthFailed, SinkUnavailable
from deltaforge_dagster.sinks.clickhouse.sink_type import CLICKHOUSE, ClickhouseSinkConfig
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_lab.servers.clickhouse import ClickhouseServer

CONTEXT = SinkContext("shop", brief=True)


def config(server: ClickhouseServer, database: str, **options: Any) -> ClickhouseSinkConfig:
    """Options of a sink."""
    known: dict[str, Any] = {"id": "click", "url": server.url, "database": database}
    known |= {"password": SecretStr(server.password), "send_timeout_secs": 300.0}
    return ClickhouseSinkConfig(**known | options)


@pytest.mark.clickhouse
def test_what_check_says(clickhouse_server: ClickhouseServer, clickhouse_database: str) -> None:
    """The server, the user's privileges, and which tables there are or will be; nothing is changed there."""
    server, database = clickhouse_server, clickhouse_database
    server.query(f"CREATE TABLE {database}.orders (id Int64) ENGINE = Memory")

    def said(names: list[str], **options: Any) -> list[tuple[str, str]]:
        found = CLICKHOUSE.preflight(config(server, database, **options), CONTEXT, names)
        assert {one.subject for one in found} == {"sink click"}
        return [(one.level, one.text) for one in found]

    first, granted, *tables = said(["${source.table}", "orders", "parcels"])
    assert first[0] == "ok"
    assert first[1].startswith(f"ClickHouse at 127.0.0.1:{server.port} answers, version 2")
    assert granted == (
        "ok",
        f"the user has SELECT, INSERT, CREATE TABLE, DROP TABLE, ALTER TABLE on `{database}`.*",
    )
    assert tables == [
        ("ok", f"parcels will be made in {database}"),
        ("note", "tables '${source.table}' depend on the changes: whether they exist, or will be made, is not known"),
    ]  # fmt: skip
    assert said(["orders"])[2:] == [("ok", f"there is orders in {database}")]
    missing = f"there is no parcels in {database}, and auto_create is false"
    assert said(["parcels"], auto_create=False)[2:] == [("error", missing)]
    _, nothing = CLICKHOUSE.preflight(config(server, "nowhere"), CONTEXT, ["orders"])
    assert (nothing.level, nothing.remedy) == ("error", "CREATE DATABASE `nowhere`")
    assert server.query(f"SHOW TABLES FROM {database}") == b"orders\n"


@pytest.mark.clickhouse
def test_who_is_not_let_in(clickhouse_server: ClickhouseServer) -> None:
    """A wrong password, and no server."""
    wrong = config(clickhouse_server, "default", password=SecretStr("geheim"))
    with pytest.raises(AuthFailed, match="correct `user` and `password`"):
        CLICKHOUSE.preflight(wrong, CONTEXT, [])
    nobody = config(clickhouse_server, "default", url="http://127.0.0.1:1")
    with pytest.raises(
        SinkUnavailable, match=r"127\.0\.0\.1:1 cannot be reached: Connection refused"
    ):
        CLICKHOUSE.preflight(nobody, CONTEXT, [])


def test_what_it_is() -> None:
    """Its tables are where its options say; every change is there once."""
    sink = ClickhouseSinkConfig(id="click", url="http://c", database="shop")
    assert CLICKHOUSE.exactly_once(sink)
    assert CLICKHOUSE.names(sink, "p") == {"mode": "changelog", "database": "shop"}
    assert CLICKHOUSE.metadata(sink) == {"mode": "changelog", "url": "http://c", "database": "shop"}
    assert CLICKHOUSE.problems(sink, CONTEXT) == []
    fields = {*CLICKHOUSE.timing, *CLICKHOUSE.consequences}
    assert fields <= set(ClickhouseSinkConfig.model_fields)
