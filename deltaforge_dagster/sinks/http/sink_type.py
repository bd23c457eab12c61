"""The HTTP sink as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.sinks import AvroEncoding, CloudEventsEnvelope
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.registry import (
    MessageSinkType,
    SinkContext,
    connect_seconds,
    not_known,
)
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # it has a client library
    from deltaforge_dagster.sinks.http.sink import HttpSink
import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from deltaforge_dagster.config.blocks import (
    Block,
    Count,
    FilledSecret,
    Seconds,
    TemplateText,
    Text,
    template,
)
from deltaforge_dagster.config.sinks import MessageSinkConfig

TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - the token of RFC 9110
"""Matches methods and names of headers (RFC 9110, "Tokens")."""

VALUE = re.compile(r"(?:[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)?")
"""Matches what a header can hold unchanged.

That is text without control characters, and without blanks around it.
"""

_FRAMING = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
OWN = frozenset({"idempotency-key", "df-key", "df-replay"})
"""Headers that the sink sets, in lower case."""

RESERVED = _FRAMING | OWN
"""Headers that neither a file nor a change may set, in lower case.

The sink or its client sets them.
"""

_HeaderName = Annotated[str, Field(pattern=f"^{TOKEN}$")]

_BATCH_LIMITS = frozenset({"batch_max_events", "batch_max_bytes"})


def _url(text: str) -> str:
    first, *rest = compile_template(text).parts
    wanted = "is not a URL that starts with http:// or https:// and a host"
    if not isinstance(first, str) or not first.startswith(("http://", "https://")):
        raise ValueError(wanted)
    filled = "".join([first, *(part if isinstance(part, str) else "x" for part in rest)])
    try:
        parts = urlsplit(filled)
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or re.search(r"[^!-~]", filled):
        raise ValueError(f"{wanted} (special characters percent-encoded)")
    if "@" in parts.netloc:
        raise ValueError("holds a user or a password (send them in a header: `authorization`)")
    if parts.fragment:
        raise ValueError("has a part after `#`, which is never sent")
    return text


class HttpTls(Block):
    """How to verify the server, and to identify the client."""

    ca_file: Text | None = None
    """A file of certificates, PEM, of the authorities to trust instead of the usual ones."""
    certificate_file: Text | None = None
    """A file with the client's certificate and the chain above it, PEM."""
    key_file: Text | None = None
    """A file with the certificate's private key, PEM, if `certificate_file` does not hold it."""
    insecure_skip_verify: bool = False
    """Accept any certificate.

    Whoever is between this machine and the server can then read and change everything.
    """

    @model_validator(mode="after")
    def _check_key(self) -> HttpTls:
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file needs `certificate_file`")
        return self


class HttpSinkConfig(MessageSinkConfig):
    """How to call an HTTP endpoint."""

    destination_field: ClassVar[str] = "url"
    destination_is_url: ClassVar[bool] = True
    takes_bytes: ClassVar[bool] = True

    url: Annotated[TemplateText, AfterValidator(_url)]
    """Template of the URL.

    Values of variables are percent-encoded. Where it is shown, everything in it is shown: a secret
    belongs into a header.
    """
    method: Annotated[str, Field(pattern=f"^{TOKEN}$")] = "POST"
    """The method of the requests."""
    headers: Mapping[str, SecretStr] = {}
    """Headers of every request.

    Values are templates; an unresolved variable becomes empty text. A header of the change itself
    (`additional_headers` of an outbox) takes precedence.
    """
    batch_mode: bool = False
    """Whether a request holds many messages.

    Those of a request are consecutive and have the same URL and headers.
    """
    batch_format: Literal["array", "ndjson"] = "array"
    """The body of a request in batch mode: a JSON array, or one message per line
    (`application/x-ndjson`).
    """
    batch_max_events: Count = 500
    """The most messages of a request in batch mode."""
    batch_max_bytes: Count = 1_048_576
    """The largest body of a request in batch mode; only a single change may be larger."""
    max_in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    """How many requests may be under way at once. Those of one key never are
    ([guarantees](guarantees.md#http)).
    """
    signature_secret: FilledSecret | None = None
    """The secret with which requests are signed ([HTTP](http.md#signatures)).

    Without it they are not.
    """
    signature_header: _HeaderName = "deltaforge-signature"
    """Name of the header with the signature."""
    send_timeout_secs: Seconds = 10.0
    """How long a request may take until its response."""
    batch_timeout_secs: Seconds = 30.0
    """The same in batch mode."""
    connect_timeout_secs: Seconds = 5.0
    """The timeout of one connection attempt."""
    tls: HttpTls | None = None
    """How `https://` servers are verified; by default, with the authorities that Python's `certifi`
    knows, or those of `SSL_CERT_FILE`.
    """
    allow_private: bool | None = None
    """Whether the server may have a private, loopback or link-local address; checked for the
    address of each connection. By default a pipeline of a file may call any address, and one that
    was created by the REST API only public ones.
    """

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
        names = [name.lower() for name in headers]
        for name, secret in headers.items():
            text = secret.get_secret_value()
            if not re.fullmatch(TOKEN, name):
                raise ValueError(f"holds {name!r}, which is not the name of a header")
            if name.lower() in RESERVED:
                raise ValueError(f"holds {name}, which the sink sets itself")
            if names.count(name.lower()) > 1:
                raise ValueError(f"holds {name} twice")
            if not text:
                continue
            try:
                template(text)
            except ValueError as error:
                # The text of a template's own errors may quote the value, which is a secret.
                reason = str(error) if "environment variable" in str(error) else "is no template"
                raise ValueError(f"{name} {reason}") from None
            literal = "".join(
                part if isinstance(part, str) else "x" for part in compile_template(text).parts
            )
            if not VALUE.fullmatch(literal):
                raise ValueError(f"{name} has control characters, or blanks around its value")
        return headers

    @model_validator(mode="after")
    def _check_signature(self) -> HttpSinkConfig:
        name = self.signature_header.lower()
        if name in RESERVED or name in {header.lower() for header in self.headers}:
            raise ValueError(f"signature_header is {name}, which is another header")
        return self

    @model_validator(mode="after")
    def _check_avro(self) -> HttpSinkConfig:
        if isinstance(self.encoding, AvroEncoding):
            if self.batch_mode:
                raise ValueError(
                    "encoding avro: a request holds one message (write batch_mode: false)"
                )
            if self.encoding.subject_strategy != "record_name":
                raise ValueError(
                    "encoding avro: a URL is no topic (write subject_strategy: record_name)"
                )
        return self

    @property
    def header_templates(self) -> Mapping[str, str]:
        """Those of `headers` that depend on the change."""
        return {name: text for name, text in self._texts() if compile_template(text).variables}

    @property
    def static_headers(self) -> Mapping[str, str]:
        """Those of `headers` that every request has."""
        return {name: text for name, text in self._texts() if not compile_template(text).variables}

    def _texts(self) -> list[tuple[str, str]]:
        return [(name, secret.get_secret_value()) for name, secret in self.headers.items()]


class HttpSinkType(MessageSinkType[HttpSinkConfig]):
    """HTTP endpoints: webhooks, and everything that accepts JSON or Avro."""

    name = "http"
    sample: Mapping[str, Any] = {"url": "{{ env.WEBHOOK_URL }}"}
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
