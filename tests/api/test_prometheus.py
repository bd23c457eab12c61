"""A real Prometheus reads what the API says, with the configuration, rules and queries that we ship."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deltaforge_dagster.servers.prometheus import PrometheusServer
from deltaforge_dagster.state import metric_families as families
from deltaforge_dagster.state.metrics import Tally
from tests.api.conftest import Api
from tests.api.test_metrics import ROOT, queries
from tests.e2e.deployment import eventually
from tests.started import or_fail

pytestmark = pytest.mark.e2e

TOKEN = "long-enough-a-secret"
_PROMETHEUS = ROOT / "docker/prometheus"


def shipped(api: Api, folder: Path) -> Path:
    """Write our configuration for the API of a test: other address and token, shorter interval."""
    config = yaml.safe_load((_PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [api.client.base_url.netloc.decode()]}]
    job["authorization"]["credentials_file"] = str(folder / "token")
    (folder / "token").write_text(TOKEN)
    (folder / "rules.yml").write_text((_PROMETHEUS / "rules.yml").read_text())
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_real_scrape(serve: Callable[..., Api], tmp_path: Path) -> None:
    """Configuration, rules and the metrics pass promtool; a scrape has them; every query works."""
    api = serve(token=TOKEN)
    api.client.headers["Authorization"] = f"Bearer {TOKEN}"
    api.create("orders")
    tally = Tally()
    tally.add(families.SOURCE_EVENTS, 7, source="db", table="public.orders", op="c")
    tally.observe(families.E2E_LATENCY, 0.2)
    api.store.count("orders", tally)
    config = shipped(api, tmp_path)

    with or_fail(lambda: PrometheusServer.start(config)) as prometheus:
        prometheus.check("config", str(config))
        assert "11 rules found" in prometheus.check("rules", str(tmp_path / "rules.yml"))
        text = api.client.get("/metrics").text
        assert _lint(prometheus, text) == set()

        total = "sum(deltaforge_source_events_total)"
        eventually(lambda: _value(prometheus, total) == 7, seconds=120)
        assert _value(prometheus, 'deltaforge_pipeline_status{pipeline="orders"}') == 1
        assert _value(prometheus, "deltaforge_e2e_latency_seconds_count") == 1
        for query in queries():
            if not query.startswith("label_values"):
                prometheus.ask("query", query=re.sub(r"\$__rate_interval", "1m", query))
        rules = prometheus.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}

        tally = Tally()
        tally.add(families.SOURCE_EVENTS, 5, source="db", table="public.orders", op="c")
        api.store.count("orders", tally)
        eventually(lambda: _value(prometheus, total) == 12, seconds=120)


def _value(prometheus: PrometheusServer, query: str) -> float | None:
    """Return the value of a query's only series, None while there is none."""
    result = prometheus.ask("query", query=query)["result"]
    return float(result[0]["value"][1]) if result else None


def _lint(prometheus: PrometheusServer, text: str) -> set[str]:
    """Return what promtool has against metrics, less what is so on purpose: known names."""
    said = prometheus.check("metrics", text=text).splitlines()
    on_purpose = ("non-counter metrics should not have", "counter metrics should have")
    return {line for line in said if not any(text in line for text in on_purpose)}
