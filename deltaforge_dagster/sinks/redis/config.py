"""`config` of a Redis sink in a pipeline file."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import SecretStr, field_serializer, field_validator

from deltaforge_dagster.config.blocks import Seconds, TemplateText, resolved
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sinks import MessageSinkConfig, check_address

_REDIS_SCHEMES = frozenset(
    ["unix", *(f"redis{tls}+{kind}" for tls in ("", "s") for kind in ("sentinel", "cluster"))]
)
"""Schemes whose addresses are checked when the sink is created.

URLs of other schemes name one host.
"""


class RedisSinkConfig(MessageSinkConfig):
    """How to write to Redis."""

    destination_field = "stream"
    takes_bytes = True

    uri: SecretStr
    """`redis://user:password@host:port/database`, `rediss://` with TLS, `unix://`,
    `redis+sentinel://host:port,host:port/service/database`, or
    `redis+cluster://host:port,host:port` (one node of a cluster can also be `redis://`).
    """
    stream: TemplateText
    """Template of the stream's name.

    An event for which a variable cannot be resolved makes the sink fail until the file is changed.
    """
    send_timeout_secs: Seconds = 5.0
    """How long the server may go without accepting or sending a byte."""
    batch_timeout_secs: Seconds = 30.0
    """How long it may take until a block of at most 5,000 entries is acknowledged."""
    connect_timeout_secs: Seconds = 10.0
    """The timeout of one connection attempt."""
    exactly_once: bool = False
    """Whether the sink also stores its own position, so that every change arrives exactly once
    ([guarantees](guarantees.md#exactly-once)). Redis keeps it in the key
    `deltaforge:position:<pipeline>:<sink>`; the user additionally needs `+watch +unwatch +get +set`
    and access to that key. In a cluster, all streams must be in one hash slot.
    """
    event_field: Literal["df-event", "event"] = "df-event"
    """Name of the field that holds the message. `event` is also the entry's first field, as
    DeltaForge's sample consumers expect: they read it by name or as the first value.
    """

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: SecretStr) -> SecretStr:
        text = resolved(uri.get_secret_value())
        check_address(text)
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
