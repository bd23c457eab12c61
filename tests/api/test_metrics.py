"""Tests of `/metrics`: every documented name, type and label, in both formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.openmetrics import parser as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from deltaforge_dagster.api.app import build_metrics_app
from deltaforge_dagster.state import metric_families as families
from deltaforge_dagster.state.metric_families import FAMILIES, PREFIX
from deltaforge_dagster.state.metrics import Tally
from tests.api.conftest import Api, document, served
from tests.api.scraped import scrape

ROOT = Path(__file__).parents[2]

_WANTED = """
pipelines_total pipeline_status pipeline_info pipeline_pauses_total pipeline_resumes_total build_info panics_total
source_events_total source_bytes_total source_reconnects_total source_errors_total source_lag_seconds
source_table_lag_seconds source_schema_cache_hits_total source_schema_cache_misses_total snapshot_rows_total
batch_events batch_bytes bytes_total e2e_latency_seconds stage_latency_seconds processor_latency_seconds
processor_errors_total processor_events_in_total processor_events_out_total outbox_transformed_total
outbox_dropped_total filter_dropped_total sink_events_total sink_batch_total sink_bytes_total sink_latency_seconds
sink_errors_total sink_routing_errors_total sink_reconnects_total sink_txn_commits_total sink_txn_aborts_total
sink_checkpoint_status sink_last_checkpoint_ts last_checkpoint_ts checkpoints_total coordinator_sink_timeout_total
kafka_produce_retries_total kafka_producer_queue_messages kafka_producer_queue_bytes dlq_events_total dlq_entries
dlq_saturation_ratio dlq_evicted_total dlq_rejected_total dlq_write_failures_total schema_events_total
schema_evolutions_total schema_cache_hits_total schema_cache_misses_total schema_sensing_cache_hits_total
schema_sensing_cache_misses_total schema_tables_total schema_dynamic_maps_total schema_sensing_seconds
pipeline_evolutions_total schema_drift_detected source_idle_seconds pipeline_channel_depth checkpoint_success_total
checkpoint_failure_total sink_failures_total api_requests_total checkpoint_lag_events
sink_s3_files_committed_total sink_s3_writer_open sink_s3_encode_errors_total sink_s3_put_errors_total
sink_clickhouse_insert_seconds sink_clickhouse_rows_total sink_clickhouse_errors_total avro_encode_total
avro_schema_registrations_total avro_encode_failure_total
"""
"""Metric names of DeltaForge."""

_NAME = re.compile(rf"\b{PREFIX}([a-z0-9_]+?)(?:_bucket|_sum|_count)?\b(?:\{{([^}}]*)\}})?(?=\W|$)")
_SELECTED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def queries() -> Iterator[str]:
    """Yield every expression of the dashboard, its variables, and the alert rules."""
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/deltaforge.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (variable["query"] for variable in dashboard["templating"]["list"])
    rules = yaml.safe_load((ROOT / "docker/prometheus/rules.yml").read_text())
    for group in rules["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_the_documented_list() -> None:
    """docs/metrics.md has exactly the existing metrics, with type, labels and meaning."""
    text = (ROOT / "docs/metrics.md").read_text()
    table = text.partition("## All metrics")[2].partition("## Names")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    assert rows == [
        (
            f"`{one.name}`",
            one.kind[0].upper(),
            ", ".join(f"`{label}`" for label in one.labels) or "none",
            one.help,
        )
        for one in FAMILIES.values()
    ]


def test_every_known_name() -> None:
    """Every metric name of DeltaForge exists here, or the documentation says why it does not."""
    text = (ROOT / "docs/metrics.md").read_text().partition("## Names of DeltaForge")[2]
    explained = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert [
        name for name in _WANTED.split() if name not in FAMILIES and name not in explained
    ] == []


def test_the_dashboard_and_the_alerts_ask_for_what_there_is() -> None:
    """Every metric and label used by the dashboard and the alerts exists."""
    found = [match for query in queries() for match in _NAME.finditer(query)]
    assert len(found) > 60
    for match in found:
        family = FAMILIES[match[1]]
        selected = set(_SELECTED.findall(match[2] or "")) - {"le", "instance"}  # Prometheus' own
        assert selected <= set(family.labels), match[0]


def test_everything_is_there_from_the_start(api: Api) -> None:
    """Every family is present from the start, and counters of known objects are 0."""
    api.create("orders")
    answer = api.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    parsed = {one.name: one for one in plain_text(answer.text)}
    for family in FAMILIES.values():
        name = PREFIX + family.name
        assert f"# HELP {name} " in answer.text or family.kind == "counter"
        known = parsed.get(name.removesuffix("_total")) or parsed[name]
        assert known.documentation == family.help
        for sample in known.samples:
            assert set(sample.labels) - {"le"} == set(family.labels)
    assert f'{PREFIX}sink_events_total{{pipeline="orders",sink="redis"}} 0.0' in answer.text
    assert f'{PREFIX}pipeline_status{{pipeline="orders"}} 1.0' in answer.text
    assert f'{PREFIX}pipeline_info{{pipeline="orders",tenant="acme"}} 1.0' in answer.text
    assert f"{PREFIX}panics_total 0.0" in answer.text
    assert "geheim" not in answer.text


def test_what_cannot_count_has_no_zero(api: Api, tmp_path: Path) -> None:
    """Transactions, repeated requests, sizes of messages and events of outboxes have series where they can count."""
    topics = {"brokers": "localhost:1", "topic": "t"}
    sinks = [
        {"type": "kafka", "config": {"id": "exact", "exactly_once": True, **topics}},
        {"type": "kafka", "config": {"id": "plain", **topics}},
        {"type": "http", "config": {"id": "http", "url": "https://h.example/x"}},
        {"type": "redis", "config": {"id": "redis", "uri": "redis://localhost:1", "stream": "s"}},
        {"type": "s3", "config": {"id": "files", "bucket": str(tmp_path), "local": True}},
    ]
    processors = [
        {"type": "filter", "id": "filter", "ops": ["create"]},
        {"type": "outbox", "id": "outbox"},
    ]
    source = document("orders")["spec"]["source"]
    source["config"]["outbox"] = {"prefixes": ["outbox"]}
    api.create("orders", source=source, sinks=sinks, processors=processors)
    parsed = {one.name: one for one in plain_text(api.client.get("/metrics").text)}

    def counting(name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in parsed[PREFIX + name].samples}

    assert counting("sink_txn_commits", "sink") == counting("sink_txn_aborts", "sink") == {"exact"}
    assert counting("kafka_produce_retries", "sink") == {"exact", "plain", "http"}
    assert counting("sink_bytes", "sink") == {"exact", "plain", "http", "redis"}
    assert counting("sink_events", "sink") == {"exact", "plain", "http", "redis", "files"}
    assert counting("outbox_transformed", "processor") == {"outbox"}
    assert counting("processor_events_in", "processor") == {"filter", "outbox"}


def test_open_metrics(api: Api) -> None:
    """OpenMetrics has the same types and values, and ends with EOF."""
    api.create("orders")
    tally = Tally()
    tally.observe(families.E2E_LATENCY, 0.02)
    tally.observe(families.E2E_LATENCY, 99.0)
    tally.add(families.DRIFT_DETECTED)
    tally.add(families.SOURCE_EVENTS, 5, source="db", table='a."b"\\', op="c")
    api.store.metrics.count("orders", tally)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = api.client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    read = open_metrics.text_string_to_metric_families(answer.text)  # type: ignore[no-untyped-call]
    parsed = {one.name: one for one in read}
    assert parsed[f"{PREFIX}source_events"].type == "counter"
    (sample,) = parsed[f"{PREFIX}source_events"].samples
    assert (sample.labels["table"], sample.value) == ('a."b"\\', 5)
    assert parsed[f"{PREFIX}schema_drift_detected"].samples[0].value == 1
    buckets = {
        one.labels["le"]: one.value
        for one in parsed[f"{PREFIX}e2e_latency_seconds"].samples
        if "le" in one.labels
    }
    assert list(buckets.values()) == [0] * 4 + [1] * 10 + [2]
    assert buckets["+Inf"] == 2


def test_requests_are_counted(api: Api) -> None:
    """Requests are counted by route, not by path, and actions by tenant and result."""
    api.create("orders")
    for path in ("/pipelines/orders", "/pipelines/nobody", "/made/up/1", "/made/up/2"):
        api.client.get(path)
    api.client.post("/pipelines/orders/pause")
    api.client.post("/pipelines/nobody/pause")
    text = api.client.get("/metrics").text
    assert "/made" not in text
    assert 'pipeline="nobody"' not in text
    shown = r'api_requests_total{method="GET",route="/pipelines/{name}",status="404"}'
    assert f"{PREFIX}{shown}" in text
    paused = 'api_pipeline_actions_total{action="pause",result="success",tenant="acme"}'
    assert f"{PREFIX}{paused}" in text
    assert 'action="pause",result="error",tenant=""' in text
    assert f'{PREFIX}pipeline_pauses_total{{pipeline="orders"}} 1.0' in text
    assert f'{PREFIX}pipeline_status{{pipeline="orders"}} 0.5' in text


def test_a_broken_file_is_a_failed_pipeline(api: Api) -> None:
    """A pipeline whose file cannot be read counts as failed."""
    api.create("orders")
    api.file("broken", "metadata: {name: broken}")
    text = api.client.get("/metrics").text
    assert f"{PREFIX}pipelines_total 2.0" in text
    assert f'{PREFIX}pipeline_status{{pipeline="broken"}} -1.0' in text
    assert f'{PREFIX}pipeline_problems{{pipeline="broken",severity="error"}} 1.0' in text


def test_metrics_need_the_token(serve: Callable[..., Api]) -> None:
    """If there is a token, metrics require it."""
    api = serve(token="long-enough-a-secret")
    assert api.client.get("/metrics").status_code == 401
    allowed = {"Authorization": "Bearer long-enough-a-secret"}
    assert api.client.get("/metrics", headers=allowed).status_code == 200


def test_an_address_for_metrics_alone(api: Api) -> None:
    """The second address serves the same metrics with the same token, and no other route."""
    api.create("orders")
    allowed = {"Authorization": "Bearer long-enough-a-secret"}
    with (
        served(api.context, "long-enough-a-secret", build=build_metrics_app) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        assert client.get("/metrics").status_code == 401
        here = client.get("/metrics", headers=allowed)
        others = {path: client.get(path, headers=allowed) for path in ("/pipelines", "/readyz")}
        others["/openapi.json"] = client.get("/openapi.json", headers=allowed)
        assert client.delete("/pipelines/orders", headers=allowed).status_code == 404
    there = api.client.get("/metrics")
    assert here.headers["content-type"] == there.headers["content-type"]
    status = f'{PREFIX}pipeline_status{{pipeline="orders"}} 1.0'
    assert status in here.text
    assert status in there.text
    assert _names(here.text) == _names(there.text)
    assert {path: one.json()["code"] for path, one in others.items()} == dict.fromkeys(
        others, "NOT_FOUND"
    )


def _names(text: str) -> list[str]:
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


def test_metrics_without_a_token_are_for_this_machine(api: Api) -> None:
    """Without a token the second address refuses requests from other sites as well."""
    with served(api.context, None, build=build_metrics_app) as url:
        assert httpx.get(f"{url}/metrics", timeout=120).status_code == 200
        foreign = httpx.get(f"{url}/metrics", headers={"Host": "site.example"}, timeout=120)
    assert foreign.status_code == 403


def test_a_deleted_pipeline_leaves_nothing(api: Api) -> None:
    """The metrics of a pipeline are deleted with it."""
    api.create("orders")
    tally = Tally()
    tally.add(families.SINK_EVENTS, 5, sink="redis")
    api.store.metrics.count("orders", tally)
    assert scrape(api.store).of("sink_events_total") == 5
    assert api.client.delete("/pipelines/orders").status_code == 204
    assert scrape(api.store).of("sink_events_total") == 0


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_help_is_a_sentence(family: families.Family) -> None:
    """Help texts are short sentences."""
    assert family.help.endswith(".")
    assert len(family.help) < 100
    assert "|" not in family.help


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    read: dict[str, Any] = json.loads(
        (ROOT / "docker/grafana/dashboards/deltaforge.json").read_text()
    )
    return read


def test_every_panel_follows_instance_and_source() -> None:
    """The dashboard's variables select each metric that has such a label."""
    asked = [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])
    ]
    for text in asked:
        metrics = re.findall(r"\b(deltaforge|process)_(\w+)(?:\{([^}]*)\})?", text)
        assert metrics, text
        for prefix, name, given in metrics:
            family = FAMILIES.get(re.sub("_bucket$", "", name)) if prefix == "deltaforge" else None
            assert 'instance=~"$instance"' in given, text
            has_source = family is not None and "source" in family.labels
            assert ('source=~"$source"' in given) == has_source, text

    variables = {one["name"]: one["query"] for one in dashboard()["templating"]["list"]}
    assert list(variables) == ["instance", "tenant", "pipeline", "source", "sink", "processor"]


def test_panels_do_not_overlap() -> None:
    """The panels of the dashboard do not overlap."""
    places = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert all(x < 24 for x, _ in places)
