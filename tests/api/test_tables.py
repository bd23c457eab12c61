"""Tests of the routes for tables: versions, sensing and drift."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deltaforge_dagster.api import schemas
from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.tables import ColumnDetails, TableDetails, TableSchema
from tests.api.conftest import Api
from tests.pipeline.changes import PlayedSource, eventually
from tests.pipeline.sensed import documents, pipeline, sense
from tests.state.make import position
from tests.state.make import table as orders

ORDERS = "/pipelines/orders"


def test_versions_of_a_table(api: Api) -> None:
    """Every table has its current version, each version its columns; others return 404."""
    registered(api, orders("id"), orders("id", "total"))

    (known,) = api.client.get(f"{ORDERS}/schemas").json()
    assert (known["database"], known["table"], known["column_count"]) == ("shop", "orders", 2)
    assert (known["primary_key"], known["registry_version"]) == (["id"], 2)
    path = f"{ORDERS}/schemas/public/orders"
    now = api.client.get(path).json()
    assert [one["name"] for one in now["columns"]] == ["id", "total"]
    column = now["columns"][0]
    assert column["is_primary_key"]
    assert column["type"] == column["column_type"] == column["data_type"] is not None
    assert now["loaded_at"] == now["registered_at"]
    first = api.client.get(path, params={"version": 1}).json()
    assert [one["name"] for one in first["columns"]] == ["id"]
    versions = api.client.get(f"{path}/versions").json()
    assert [one["version"] for one in versions] == [1, 2]
    assert versions[0].keys() >= {"version", "fingerprint", "column_count", "registered_at"}
    for missing in (f"{ORDERS}/schemas/public/none", f"{path}?version=9", f"{path}x/versions"):
        assert api.client.get(missing).status_code == 404


class Asked(PlayedSource):
    """A source whose catalog is `details`, or cannot be read."""

    def __init__(self, details: TableDetails | None, names: Sequence[str] = ()) -> None:
        super().__init__([])
        self._details = details
        self._names = names
        self.looked_at = 0

    def tables(self) -> list[str]:
        """Return the names it was created with."""
        return list(self._names)

    def schema(self, table: str) -> TableSchema:
        """Return a table with one column, after a short delay."""
        self.looked_at += 1
        self.closed.wait(0.02)
        return orders("id")

    def details(self, table: str) -> TableDetails:
        """Return the details of the catalog."""
        if self._details is None:
            raise SourceUnavailable(f"{table}: not now")
        return self._details


def registered(api: Api, *versions: TableSchema) -> None:
    """Create the pipeline `orders`, which has captured these tables."""
    api.create("orders")
    lease = api.store.leases.acquire("orders", "run", 600)
    assert lease is not None
    with api.store.fenced(lease) as writer:
        for number, one in enumerate(versions, 1):
            writer.schemas.register("acme", one, position(number))


def test_columns_as_the_catalog_has_them(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current version has defaults, extra and nullability from the catalog; older versions do not read it."""
    registered(api, orders("id", "total", "gone"))
    columns = {
        "id": ColumnDetails(False, None, "auto_increment"),
        "total": ColumnDetails(False, "0", ""),
        "new": ColumnDetails(True, None, ""),
    }
    asked = Asked(TableDetails(columns, "InnoDB", "latin1", "latin1_bin"), ["public.orders"])
    monkeypatch.setattr(schemas, "build_source", lambda _spec: asked)

    path = f"{ORDERS}/schemas/shop/orders"
    for answer in (api.client.get(path), api.client.post(f"{path}/reload")):
        table = answer.json()
        assert (table["engine"], table["charset"], table["collation"]) == (
            "InnoDB", "latin1", "latin1_bin",
        )  # fmt: skip
        assert table["catalog"] == {"error": None}
        found = [
            (one["name"], one["nullable"], one["default"], one["default_value"], one["extra"])
            for one in table["columns"]
        ]
        assert found == [
            ("id", False, None, None, "auto_increment"),
            ("total", False, "0", "0", ""),
            ("gone", True, None, None, None),
        ]
    assert asked.closed.is_set()
    of_version = api.client.get(path, params={"version": 1}).json()
    assert of_version["catalog"] is None
    assert of_version.keys() == table.keys() - {"status", "changed", "differences", "error"}
    assert {one["extra"] for one in of_version["columns"]} == {None}


