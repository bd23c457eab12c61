"""The sinks of a pipeline file: where changes are delivered, and in which form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
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
    Seconds,
    TemplateText,
    Text,
    environment_filled,
    resolved,
)
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks.base import SinkConfig
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.config.urls import check_encoded
from deltaforge_dagster.errors import SpecError

_BROKER = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@,\[\]]+)(?::(?P<port>\d{1,9}))?"
)


def _brokers(text: str) -> str:
    for broker in text.split(","):
        match = _BROKER.fullmatch(broker.strip())
        if match is None or int(match["port"] or 1) not in range(1, 65_536):
            raise ValueError(
                "is not a list of Kafka brokers (write host:port,host:port; TLS and users stand "
                "under client_conf)"
            )
    return text


def _topic(text: str) -> str:
    for part in compile_template(text).parts:
        if isinstance(part, str) and not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            raise ValueError(
                "is not the name of a Kafka topic (only letters, digits, `.`, `_` and `-` are "
                "allowed)"
            )
    return text


def _client_value(value: object) -> object:
    """Accept numbers and flags in place of the text that the client library expects."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return environment_filled(value) if isinstance(value, str) else value


def _check_encoded(url: str) -> None:
    try:
        check_encoded(url)
    except SpecError as error:
        raise ValueError(str(error)) from None


_REDIS_SCHEMES = frozenset(
    ["unix", *(f"redis{tls}+{kind}" for tls in ("", "s") for kind in ("sentinel", "cluster"))]
)
"""Schemes whose addresses are checked when the sink is created; URLs of other schemes name one host."""


class RedisConfig(SinkConfig):
    """How to write to Redis streams."""

    uri: SecretStr
    """`redis://user:password@host:port/database`, `rediss://` with TLS, `unix://`,
    `redis+sentinel://host:port,host:port/service/database`, or
    `redis+cluster://host:port,host:port` (one node of a cluster can also be `redis://`).
    """
    stream: TemplateText
    """Template of the stream's name. An event for which a variable cannot be resolved makes the sink
    fail until the file is changed.
    """
    send_timeout_secs: Seconds = 5.0
    """How long the server may neither accept nor send a byte."""
    batch_timeout_secs: Seconds = 30.0
    """How long it may take until a block of at most 5,000 entries is acknowledged."""
    connect_timeout_secs: Seconds = 10.0
    """The timeout of one connection attempt."""
    exactly_once: bool = False
    """Whether the sink also stores its own position, so that every change arrives exactly once
    ([guarantees](guarantees.md#exactly-once)). Redis keeps it in the key
    `deltaforge:position:<pipeline>:<sink>`; the user additionally needs `+watch +unwatch +get +set` and
    access to that key. In a cluster, all streams must be in one hash slot.
    """
    event_field: Literal["df-event", "event"] = "df-event"
    """Name of the field that holds the message. `event` is also the entry's first field, as
    DeltaForge's sample consumers expect: they read it by name or as the first value.
    """

    @property
    def destination(self) -> str:
        """The template of where messages go."""
        return self.stream

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: SecretStr) -> SecretStr:
        text = resolved(uri.get_secret_value())
        _check_encoded(text)
        try:
            parts = urlsplit(text)
            valid = parts.scheme in _REDIS_SCHEMES or (
                parts.scheme in {"redis", "rediss"} and bool(parts.hostname) and parts.port != 0
            )
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(
                "is not a Redis address (write redis://user:password@host:port/database, or "
                "rediss:// for TLS, unix://, redis+sentinel:// or redis+cluster://, with special "
                "characters of the password percent-encoded)"
            )
        return uri

    @field_serializer("uri")
    def _mask_uri(self, uri: SecretStr) -> str:
        return mask(uri.get_secret_value())


class RedisSink(Block):
    """A Redis sink: each message is an entry of a stream."""

    type: Literal["redis"]
    config: RedisConfig
    """How to write to Redis."""


class KafkaConfig(SinkConfig):
    """How to write to Kafka topics."""

    brokers: Annotated[Text, AfterValidator(_brokers)]
    """`host:port,host:port`: some brokers of the cluster."""
    topic: Annotated[TemplateText, AfterValidator(_topic)]
    """Template of the topic's name. An event for which a variable cannot be resolved makes the sink fail
    until the file is changed.
    """
    tombstones: bool = False
    """Whether each delete is followed by a message with its key and no value, so that a topic with
    `cleanup.policy=compact` removes the row.
    """
    exactly_once: bool = False
    """Whether every batch is a transaction that also contains the sink's position: consumers with
    `isolation.level=read_committed` then see every change exactly once
    ([guarantees](guarantees.md#exactly-once)).
    """
    send_timeout_secs: Seconds = 30.0
    """How long the brokers may take to acknowledge messages."""
    client_conf: Mapping[
        str,
        Annotated[
            SecretStr,
            BeforeValidator(_client_value),
            AlsoAccepts({"type": ["number", "boolean"]}),
        ],
    ] = {}
    """[Properties of
    librdkafka](https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md):
    [users, passwords and certificates](kafka.md#logging-in), and [what the producer is set
    to](kafka.md#what-the-producer-is-set-to). They override what the sink sets itself.
    `message.timeout.ms` is never longer than the lease allows.
    """

    @property
    def destination(self) -> str:
        """The template of where messages go."""
        return self.topic

    @field_serializer("client_conf")
    def _mask_client_conf(self, conf: Mapping[str, SecretStr]) -> dict[str, str]:
        return {
            name: "***" if SECRET_NAME.search(name) else mask(value.get_secret_value())
            for name, value in conf.items()
        }


