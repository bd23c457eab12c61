"""Models of the sinks and encodings of DeltaForge that this version does not support yet.

A file that uses one of them is rejected (`support`). The block is checked against its model all the same,
so that the error also lists what else is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import SecretStr

from deltaforge_dagster.config.blocks import Block, Name, Seconds, Text
from deltaforge_dagster.config.sinks.base import SinkFilter


class AvroEncoding(Block):
    """Messages in Avro, with their schemas in a schema registry."""

    type: Literal["avro"]
    schema_registry_url: Text
    subject_strategy: Literal["topic_name", "record_name", "topic_record_name"] = "topic_name"
    username: Text | None = None
    password: SecretStr | None = None
    unsigned_bigint_mode: Literal["string", "long"] = "string"
    enum_mode: Literal["string", "enum"] = "string"
    naive_timestamp_mode: Literal["string", "timestamp"] = "string"




class ClickhouseTls(Block):
    """TLS to ClickHouse."""

    enabled: bool = True
    ca_file: Text | None = None
    insecure_skip_verify: bool = False


class ClickhouseConfig(Block):
    """How to write to a ClickHouse table."""

    id: Name | None = None
    required: bool = True
    url: Text
    database: Text
    table: Text
    mode: Literal["changelog", "upsert"] = "changelog"
    user: Text | None = None
    password: SecretStr | None = None
    tls: ClickhouseTls | None = None
    version_source: Literal["source_position", "ts_ms"] = "source_position"
    send_timeout_secs: Seconds = 30.0
    auto_create: bool = True


class ClickhouseSink(Block):
    """A ClickHouse sink."""

    type: Literal["clickhouse"]
    config: ClickhouseConfig


SINKS: Mapping[str, type[Block]] = {
    "clickhouse": ClickhouseSink,
}