def test_columns_of_a_source_that_cannot_be_asked(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is returned anyway, with the error of reading the catalog."""
    registered(api, orders("id", "total"))
    monkeypatch.setattr(schemas, "build_source", lambda _spec: Asked(None))
    answer = api.client.get(f"{ORDERS}/schemas/shop/orders")
    assert answer.status_code == 200
    assert answer.json()["catalog"] == {"error": "public.orders: not now"}
    assert [
        (one["name"], one["nullable"], one["default"], one["extra"])
        for one in answer.json()["columns"]
    ] == [("id", False, None, None), ("total", True, None, None)]


def test_a_table_by_database_or_schema(api: Api) -> None:
    """A table is found by database and full or bare name, and by schema if that is unambiguous."""
    registered(api, orders("id"), replace(orders("id"), schema="sales"), orders("id", name="items"))
    for database, name, full in (
        ("shop", "public.orders", "public.orders"),
        ("shop", "sales.orders", "sales.orders"),
        ("sales", "orders", "sales.orders"),
        ("shop", "items", "public.items"),
        ("public", "items", "public.items"),
    ):
        for more in ("?version=1", "/versions"):
            answer = api.client.get(f"{ORDERS}/schemas/{database}/{name}{more}")
            assert answer.status_code == 200, (database, name)
        shown = api.client.get(f"{ORDERS}/schemas/{database}/{name}?version=1").json()
        assert (shown["database"], shown["name"]) == ("shop", full)
    several = api.client.get(f"{ORDERS}/schemas/shop/orders")
    assert several.status_code == 404
    assert "may be public.orders or sales.orders" in several.json()["error"]


def test_a_client_that_is_gone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining tables are skipped when the client disconnects."""
    api.create("orders")
    asked = Asked(None, [f"public.t{number}" for number in range(100_000)])
    monkeypatch.setattr(schemas, "build_source", lambda _spec: asked)
    url = api.client.base_url
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(f"POST {ORDERS}/schemas/reload HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually(lambda: asked.looked_at > 2)
        assert not asked.closed.is_set()
    assert asked.closed.wait(120)
    assert asked.looked_at < 100_000
    assert api.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("path", ["schemas/reload", "schemas/public/orders/reload"])
def test_a_database_that_cannot_be_asked(api: Api, path: str) -> None:
    """The response says that the request can be retried."""
    api.create("orders")
    answer = api.client.post(f"{ORDERS}/{path}")
    assert (answer.status_code, answer.json()["code"]) == (503, "UNAVAILABLE")
    assert "geheim" not in answer.text


SENSED = ("", "/json-schema", "/classifications", "/evolutions")


def test_what_was_seen(api: Api) -> None:
    """Structures are returned with fields, as JSON Schema and as maps, and drift; unknown ones return 404."""
    loaded = pipeline(api.context.settings.pipelines)
    sense(api.store, loaded, documents(31))

    (known,) = api.client.get(f"{ORDERS}/sensing/schemas").json()
    assert (known["table"], known["event_count"]) == ("public.orders:doc", 31)
    assert known["fingerprint"].startswith("sha256:")
    one = f"{ORDERS}/sensing/schemas/public.orders:doc"
    assert {field["name"] for field in api.client.get(one).json()["fields"]} >= {"state", "items"}
    assert api.client.get(f"{one}/json-schema").json()["type"] == "object"
    for more in SENSED:
        for name in ("orders", "public.orders", "orders:doc", "public.orders:doc"):
            answer = api.client.get(f"{ORDERS}/sensing/schemas/{name}{more}")
            assert answer.status_code == 200, (name, more)
        assert api.client.get(f"{ORDERS}/sensing/schemas/none{more}").status_code == 404, more
    assert "hit_rate" in api.client.get(f"{ORDERS}/sensing/stats").json()
    assert set(api.client.get(f"{one}/classifications").json()["paths"]) == {"", "items[]"}
    table = f"{ORDERS}/sensing/schemas/orders"
    assert set(api.client.get(f"{table}/classifications").json()["paths"]) == {
        "", "doc", "doc.items[]",
    }  # fmt: skip
    (drift,) = api.client.get(f"{ORDERS}/drift").json()
    assert drift["has_drift"] is True
    assert api.client.get(f"{ORDERS}/drift/public.orders").json() == drift
    assert api.client.get(f"{ORDERS}/drift/none").status_code == 404


@pytest.mark.parametrize("sensing", [None, "enabled: true, output: {expose_api: false}"])
def test_what_is_not_to_be_seen(api: Api, sensing: str | None) -> None:
    """Without sensing, or if the file hides it from the API, every route reports that."""
    if sensing is None:
        api.create("orders")
    else:
        pipeline(api.context.settings.pipelines, sensing)
    schemas = [f"sensing/schemas/t{more}" for more in SENSED]
    for path in ("sensing/schemas", "sensing/stats", "drift", "drift/t", *schemas):
        answer = api.client.get(f"{ORDERS}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (500, "NOT_ENABLED"), path
