"""The example files themselves: they load, say nothing that has no effect, and are listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline, load_pipelines
from deltaforge_dagster.config.processors import JavascriptProcessor
from deltaforge_dagster.processors.v8 import CallLimits, Script
from deltaforge_dagster.sinks.kafka.client import KafkaClientSettings
from deltaforge_dagster.sinks.kafka.sink_type import KafkaSinkConfig
from tests.examples.stage import EXAMPLES

DOCS = EXAMPLES.parent / "docs"

ADDRESSES = {
    "MYSQL_DSN": "mysql://u@localhost/shop",
    "POSTGRES_DSN": "postgres://u@localhost/shop",
    "KAFKA_BROKERS": "localhost:9092",
    "KAFKA_USERNAME": "u",
    "KAFKA_PASSWORD": "p",
    "REDIS_URI": "redis://localhost",
    "NATS_URL": "nats://localhost",
    "DEMO_FILES": "files",
    "TURSO_URL": "http://localhost:8080",
    "DATABASE": "shop.db",
    "LAKE": "/lake",
    "WEBHOOK_URL": "http://localhost:8080",
    "WEBHOOK_SECRET": "s",
    "INGEST_URL": "https://localhost",
    "INGEST_TOKEN": "t",
    "COPY_DSN": "postgres://u@localhost/copy",
    "LAKE_BUCKET": "lake",
    "LAKE_ENDPOINT": "http://localhost:9000",
    "LAKE_KEY": "key",
    "LAKE_SECRET": "secret",
    "CLICKHOUSE_URL": "http://localhost:8123",
    "CLICKHOUSE_USER": "u",
    "CLICKHOUSE_PASSWORD": "p",
    "SCHEMA_REGISTRY_URL": "http://localhost:8081",
}


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name servers in the environment, under every prefix that examples have."""
    for name, value in ADDRESSES.items():
        for prefix in ("", "DEMO_", "ORDERS_", "SHOP_"):
            monkeypatch.setenv(prefix + name, value)


def test_every_example_can_run() -> None:
    """Also for the libraries of sinks and scripts; and without a single warning."""
    result = CliRunner().invoke(app, ["validate", str(EXAMPLES)])

    assert result.exit_code == 0, result.output
    assert set(re.findall(r"^\w+", result.output, re.MULTILINE)) == {"ok"}


def test_scripts_do_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are named like those of a script are not filled in."""
    before = _scripts()
    for name in ("id", "table", "strategy", "row", "found", "event"):
        monkeypatch.setenv(name, "surprise")

    assert _scripts() == before
    assert "`user:${row.id}`" in "".join(before)


def test_examples_are_named_like_their_pipelines_and_listed() -> None:
    """A file's name is its pipeline's, and the page of examples has every file."""
    page = (DOCS / "examples.md").read_text()
    for pipeline in _loaded():
        assert pipeline.path is not None
        name = pipeline.path.relative_to(EXAMPLES)
        assert f"(../examples/{name})" in page
        if any(word in pipeline.path.read_text() for word in ("${MYSQL_DSN}", "${POSTGRES_DSN}")):
            assert pipeline.path.stem == pipeline.name
    for worker in (EXAMPLES / "workers").glob("*.py"):
        assert f"(../examples/workers/{worker.name})" in page


def test_production_waits_no_longer_than_its_lease() -> None:
    """What the file allows a message, five minutes, is cut to what the run may still send in."""
    sink = load_pipeline(EXAMPLES / "orders-to-kafka-prod.yaml").spec.spec.sinks[0].config
    assert isinstance(sink, KafkaSinkConfig)
    given = {name: value.get_secret_value() for name, value in sink.client_conf.items()}
    settings = KafkaClientSettings(
        "s", sink.brokers, given, sink.send_timeout_secs, lease_seconds=25
    )

    made = settings.properties("id")

    assert given["delivery.timeout.ms"] == "300000"
    assert "delivery.timeout.ms" not in made
    assert made["message.timeout.ms"] == "25000"
    assert int(made["message.timeout.ms"]) <= int(made["transaction.timeout.ms"]) == 60_000
    kept = ("sasl.mechanism", "ssl.endpoint.identification.algorithm", "batch.size", "linger.ms")
    assert [made[name] for name in kept] == ["SCRAM-SHA-512", "https", "65536", "10"]


@pytest.mark.parametrize("policy", ["{mode: all}", "{mode: quorum, quorum: 2}"])
def test_other_policies_of_the_fan_out(tmp_path: Path, policy: str) -> None:
    """The policies that the file names in a comment are read."""
    text = (EXAMPLES / "orders-fan-out.yaml").read_text()
    path = tmp_path / "p.yaml"
    path.write_text(text.replace("commit_policy:\n    mode: required", f"commit_policy: {policy}"))

    loaded = load_pipeline(path)

    assert loaded.spec.spec.commit_policy.mode in policy
    assert not loaded.warnings


VARIANTS = re.findall(
    r"```yaml\n(client_conf:\n.*?)```", (DOCS / "examples.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings_of_production(tmp_path: Path, variant: str) -> None:
    """Each block of client_conf in the page of examples is one that the library takes."""
    text = (EXAMPLES / "orders-to-kafka-prod.yaml").read_text()
    block = "".join(f"        {line}\n" for line in variant.splitlines())
    if "acks: 1" in variant:
        text = text.replace("exactly_once: true", "exactly_once: false")
    path = tmp_path / "p.yaml"
    path.write_text(re.sub(r"        client_conf:\n.*?\n\n", f"{block}\n", text, flags=re.DOTALL))

    result = CliRunner().invoke(app, ["validate", str(path)])

    assert result.exit_code == 0, result.output


INTRODUCTION = """\
metadata: {name: orders-to-kafka, tenant: acme}
spec:
  source: {type: mysql, config: {dsn: "${MYSQL_DSN}", tables: [shop.orders]}}
  processors:
    - type: javascript
      inline: |
        (event) => {
          event.processed_at = Date.now();
          return [event];
        }
  sinks:
    - {type: kafka, config: {brokers: "${KAFKA_BROKERS}", topic: order-events}}
"""
"""DeltaForge's first sample: without ids, and a script of one event."""


def test_the_first_sample_of_the_introduction(tmp_path: Path) -> None:
    """Ids are derived, with a warning each; the script is one of one event, and is usable."""
    path = tmp_path / "orders-to-kafka.yaml"
    path.write_text(INTRODUCTION)

    loaded = load_pipeline(path)

    spec = loaded.spec.spec
    (script_of_one,) = spec.processors
    assert isinstance(script_of_one, JavascriptProcessor)
    ids = (spec.source.config.id, script_of_one.id, spec.sinks[0].config.id)
    assert ids == ("orders-to-kafka", "javascript-0", "kafka-0")
    assert len(loaded.warnings) == 3
    script = Script("js", script_of_one.inline, CallLimits(cpu_ms=2000, timeout_ms=20_000))
    event = '[{"event_id":"a","op":"c","ts_ms":1,"source":{"db":"shop","table":"orders"}}]'
    assert script.call(event, spelled=False) is None  # fields beside the known ones are not carried
    script.close()


def _loaded() -> Iterator[LoadedPipeline]:
    for one in load_pipelines(EXAMPLES):
        assert isinstance(one, LoadedPipeline), one.error
        yield one


def _scripts() -> list[str]:
    return [
        one.inline
        for pipeline in _loaded()
        for one in pipeline.spec.spec.processors
        if isinstance(one, JavascriptProcessor)
    ]
