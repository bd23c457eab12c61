"""Tests with a real Prometheus and the shipped configuration, rules and queries."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deltaforge_dagster.api.app import build_metrics_app
from deltaforge_dagster.state import metric_families as families
from deltaforge_dagster.state.metrics import Tally
from deltaforge_lab.servers.prometheus import PrometheusServer
from tests.api.conftest import Api, served
from tests.api.test_metrics import ROOT, queries
from tests.e2e.deployment import eventually
from tests.started import or_fail

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOKEN = "long-enough-a-secret"
_PROMETHEUS = ROOT / "docker/prometheus"


def shipped(url: str, folder: Path) -> Path:
    """Write the shipped configuration with the test's address and token and a shorter interval."""
    config = yaml.safe_load((_PROMETHEUS / "prometheus.yml").read_text())
    # The scrape interval is also the timeout of a scrape, which may take more than a second on a busy machine.
    config["global"] = {"scrape_interval": "5s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    job["authorization"]["credentials_file"] = str(folder / "token")
    (folder / "token").write_text(TOKEN)
    (folder / "rules.yml").write_text((_PROMETHEUS / "rules.yml").read_text())
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_real_scrape(serve: Callable[..., Api], tmp_path: Path) -> None:
    """Configuration, rules and metrics pass promtool; a scrape has the metrics; every query works."""
    api = serve(token=TOKEN)
    api.client.headers["Authorization"] = f"Bearer {TOKEN}"
    api.create("orders")
    tally = Tally()
    tally.add(families.SOURCE_EVENTS, 7, source="db", table="public.orders", op="c")
    tally.observe(families.E2E_LATENCY, 0.2)
    api.store.metrics.count("orders", tally)

    with (
        served(api.context, TOKEN, build=build_metrics_app) as url,
        or_fail(lambda: PrometheusServer.start(shipped(url, tmp_path))) as prometheus,
    ):
        config = tmp_path / "prometheus.yml"
        prometheus.check("config", str(config))
        assert "19 rules found" in prometheus.check("rules", str(tmp_path / "rules.yml"))
        text = api.client.get("/metrics").text
        assert _lint(prometheus, text) == set()

        total = "sum(deltaforge_source_events_total)"
        eventually(lambda: _value(prometheus, total) == 7)
        status = 'deltaforge_pipeline_status{pipeline="orders"}'
        eventually(lambda: _value(prometheus, status) == 1)
        latencies = "deltaforge_e2e_latency_seconds_count"
        eventually(lambda: _value(prometheus, latencies) == 1)
        for query in queries():
            if not query.startswith("label_values"):
                prometheus.ask("query", query=re.sub(r"\$__rate_interval", "1m", query))
        rules = prometheus.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}

        tally = Tally()
        tally.add(families.SOURCE_EVENTS, 5, source="db", table="public.orders", op="c")
        api.store.metrics.count("orders", tally)
        eventually(lambda: _value(prometheus, total) == 12)


def _value(prometheus: PrometheusServer, query: str) -> float | None:
    """Return the value of a query's only series, None while there is none."""
    result = prometheus.ask("query", query=query)["result"]
    return float(result[0]["value"][1]) if result else None


def _lint(prometheus: PrometheusServer, text: str) -> set[str]:
    """Return promtool's findings about metrics, without those that are known and intended."""
    said = prometheus.check("metrics", text=text).splitlines()
    on_purpose = ("non-counter metrics should not have", "counter metrics should have")
    return {line for line in said if not any(text in line for text in on_purpose)}
