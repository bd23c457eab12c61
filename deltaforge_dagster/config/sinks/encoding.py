"""How messages are encoded: `encoding` of a sink."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import AlsoAccepts, Block, FilledSecret, Text, bare_type


class JsonEncoding(Block):
    """Messages are JSON."""

    type: Literal["json"] = "json"


class AvroEncoding(Block):
    """Messages are Avro, with their schemas in a schema registry ([avro.md](avro.md))."""

    type: Literal["avro"]
    schema_registry_url: Text
    """`http://host:port` or `https://host:port`: a registry with the API of Confluent's.

    User and password go into their own fields.
    """
    subject_strategy: Literal["topic_name", "record_name", "topic_record_name"] = "topic_name"
    """The subject under which a schema is registered: `<topic>-value`, the full name of the record,
    or `<topic>-<record>`. A topic with the changes of several tables needs one of the last two.
    """
    username: Text | None = None
    """The user's name; needs `password`."""
    password: FilledSecret | None = None
    """The user's password; needs `username`."""
    ca_file: Text | None = None
    """File with the certificates (PEM) that are trusted instead of the system's; only for
    `https`.
    """
    unsigned_bigint_mode: Literal["string", "long"] = "string"
    """MySQL: a BIGINT UNSIGNED as text, or as a `long`, into which the upper half of its values
    does not fit.
    """
    enum_mode: Literal["string", "enum"] = "string"
    """MySQL: an ENUM as text, or as an `enum`, if all of its labels can be symbols in Avro."""
    naive_timestamp_mode: Literal["string", "timestamp"] = "string"
    """MySQL's DATETIME and PostgreSQL's `timestamp without time zone` as text, or as
    `timestamp-micros`, as if the time were in UTC.
    """

    @property
    def types(self) -> str:
        """The options that determine types, as text.

        Sinks with equal texts get the same bytes, except for the ids of schemas.
        """
        return f"{self.unsigned_bigint_mode} {self.enum_mode} {self.naive_timestamp_mode}"

    @field_validator("schema_registry_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
            valid = valid and not (parts.query or parts.fragment)
        except ValueError:
            valid = False
        if not valid:
            raise ValueError("is not the address of a registry (write http://host:port)")
        if parts.username is not None or parts.password is not None:
            raise ValueError("contains a user (write `username` and `password`)")
        return url

    @model_validator(mode="after")
    def _check_together(self) -> AvroEncoding:
        if (self.username is None) != (self.password is None):
            raise ValueError("needs both `username` and `password`, or neither")
        if self.ca_file is not None and not self.schema_registry_url.startswith("https:"):
            raise ValueError("`ca_file` needs a schema_registry_url that begins with https:")
        return self

    @field_serializer("password")
    def _mask_password(self, password: SecretStr | None) -> str | None:
        return None if password is None else "***"


def _encoding(value: object) -> object:
    """Accept a bare type in place of a block, and a block without a type as JSON."""
    value = bare_type(value)
    return {"type": "json", **value} if isinstance(value, dict) else value


Encoding = Annotated[
    JsonEncoding | AvroEncoding,
    Field(discriminator="type"),
    BeforeValidator(_encoding),
    AlsoAccepts({"const": "json"}),
]
