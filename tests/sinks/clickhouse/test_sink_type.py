"""What the product asks about ClickHouse as a kind of sink, and the options of such sinks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import AuthFailed, SinkUnavailable, SpecError
from deltaforge_dagster.sinks.clickhouse.sink_type import CLICKHOUSE, ClickhouseSinkConfig
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.config.conftest import Write, write

__all__ = ["write"]


def sink(**options: Any) -> dict[str, Any]:
    """Return the block of a sink."""
    known = {"id": "click", "url": "http://c:8123", "database": "shop"}
    return {"type": "clickhouse", "config": known | options}


def loaded(write: Write, **options: Any) -> ClickhouseSinkConfig:
    """Return the options of a sink that a file declares."""
    pipeline = load_pipeline(write({"spec.sinks.1": sink(**options)}))
    assert pipeline.warnings == ()
    config = pipeline.spec.spec.sinks[1].config
    assert isinstance(config, ClickhouseSinkConfig)
    return config


def test_a_file_of_deltaforge(write: Write) -> None:
    """All of its options, and its name of a mode."""
    config = loaded(
        write,
        url="https://c:8443/",
        table="orders",
        mode="upsert",
        user="u",
        password="geheim",
        tls={"enabled": True, "ca_file": "/ca.pem", "insecure_skip_verify": False},
        version_source="ts_ms",
        send_timeout_secs=5,
        auto_create=False,
    )
    assert (config.mode, config.url, config.secure) == ("current", "https://c:8443", True)
    assert config.name_of("shop", None, "orders") == ("shop", "orders")
    assert "geheim" not in str(config.model_dump()) + repr(config)


def test_names_of_tables(write: Write) -> None:
    """By default that of the source's table; a template may combine its parts."""
    assert loaded(write).name_of("d", "s", "orders") == ("shop", "orders")
    combined = loaded(write, table="${source.schema}_${source.table}")
    assert combined.name_of("d", "s", "orders") == ("shop", "s_orders")
    assert loaded(write, tls={"enabled": False}).secure is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "c:8123"}, "config.url: is not the address of ClickHouse's HTTP interface (write http://host:8123, or https://host:8443)"),
        ({"url": "http://me:geheim@c"}, "config.url: holds a user or password (write them as `user` and `password`)"),
        ({"url": "http://c/?database=x"}, "config.url: is not the address"),
        ({"database": ""}, "config.database: is empty"),
        ({"table": "${source.schema}.${source.table}"}, "config.table: has a dot: a table's name in a database has one part (write ${source.schema}_${source.table})"),
        ({"table": "${source.schema}"}, "config.table: has a variable, but not ${source.table}, so tables would be mixed"),
        ({"mode": "history"}, "config.mode: must be 'changelog' or 'current'"),
        ({"version_source": "x"}, "config.version_source: must be 'source_position' or 'ts_ms'"),
        ({"tls": {}}, "config: url is http://, but tls.enabled is true (write https://, and the port of that interface)"),
        ({"url": "https://c", "tls": {"enabled": False}}, "config: url is https://, but tls.enabled is false (write http://, and the port of that interface)"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_sentence(write: Write, options: dict[str, Any], said: str) -> None:
    """One mistake gives one problem, which says what to write instead and shows no secret."""
    path = write({"spec.sinks.1": sink(**options)})

    with pytest.raises(SpecError) as raised:
        load_pipeline(path)

    (problem,) = raised.value.problems
    assert f"spec.sinks[1].{said}" in problem
    assert "geheim" not in problem


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
