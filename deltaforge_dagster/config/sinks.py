"""The sinks of a pipeline file (spec.sinks): the options of every sink.

They are its id, where it starts, which events it gets, and the form and encoding of its messages.
A kind of sink adds its own options in a subclass of `MessageSinkConfig`, or of `SinkConfig` if it
sends no messages, in its own folder, `sinks/<kind>/config.py` (`sinks.registry`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import (
    AlsoAccepts,
    Block,
    FilledSecret,
    Name,
    TemplateText,
    Text,
    bare_type,
)
from deltaforge_dagster.config.secrets import check_encoded
from deltaforge_dagster.errors import SpecError


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
    """File with the certificates (PEM) that are trusted instead of the system's, by
    `oauth_token_url` too; only for `https`.
    """
    certificate_file: Text | None = None
    """File with the client's certificate and the chain above it (PEM), for a registry that wants
    one; only for `https`.
    """
    key_file: Text | None = None
    """File with the certificate's private key (PEM, not encrypted), if `certificate_file` does not
    hold it.
    """
    oauth_token_url: Text | None = None
    """Where tokens are asked for, with OAuth's client credentials (RFC 6749, section 4.4), in place
    of `username` and `password`; needs `oauth_client_id` and `oauth_client_secret`.
    """
    oauth_client_id: Text | None = None
    """The client that asks for tokens."""
    oauth_client_secret: FilledSecret | None = None
    """The client's secret, which only `oauth_token_url` gets."""
    oauth_scope: Text | None = None
    """The scope of the tokens, several with spaces between them; by default the client's own."""
    oauth_logical_cluster: Text | None = None
    """Confluent Cloud: the id of the registry (`lsrc-...`), which it wants beside a token."""
    oauth_identity_pool: Text | None = None
    """Confluent Cloud: the id of the identity pool (`pool-...`), several with commas between
    them.
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

    @property
    def encrypted(self) -> bool:
        """Whether requests to the registry, or those for tokens, use TLS."""
        urls = (self.schema_registry_url, self.oauth_token_url or "")
        return any(url.startswith("https:") for url in urls)

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

    @field_validator("oauth_token_url")
    @classmethod
    def _check_token_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.fragment:
            raise ValueError("is not the address of a token endpoint (write https://host/path)")
        if parts.username is not None or parts.password is not None:
            raise ValueError("contains a user (write `oauth_client_id` and `oauth_client_secret`)")
        return url

    @field_validator("oauth_logical_cluster", "oauth_identity_pool")
    @classmethod
    def _check_header(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch("[!-~]+", value):
            raise ValueError("may have only letters, digits and signs of ASCII, without spaces")
        return value

    @model_validator(mode="after")
    def _check_login(self) -> AvroEncoding:
        if (self.username is None) != (self.password is None):
            raise ValueError("needs both `username` and `password`, or neither")
        credentials = (self.oauth_token_url, self.oauth_client_id, self.oauth_client_secret)
        if any(value is None for value in credentials):
            options = (self.oauth_scope, self.oauth_logical_cluster, self.oauth_identity_pool)
            if any(value is not None for value in (*credentials, *options)):
                raise ValueError(
                    "needs `oauth_token_url`, `oauth_client_id` and `oauth_client_secret` for OAuth"
                )
        elif self.username is not None:
            raise ValueError(
                "has two logins: write either `username` and `password`, or those of OAuth"
            )
        return self

    @model_validator(mode="after")
    def _check_files(self) -> AvroEncoding:
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("`key_file` needs `certificate_file`")
        if not self.encrypted:
            for field in ("ca_file", "certificate_file"):
                if getattr(self, field) is not None:
                    raise ValueError(
                        f"`{field}` needs a schema_registry_url that begins with https:"
                    )
        return self

    @field_serializer("password", "oauth_client_secret")
    def _mask_secret(self, secret: SecretStr | None) -> str | None:
        return None if secret is None else "***"


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


class NativeEnvelope(Block):
    """A message is the event itself."""

    type: Literal["native"] = "native"


class DebeziumEnvelope(Block):
    """A message is the event as the `payload` of a Debezium message."""

    type: Literal["debezium"]


class CloudEventsEnvelope(Block):
    """A message is a CloudEvent whose `type` begins with `type_prefix`."""

    type: Literal["cloudevents"]
    type_prefix: Text
    """The beginning of the events' `type` (`com.example.shop` gives `com.example.shop.created`)."""


Envelope = Annotated[
    NativeEnvelope | DebeziumEnvelope | CloudEventsEnvelope,
    Field(discriminator="type"),
    BeforeValidator(bare_type),
    AlsoAccepts({"enum": ["native", "debezium"]}),
]


class SinkFilter(Block):
    """Which events a sink gets, by their origin; every condition must hold."""

    exclude_synthetic: bool = False
    """Only events that were captured from the source."""
    synthetic_only: bool = False
    """Only events that processors created."""
    producers: tuple[Text, ...] = ()
    """Only events that processors with these ids created."""