class KafkaSink(Block):
    """A Kafka sink: each message is a record of a topic."""

    type: Literal["kafka"]
    config: KafkaConfig
    """How to write to Kafka."""


def _subject(text: str) -> str:
    words = "".join(
        part if isinstance(part, str) else "x" for part in compile_template(text).parts
    ).split(".")
    if not all(words) or any(re.search(r"[\s*>\x00-\x1f\x7f]", word) for word in words):
        raise ValueError(
            "is not a NATS subject (words with dots between them, without blanks, `*` and `>`)"
        )
    return text


def _stream(text: str) -> str:
    if re.search(r"[\s.*>/\\\x00-\x1f\x7f]", text):
        raise ValueError("is not the name of a NATS stream (no blanks, `.`, `*`, `>`, `/` or `\\`)")
    return text


class NatsConfig(SinkConfig):
    """How to publish to NATS subjects."""

    url: SecretStr
    """`nats://host:port,nats://host:port`, or `tls://` to require TLS (it is also used if the server
    requires it). The first server that answers is used.
    """
    subject: Annotated[TemplateText, AfterValidator(_subject)]
    """Template of the subject. A subject that is empty, or has blanks, `*`, `>` or empty tokens, makes its
    message undeliverable.
    """
    stream: Annotated[Text, AfterValidator(_stream)] | None = None
    """The JetStream stream that captures these subjects, checked when the sink opens; not a template.
    Without it, messages go only to current subscribers, and nothing is stored (core NATS).
    """
    send_timeout_secs: Seconds = 5.0
    """How long the server may neither accept nor send a byte."""
    batch_timeout_secs: Seconds = 30.0
    """How long it may take until a block of at most 2,000 messages is acknowledged."""
    connect_timeout_secs: Seconds = 10.0
    """The timeout of one connection attempt."""
    credentials_file: Text | None = None
    """A file with a user's JWT and key (`nsc generate creds`). It takes precedence over `username`, that
    over `token`, and that over the login in `url`.
    """
    username: Text | None = None
    """The user's name; needs `password`."""
    password: SecretStr | None = None
    """The user's password; needs `username`."""
    token: SecretStr | None = None
    """Authentication token."""
    exactly_once: bool = False
    """Whether the sink stores its own position in a header of the messages, `df-position`, so that every
    change arrives exactly once; needs a stream, and subjects that nobody else writes to
    ([guarantees](guarantees.md#nats)).
    """

    @property
    def destination(self) -> str:
        """The template of where messages go."""
        return self.subject

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        for one in resolved(url.get_secret_value()).split(","):
            _check_encoded(one)
            try:
                parts = urlsplit(one.strip() if "://" in one else f"nats://{one.strip()}")
                rest = parts.path.strip("/") or parts.query or parts.fragment
                valid = parts.scheme in {"nats", "tls"} and parts.hostname and not rest
                valid = valid and parts.port != 0
            except ValueError:
                valid = False
            if not valid:
                raise ValueError(
                    "is not a list of NATS addresses (write nats://host:port,nats://host:port, or "
                    "tls:// for TLS, with special characters of a password percent-encoded)"
                )
        return url

    @field_validator("password", "token")
    @classmethod
    def _check_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            resolved(secret.get_secret_value())
        return secret

    @model_validator(mode="after")
    def _check_together(self) -> NatsConfig:
        if (self.username is None) != (self.password is None):
            raise ValueError("needs both `username` and `password`, or neither")
        if self.exactly_once and self.stream is None:
            raise ValueError(
                "exactly_once needs `stream`: core NATS stores nothing that could be read back"
            )
        return self

    @field_serializer("url")
    def _mask_url(self, url: SecretStr) -> str:
        return ",".join(
            mask(re.sub(r"//[^/@:]*@", "//***@", one)) for one in url.get_secret_value().split(",")
        )


class NatsSink(Block):
    """A NATS sink: each message goes to a subject, into a JetStream stream if one is given."""

    type: Literal["nats"]
    config: NatsConfig
    """How to publish to NATS."""


class FileConfig(SinkConfig):
    """How to write to files: one message per line."""

    path: TemplateText
    """Template of the file's path. The file and its directories are created if they are missing.
    Variables can choose a file only below the directory that the beginning of the template names.
    """

    @property
    def destination(self) -> str:
        """The template of where messages go."""
        return self.path


class FileSink(Block):
    """A file sink, for local use: it writes JSON lines."""

    type: Literal["file"]
    config: FileConfig
    """Where to write."""


Sink = Annotated[RedisSink | KafkaSink | NatsSink | FileSink, Field(discriminator="type")]
