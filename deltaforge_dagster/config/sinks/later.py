"""Models of the sinks of DeltaForge that this version does not support yet.

A file that uses one of them is rejected (`support`). The block is checked against its model all the same,
so that the error also lists what else is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from deltaforge_dagster.config.blocks import (
    Block,
    Count,
    Name,
    Seconds,
    TemplateText,
    Text,
)
from deltaforge_dagster.config.sinks.base import Envelope, NativeEnvelope, SinkFilter
from deltaforge_dagster.config.sinks.encoding import Encoding, JsonEncoding

_HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]


class HttpConfig(Block):
    """How to call an HTTP endpoint."""

    id: Name | None = None
    required: bool = True
    envelope: Envelope = NativeEnvelope()
    encoding: Encoding = JsonEncoding()
    filter: SinkFilter | None = None
    url: TemplateText
    method: _HeaderName = "POST"
    headers: Mapping[_HeaderName, SecretStr] = {}
    batch_mode: bool = False
    send_timeout_secs: Seconds = 10.0
    batch_timeout_secs: Seconds = 30.0
    connect_timeout_secs: Seconds = 5.0


class HttpSink(Block):
    """An HTTP sink."""

    type: Literal["http"]
    config: HttpConfig


class FileRoll(Block):
    """When an object is finished: at the first of these limits."""

    max_bytes: Count = 268_435_456
    max_events: Count = 1_000_000
    max_age_secs: Count = 300
    idle_age_secs: Count = 600


class S3Config(Block):
    """How to write objects."""

    id: Name | None = None
    required: bool = True
    filter: SinkFilter | None = None
    bucket: Text
    prefix: str = ""
    region: Text | None = None
    endpoint: Text | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    virtual_hosted_style: bool = False
    local: bool = False
    format: Literal["parquet", "jsonl"] = "parquet"
    compression: Literal["snappy", "gzip", "zstd", "none"] = "snappy"
    file_roll: FileRoll = FileRoll()
    send_timeout_secs: Seconds = 60.0


class S3Sink(Block):
    """An S3 sink."""

    type: Literal["s3"]
    config: S3Config


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
    "http": HttpSink,
    "s3": S3Sink,
    "clickhouse": ClickhouseSink,
}
