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




SINKS: Mapping[str, type[Block]] = {
}
