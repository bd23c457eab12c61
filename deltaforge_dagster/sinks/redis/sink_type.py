"""The Redis sink as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.owned import CapturedTables, OwnedResource
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.registry import (
    MessageSinkType,
    SinkContext,
    connect_seconds,
    not_known,
)
from deltaforge_dagster.sources.findings import Finding, listed

if TYPE_CHECKING:  # it has kernels
    from deltaforge_dagster.sinks.redis.sink import RedisSink
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


_WEEK = 7 * 24 * 3600  # how long positions of Spark jobs are kept (docs/spark.md)


class RedisSinkType(MessageSinkType[RedisSinkConfig]):
    """Streams of a Redis server or cluster."""

    name = "redis"
    sample: Mapping[str, Any] = {"uri": "{{ env.REDIS_URI }}", "stream": "NAME.${source.table}"}
    summary = "A Redis sink: each message is an entry of a stream."
    config = RedisSinkConfig
    destinations = "streams"
    where = frozenset({"uri", "stream"})
    form = frozenset({"event_field"})
    timing = frozenset({"send_timeout_secs", "batch_timeout_secs", "connect_timeout_secs"})

    def build(self, config: RedisSinkConfig, context: SinkContext) -> RedisSink:
        """Return a sink, not yet open.

        For a brief job its position expires after a week, and its connections have no name.

        Raises:
            SpecError: The URI is invalid, or a cluster's streams need not be in one slot.
        """
        from deltaforge_dagster.sinks.redis.cluster import common_tag  # noqa: PLC0415 - has kernels
        from deltaforge_dagster.sinks.redis.sink import RedisSink  # noqa: PLC0415 - has kernels

        pipeline = context.pipeline
        return RedisSink(
            config.id,
            config.uri.get_secret_value(),
            timeouts=SinkTimeouts(
                config.connect_timeout_secs, config.send_timeout_secs, config.batch_timeout_secs
            ),
            position_key=_position_key(pipeline, config.id) if config.exactly_once else None,
            hash_tag=common_tag(compile_template(config.stream)),
            event_field=config.event_field,
            position_seconds=_WEEK if context.brief else None,
            name=None if context.brief else f"deltaforge:{pipeline}:{config.id}",
        )

    def exactly_once(self, config: RedisSinkConfig) -> bool:
        """Return whether the sink keeps its position in a key."""
        return config.exactly_once

    def preflight(
        self, config: RedisSinkConfig, context: SinkContext, names: Sequence[str]
    ) -> list[Finding]:
        """Check that the server answers, and the user may write the streams that the file names."""
        subject = f"sink {config.id}"
        seconds = connect_seconds(config.connect_timeout_secs)
        sink = self.build(config.model_copy(update={"connect_timeout_secs": seconds}), context)
        address = config.uri.get_secret_value().rpartition("@")[2].rpartition("://")[2]
        streams = [name for name in names if not compile_template(name).variables]
        with contextlib.closing(sink):
            sink.open()
            report = [Finding(subject, "ok", f"redis at {address.partition('?')[0]} answers")]
            sink.rehearse(streams)
        if streams:
            report.append(Finding(subject, "ok", f"the Redis user may write {listed(streams)}"))
        if len(streams) < len(names):
            unknown = set(names) - set(streams)
            report.append(not_known(subject, "streams", unknown, "may be written"))
        return report

    def names(self, config: RedisSinkConfig, pipeline: str) -> Mapping[str, str]:
        """Return the key of the sink's position."""
        return {"position key": _position_key(pipeline, config.id)} if config.exactly_once else {}

    def owned(
        self,
        config: RedisSinkConfig,
        pipeline: str,
        tables: CapturedTables,  # noqa: ARG002
    ) -> Sequence[OwnedResource]:
        """Return the key of the sink's position."""
        address = config.uri.get_secret_value().rpartition("@")[2].rpartition("://")[2]
        return OwnedResource.of_pipeline(self.names(config, pipeline), address.partition("?")[0])

    def warm(self) -> None:
        """Compile the kernels that pack commands and read replies."""
        from deltaforge_dagster.sinks.redis import resp  # noqa: PLC0415 - kernels

        resp.warm()


def _position_key(pipeline: str, sink_id: str) -> str:
    return f"deltaforge:position:{pipeline}:{sink_id}"


REDIS = RedisSinkType()
