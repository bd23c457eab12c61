"""The HTTP sink as a kind of sink."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deltaforge_dagster.config.sinks import AvroEncoding, CloudEventsEnvelope
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.http.config import HttpSinkConfig, HttpTls
from deltaforge_dagster.sinks.preflight import connect_seconds, not_known
from deltaforge_dagster.sinks.registry import MessageSinkType, SinkContext
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # it has a client library
    from deltaforge_dagster.sinks.http.sink import HttpSink

_BATCH_LIMITS = frozenset({"batch_max_events", "batch_max_bytes"})


class HttpSinkType(MessageSinkType[HttpSinkConfig]):
    """HTTP endpoints: webhooks, and everything that accepts JSON or Avro."""

    name = "http"
    summary = "An HTTP sink: each message, or a batch of messages, is a request."
    config = HttpSinkConfig
    destinations = "URLs"
    default_key = "row"
    where = frozenset({"url", "method"})
    form = frozenset({"headers", "batch_mode", "batch_format", "signature_header"})
    timing = _BATCH_LIMITS | {
        "max_in_flight",
        "send_timeout_secs",
        "batch_timeout_secs",
        "connect_timeout_secs",
    }
    spark = None

    def build(self, config: HttpSinkConfig, context: SinkContext) -> HttpSink:
        """Return a sink, not yet open."""
        from deltaforge_dagster.sinks.http.client import ClientSettings, TlsFiles  # noqa: PLC0415
        from deltaforge_dagster.sinks.http.requests import RequestForm  # noqa: PLC0415
        from deltaforge_dagster.sinks.http.sink import HttpSink  # noqa: PLC0415 - client library

        tls, secret = config.tls or HttpTls(), config.signature_secret
        allowed = config.allow_private
        form = RequestForm(
            content_type=_content_type(config),
            headers=config.static_headers,
            signature_header=config.signature_header.lower(),
            batch=config.batch_mode,
            array=config.batch_format == "array",
            max_events=config.batch_max_events,
            max_bytes=config.batch_max_bytes,
            keyed=config.max_in_flight > 1,
            row_keys=config.key is None,
        )
        settings = ClientSettings(
            method=config.method,
            connect_timeout=config.connect_timeout_secs,
            timeout=config.batch_timeout_secs if config.batch_mode else config.send_timeout_secs,
            connections=config.max_in_flight,
            tls=TlsFiles(tls.ca_file, tls.certificate_file, tls.key_file, tls.insecure_skip_verify),
            allow_private=not context.posted if allowed is None else allowed,
            signature_header=config.signature_header,
            secret=None if secret is None else secret.get_secret_value(),
        )
        return HttpSink(config.id, form, settings)

    def traffic(self, config: HttpSinkConfig) -> frozenset[str]:  # noqa: ARG002
        """Return `retries`: requests are repeated after transient failures."""
        return frozenset({"retries"})

    def preflight(
        self,
        config: HttpSinkConfig,
        context: SinkContext,
        names: Sequence[str],  # noqa: ARG002 - requests to them would be deliveries
    ) -> list[Finding]:
        """Connect to the server, with TLS if the URL says so; no request is made."""
        subject = f"sink {config.id}"
        first = compile_template(config.url).parts[0]
        assert isinstance(first, str)
        if "/" not in first.partition("://")[2] and first != config.url:
            return [not_known(subject, "URLs", [config.url], "can be reached")]
        seconds = connect_seconds(config.connect_timeout_secs)
        sink = self.build(config.model_copy(update={"connect_timeout_secs": seconds}), context)
        with contextlib.closing(sink):
            sink.open()
            proved = sink.reach(first)
        server = "/".join(first.split("/")[:3])
        text = f"{server} answers{', and its certificate is trusted' if proved else ''}"
        open_question = "whether it accepts changes only a request would show, and none was made"
        return [Finding(subject, "ok", text), Finding(subject, "note", open_question)]


def _content_type(config: HttpSinkConfig) -> str:
    """Return the media type of requests.

    See CloudEvents - HTTP Protocol Binding 1.0.2, "HTTP Content Mode".
    """
    if config.batch_mode and config.batch_format == "ndjson":
        return "application/x-ndjson"
    if isinstance(config.encoding, AvroEncoding):
        return "application/avro"
    if isinstance(config.envelope, CloudEventsEnvelope):
        kind = "cloudevents-batch" if config.batch_mode else "cloudevents"
        return f"application/{kind}+json"
    return "application/json"


HTTP = HttpSinkType()
