"""The defaults of DeltaForge's fields, according to its documentation and source code.

Where a default differs on purpose, a comment next to the value gives the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from deltaforge_dagster.config.model import Batch, CommitPolicy, DeadLetters, Metadata, PipelineSpec
from deltaforge_dagster.config.processors import (
    FilterProcessor,
    FlattenProcessor,
    JavascriptProcessor,
    OutboxProcessor,
)
from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.config.sources import Snapshot
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig, ClickhouseTls
from deltaforge_dagster.sinks.http.sink_type import HttpSinkConfig
from deltaforge_dagster.sinks.kafka.sink_type import KafkaSinkConfig
from deltaforge_dagster.sinks.nats.sink_type import NatsSinkConfig
from deltaforge_dagster.sinks.objects.sink_type import FileRoll, S3SinkConfig
from deltaforge_dagster.sinks.redis.sink_type import RedisSinkConfig
from deltaforge_dagster.sources.mysql.source_type import MysqlSourceConfig
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.turso.source_type import TursoSourceConfig

POSTGRES = {"id": "a", "dsn": "postgres://h/d", "slot": "a", "publication": "a", "tables": ("a",)}
ANY_SINK = {"required": True, "envelope": {"type": "native"}, "encoding": {"type": "json"}}
FULL_SINK = {**ANY_SINK, "key": None, "filter": None}
TIMEOUTS = {"send_timeout_secs": 5, "batch_timeout_secs": 30, "connect_timeout_secs": 10}
OUTBOX_COLUMNS = {
    "payload": "payload",
    "aggregate_type": "aggregate_type",
    "aggregate_id": "aggregate_id",
    "event_type": "event_type",
    "topic": "topic",
    "event_id": "id",
}


@pytest.mark.parametrize(
    ("model", "given", "defaults"),
    [
        (Metadata, {"name": "a", "tenant": "t"}, {"labels": {}, "annotations": {}}),
        (PostgresSourceConfig, POSTGRES, {"start_position": "earliest", "on_schema_drift": "adapt", "outbox": None, "snapshot": None}),
        (MysqlSourceConfig, {"id": "a", "dsn": "mysql://u@h/d"}, {"tables": [], "on_schema_drift": "adapt", "outbox": None, "snapshot": None}),
        (Snapshot, {}, {"mode": "never", "max_parallel_tables": 8, "chunk_size": 10_000, "intra_table_parallel": False, "max_parallel_chunks": 4}),
        (TursoSourceConfig, {"id": "a", "url": "u", "tables": ("*",)}, {"auth_token": None, "cdc_mode": "auto", "poll_interval_ms": 1000, "native_cdc": {"level": "data"}, "native_cdc_level": "full", "cdc_table_name": "turso_cdc", "tracking_column": "_rowid_", "auto_create_triggers": False, "batch_size": 1000, "on_schema_drift": "adapt", "snapshot": None}),
        (JavascriptProcessor, {"type": "javascript", "id": "a", "inline": "x"}, {"limits": {"cpu_ms": 50, "mem_mb": 128, "timeout_ms": 500}}),
        (FlattenProcessor, {"type": "flatten"}, {"id": "flatten", "separator": "__", "max_depth": None, "on_collision": "last", "empty_object": "preserve", "lists": "preserve", "empty_list": "preserve"}),
        (OutboxProcessor, {"type": "outbox"}, {"id": "outbox", "tables": [], "topic": None, "default_topic": None, "key": None, "raw_payload": False, "strict": False, "additional_headers": {}, "columns": OUTBOX_COLUMNS}),
        (FilterProcessor, {"type": "filter"}, {"id": "filter", "ops": [], "tables": {"include": [], "exclude": []}, "fields": [], "match": "all"}),
        (KafkaSinkConfig, {"id": "a", "brokers": "h", "topic": "t"}, {**FULL_SINK, "exactly_once": False, "send_timeout_secs": 30, "client_conf": {}}),
        (RedisSinkConfig, {"id": "a", "uri": "redis://h", "stream": "s"}, {**FULL_SINK, **TIMEOUTS}),
        (NatsSinkConfig, {"id": "a", "url": "nats://h", "subject": "s"}, {**FULL_SINK, **TIMEOUTS, "stream": None, "credentials_file": None, "username": None, "password": None, "token": None}),
        (HttpSinkConfig, {"id": "a", "url": "http://h"}, {**FULL_SINK, "method": "POST", "headers": {}, "batch_mode": False, "send_timeout_secs": 10, "batch_timeout_secs": 30, "connect_timeout_secs": 5}),
        (S3SinkConfig, {"id": "a", "bucket": "b"}, {"required": True, "filter": None, "prefix": "", "region": None, "endpoint": None, "access_key_id": None, "secret_access_key": None, "virtual_hosted_style": False, "local": False, "format": "parquet", "compression": "snappy", "send_timeout_secs": 60}),
        (FileRoll, {}, {"max_bytes": 268_435_456, "max_events": 1_000_000, "max_age_secs": 300, "idle_age_secs": 600}),
        (ClickhouseSinkConfig, {"id": "a", "url": "http://u", "database": "d", "table": "t"}, {"required": True, "table": "t", "mode": "changelog", "user": None, "password": None, "version_source": "source_position", "send_timeout_secs": 30, "auto_create": True}),
        (ClickhouseTls, {}, {"enabled": True, "ca_file": None, "insecure_skip_verify": False}),
        (AvroEncoding, {"type": "avro", "schema_registry_url": "http://h"}, {"subject_strategy": "topic_name", "username": None, "password": None, "ca_file": None, "certificate_file": None, "key_file": None, "oauth_token_url": None, "oauth_client_id": None, "oauth_client_secret": None, "oauth_scope": None, "oauth_logical_cluster": None, "oauth_identity_pool": None, "unsigned_bigint_mode": "string", "enum_mode": "string", "naive_timestamp_mode": "string"}),
        # By default a segment is the batch; a segment's own limits are under `engine.segment`.
        (Batch, {}, {"max_events": None, "max_bytes": None, "max_ms": None, "respect_source_tx": True, "max_inflight": None}),
        (CommitPolicy, {}, {"mode": "required", "quorum": None}),
        # `block`, where the original drops the oldest entry: nothing is lost.
        (DeadLetters, {}, {"enabled": False, "max_event_bytes": 262_144, "dlq": {"max_entries": 10_000, "max_age_secs": 604_800, "overflow_policy": "block"}}),
        (SchemaSensing, {}, {
            "enabled": False,
            "tables": {"include": [], "exclude": []},
            "deep_inspect": {"enabled": True, "max_depth": 10, "max_sample_size": 1000, "columns": {"include": [], "exclude": []}},
            "sampling": {"warmup_events": 1000, "sample_rate": 10, "structure_cache": True, "structure_cache_size": 100},
            "high_cardinality": {"enabled": True, "min_events": 100, "stable_threshold": 0.5, "min_dynamic_fields": 5, "confidence_threshold": 0.7, "reevaluate_interval": 10_000, "hll_precision": 12, "heavy_hitter_capacity": 50, "sample_size": 50},
            "tracking": {"field_statistics": False, "null_rates": True, "enum_detection": True, "enum_max_cardinality": 50, "detect_drift": False, "drift_threshold": 0.1},
            "output": {"expose_api": True, "emit_events": False, "export_json_schema": True, "emit_schemas": False, "json_schema_format": "draft-2020-12"},
        }),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)  # fmt: skip
def test_what_a_field_is_when_left_out(
    model: type[BaseModel], given: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """A block needs only its required fields; every other field has the original's default."""
    block = model.model_validate(given).model_dump(mode="json")

    assert {name: block[name] for name in defaults} == defaults


def test_what_a_spec_is_when_left_out() -> None:
    """A pipeline needs only a source and sinks."""
    sink = {"type": "redis", "config": {"id": "a", "uri": "redis://h", "stream": "s"}}
    spec = {"source": {"type": "postgres", "config": POSTGRES}, "sinks": (sink,)}
    pipeline = PipelineSpec.model_validate({"metadata": {"name": "a", "tenant": "t"}, "spec": spec})

    content = pipeline.masked()["spec"]
    assert content["processors"] == []
    assert content["batch"] is None
    assert content["commit_policy"]["mode"] == "required"
    assert content["sink_batch_deadline_secs"] is None
    assert content["journal"]["enabled"] is False
    assert pipeline.spec.schema_sensing is None
    assert pipeline.spec.sharding is None
    assert pipeline.spec.connection_policy is None
