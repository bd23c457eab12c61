"""What is known of tables over REST: their versions, what sensing saw, and drift."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api
from tests.pipeline.sensed import documents, pipeline, sense
from tests.state.make import position, table

ORDERS = "/pipelines/orders"


def test_versions_of_a_table(api: Api) -> None:
    """Every table with the version it has now, each version with its columns, and 404 for others."""
    api.create("orders")
    lease = api.store.acquire_lease("orders", "run", 600)
    assert lease is not None
    with api.store.fenced(lease) as writer:
        writer.register_schema("acme", table("id"), position(1))
        writer.register_schema("acme", table("id", "total"), position(2))

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


@pytest.mark.parametrize("path", ["schemas/reload", "schemas/public/orders/reload"])
def test_a_database_that_cannot_be_asked(api: Api, path: str) -> None:
    """It is said that asking again may help."""
    api.create("orders")
    answer = api.client.post(f"{ORDERS}/{path}")
    assert (answer.status_code, answer.json()["code"]) == (503, "UNAVAILABLE")
    assert "geheim" not in answer.text


SENSED = ("", "/json-schema", "/classifications", "/evolutions")


def test_what_was_seen(api: Api) -> None:
    """Structures with their fields, as JSON Schema and as maps; drift; 404 for what was not seen."""
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
    """Without sensing, or where the file keeps it from the API, every route says so."""
    if sensing is None:
        api.create("orders")
    else:
        pipeline(api.context.settings.pipelines, sensing)
    schemas = [f"sensing/schemas/t{more}" for more in SENSED]
    for path in ("sensing/schemas", "sensing/stats", "drift", "drift/t", *schemas):
        answer = api.client.get(f"{ORDERS}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (500, "NOT_ENABLED"), path