_OPERATIONS = {"create": "c", "update": "u", "delete": "d", "read": "r", "truncate": "t"}


def _operations(value: object) -> object:
    """Accept `c,u` and words in place of a list of letters; `none` means no operation."""
    if isinstance(value, str):
        value = () if value.strip() == "none" else tuple(word.strip() for word in value.split(","))
    if not isinstance(value, tuple | list):
        return value
    letters = [
        _OPERATIONS.get(operation, operation) if isinstance(operation, str) else operation
        for operation in value
    ]
    for letter in letters:
        if letter not in _OPERATIONS.values():
            raise ValueError(
                "knows c, u, d, r and t, or create, update, delete, read and truncate (`none` for "
                "no operation)"
            )
    return tuple(dict.fromkeys(letters))


class SinkConfig(Block):
    """The options of every sink."""

    destination_field: ClassVar[str]
    """Name of the field, of the subclass, that holds the template of where changes go."""

    id: Name
    """Same characters as in the pipeline's name; unique in the pipeline.

    A renamed sink is a new sink. If absent, it is derived from type and index (`redis-0`), with a
    warning.
    """
    required: bool = True
    """Whether the commit policy `required` waits for this sink."""
    start: Literal["tail", "journal", "snapshot"] | None = None
    """Where the sink starts when it is added to a pipeline that has already run.

    `tail`: with what is captured from then on. `journal`: with the oldest segment that the journal
    still has. `snapshot`: like `tail`, and a [snapshot](snapshots.md#for-one-sink) delivers the
    existing rows. By default it starts where the sink that is furthest behind stands. The log and
    `deltaforge status` show where it started. Ignored afterwards: use `deltaforge checkpoint reset`
    to move a sink.
    """
    filter: SinkFilter | None = None
    """Which events the sink gets, by their origin; every condition must hold.

    Its checkpoint moves past the others.
    """
    skipped_operations: Annotated[
        tuple[str, ...], BeforeValidator(_operations), AlsoAccepts({"type": "string"})
    ] = ()
    """Operations that the sink does not get: `c` inserts, `u` updates, `d` deletes, `r` snapshot
    rows, `t` truncates. Words (`create`, `update`, `delete`, `read`, `truncate`) and a single text
    (`u,d`, `none`) are accepted, too. Other DDL is never skipped.
    """

    @property
    def destination(self) -> str:
        """The template of where changes go."""
        return str(getattr(self, self.destination_field))

    def variables(self, known: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of that template for a table, given those of the source."""
        return known


class MessageSinkConfig(SinkConfig):
    """The options of every sink that sends messages."""

    destination_is_url: ClassVar[bool] = False
    """Whether the destination is a URL, in which the values of variables are percent-encoded."""
    takes_bytes: ClassVar[bool] = False
    """Whether a message of this kind of sink may be bytes that are no text."""

    key: TemplateText | None = None
    """Template of the message key.

    By default the event id; in Kafka the row's primary key, in NATS none. An unresolved variable
    becomes empty text. `${key.id}` is the same for every change of a row.
    """
    envelope: Envelope = NativeEnvelope()
    """Form of a message ([events.md](events.md)): the event itself (`native`),
    `{"schema":null,"payload":<the event>}` (`debezium`), or a CloudEvent 1.0 (`cloudevents`).
    `envelope: debezium` is accepted in place of the block.
    """
    encoding: Encoding = JsonEncoding()
    """How a message is encoded: as JSON, or as [Avro](avro.md).

    `encoding: json` is accepted in place of the block.
    """
    key_updates: Literal["update", "delete_insert"] = "update"
    """How an update that changes the row's primary key is delivered: as one message with the new
    key, or as a delete of the old key and an insert of the new one, which count as such in
    `skipped_operations` ([events](events.md#several-messages-for-one-change)).
    """

    @property
    def header_templates(self) -> Mapping[str, str]:
        """Templates of headers that every message gets in addition to its own, by name."""
        return {}

    @model_validator(mode="after")
    def _check_encoding(self) -> Self:
        if self.encoding.type == "avro":
            if not self.takes_bytes:
                raise ValueError(
                    "encoding avro: messages of this kind of sink are text (write encoding: json)"
                )
            if isinstance(self.envelope, CloudEventsEnvelope):
                raise ValueError(
                    "encoding avro: a CloudEvent is JSON "
                    "(write envelope: native, or encoding: json)"
                )
        return self


class SinkBlock(Block):
    """A sink of a pipeline file.

    A file's sinks are instances of one subclass per kind (`config.model`).
    """

    type: str
    config: SinkConfig


def check_address(url: str) -> None:
    """Check in a field's validator that the delimiters in a URL's user and password are encoded."""
    try:
        check_encoded(url)
    except SpecError as error:
        raise ValueError(str(error)) from None
