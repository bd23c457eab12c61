"""Models of the sinks and encodings of DeltaForge that this version does not support yet.

A file that uses one of them is rejected (`support`). The block is checked against its model all the same,
so that the error also lists what else is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr

from deltaforge_dagster.config.blocks import (
    Block,
    Count,
    Name,
    Seconds,
    TemplateText,
    Text,
    bare_type,
)
from deltaforge_dagster.config.sinks.base import Encoding, Envelope, NativeEnvelope, SinkFilter


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


AnyEncoding = Annotated[
    Encoding | AvroEncoding, Field(discriminator="type"), BeforeValidator(bare_type)
]

_HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]


class HttpConfig(Block):
    """How to call an HTTP endpoint."""

    id: Name | None = None
    required: bool = True
    envelope: Envelope = NativeEnvelope()
    encoding: AnyEncoding = Encoding()
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


SINKS: Mapping[str, type[Block]] = {
    "http": HttpSink,
    "s3": S3Sink,
}
