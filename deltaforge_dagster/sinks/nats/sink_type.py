"""The NATS sink as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deltaforge_dagster.config.owned import CapturedTables, OwnedResource, server_place
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.registry import (
    MessageSinkType,
    SinkContext,
    SparkOptions,
    connect_seconds,
)
from deltaforge_dagster.sources.findings import Finding, listed

if TYPE_CHECKING:  # it has kernels
    from deltaforge_dagster.sinks.nats.sink import NatsSink
import re
from typing import Annotated

from pydantic import AfterValidator, SecretStr, field_serializer, field_validator, model_validator

from deltaforge_dagster.config.blocks import FilledSecret, Seconds, TemplateText, Text, resolved
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sinks import MessageSinkConfig, check_address


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


class NatsSinkConfig(MessageSinkConfig):
    """How to publish to NATS."""

    destination_field = "subject"
    takes_bytes = True

    url: SecretStr
    """`nats://host:port,nats://host:port`, or `tls://` to require TLS (it is also used if the
    server requires it). The first server that answers is used.
    """
    subject: Annotated[TemplateText, AfterValidator(_subject)]
    """Template of the subject.

    A subject that is empty, or has blanks, `*`, `>` or empty tokens, makes its message
    undeliverable.
    """
    stream: Annotated[Text, AfterValidator(_stream)] | None = None
    """The JetStream stream that captures these subjects, checked when the sink opens; not a
    template. Without it, messages go only to current subscribers, and nothing is stored (core
    NATS).
    """
    send_timeout_secs: Seconds = 5.0
    """How long the server may go without accepting or sending a byte."""
    batch_timeout_secs: Seconds = 30.0
    """How long it may take until a block of at most 2,000 messages is acknowledged."""
    connect_timeout_secs: Seconds = 10.0
    """The timeout of one connection attempt."""
    credentials_file: Text | None = None
    """A file with a user's JWT and key (`nsc generate creds`).

    It takes precedence over `username`, that over `token`, and that over the login in `url`.
    """
    username: Text | None = None
    """The user's name; needs `password`."""
    password: FilledSecret | None = None
    """The user's password; needs `username`."""
    token: FilledSecret | None = None
    """Authentication token."""
    exactly_once: bool = False
    """Whether the sink stores its own position in a header of the messages, `df-position`, so that
    every change arrives exactly once; needs a stream, and subjects that nobody else writes to
    ([guarantees](guarantees.md#nats)).
    """

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        for address in resolved(url.get_secret_value()).split(","):
            check_address(address)
            try:
                parts = urlsplit(
                    address.strip() if "://" in address else f"nats://{address.strip()}"
                )
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

    @model_validator(mode="after")
    def _check_together(self) -> NatsSinkConfig:
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
            mask(re.sub(r"//[^/@:]*@", "//***@", address))
            for address in url.get_secret_value().split(",")
        )


class NatsSinkType(MessageSinkType[NatsSinkConfig]):
    """Subjects of a NATS system, with or without a JetStream stream."""

    name = "nats"
    sample: Mapping[str, Any] = {"url": "{{ env.NATS_URL }}", "subject": "NAME.${source.table}"}
    summary = (
        "A NATS sink: each message goes to a subject, into a JetStream stream if one is given."
    )
    config = NatsSinkConfig
    destinations = "subjects"
    default_key = "none"
    where = frozenset({"url", "subject", "stream"})
    timing = frozenset({"send_timeout_secs", "batch_timeout_secs", "connect_timeout_secs"})
    # Exactly once requires a single writer per subject, but partitions share subjects. A subject is
    # required, because the sink checks its stream with it.
    spark = SparkOptions(
        without=frozenset({"exactly_once"}), always_named=True, tokens=frozenset({"url"})
    )

    def build(self, config: NatsSinkConfig, context: SinkContext) -> NatsSink:
        """Return a sink, not yet open.

        Raises:
            SpecError: The URL is invalid.
        """
        from deltaforge_dagster.sinks.nats.link import Login  # noqa: PLC0415 - has kernels
        from deltaforge_dagster.sinks.nats.sink import (  # noqa: PLC0415 - has kernels
            NatsSink,
            subject_pattern,
        )

        login = Login(
            config.credentials_file,
            config.username,
            None if config.password is None else config.password.get_secret_value(),
            None if config.token is None else config.token.get_secret_value(),
        )
        return NatsSink(
            config.id,
            config.url.get_secret_value(),
            subject_pattern(compile_template(config.subject)),
            login,
            stream=config.stream,
            exactly_once=config.exactly_once,
            name=f"deltaforge:{context.pipeline}:{config.id}",
            timeouts=SinkTimeouts(
                config.connect_timeout_secs, config.send_timeout_secs, config.batch_timeout_secs
            ),
        )

    def exactly_once(self, config: NatsSinkConfig) -> bool:
        """Return whether the sink keeps its position in a header of the messages."""
        return config.exactly_once

    def preflight(
        self, config: NatsSinkConfig, context: SinkContext, names: Sequence[str]
    ) -> list[Finding]:
        """Check that a server answers, and that the user may publish, if the server tells."""
        seconds = connect_seconds(config.connect_timeout_secs)
        sink = self.build(config.model_copy(update={"connect_timeout_secs": seconds}), context)
        with contextlib.closing(sink):
            sink.open()
            return [_answers(config), *_rights(f"sink {config.id}", sink, names)]

    def names(self, config: NatsSinkConfig, pipeline: str) -> Mapping[str, str]:  # noqa: ARG002
        """Return the stream that captures the subjects."""
        return {} if config.stream is None else {"stream": config.stream}

    def owned(
        self,
        config: NatsSinkConfig,
        pipeline: str,  # noqa: ARG002
        tables: CapturedTables,  # noqa: ARG002
    ) -> Sequence[OwnedResource]:
        """Return the subjects of a sink that delivers exactly once.

        Its position is the last message of them.
        """
        if not config.exactly_once:
            return ()
        urls = config.url.get_secret_value().split(",")
        addresses = [urlsplit(url.strip() if "://" in url else f"//{url.strip()}") for url in urls]
        servers = ",".join(
            sorted(server_place(address.hostname, address.port or 4222) for address in addresses)
        )
        parts = compile_template(config.subject).parts
        subjects = "".join(part if isinstance(part, str) else "*" for part in parts)
        what = f"the last message of stream {config.stream} with subject"
        return [OwnedResource(what, (servers,), subjects, "subject")]

    def warm(self) -> None:
        """Compile the kernels that pack messages and read answers."""
        from deltaforge_dagster.sinks.nats import answers, pack  # noqa: PLC0415 - have kernels

        pack.warm()
        answers.warm()


def _answers(config: NatsSinkConfig) -> Finding:
    """Return the finding that a server answers, without the user's name or password."""
    from deltaforge_dagster.sinks.nats.link import addresses  # noqa: PLC0415 - has kernels

    servers = ", ".join(map(str, addresses(config.id, config.url.get_secret_value())))
    text = f"{servers} answers; without `stream` nothing is stored there"
    if config.stream is not None:
        text = f"{servers} answers; stream {config.stream!r} takes {config.subject!r}"
    return Finding(f"sink {config.id}", "ok", text)


def _rights(subject: str, sink: NatsSink, names: Sequence[str]) -> list[Finding]:
    """Return the findings on whether the user may publish to subjects, if the server tells."""
    from deltaforge_dagster.sinks.nats.sink import subject_pattern  # noqa: PLC0415 - has kernels
    from deltaforge_dagster.sinks.nats.stream import USER_INFO  # noqa: PLC0415 - has kernels

    rights = sink.rights()
    if rights is None:
        text = f"whether the NATS user may publish {listed(names)} only a message would show"
        remedy = f"let the user publish to {USER_INFO}, then the server tells"
        return [Finding(subject, "note", text, remedy)]
    patterns = {name: subject_pattern(compile_template(name)) for name in names}
    shares = {name: rights.of(pattern) for name, pattern in patterns.items()}
    none = [name for name, share in shares.items() if share == "none"]
    some = [name for name, share in shares.items() if share == "some"]
    report = []
    if none:
        text = f"the NATS user may not publish to {listed(none)}"
        remedy = f"allow it to publish to {listed([patterns[name] for name in none])}"
        report.append(Finding(subject, "error", text, remedy))
    if some:
        text = f"the NATS user may publish to some subjects of {listed(some)} only"
        remedy = f"allow it to publish to {listed([patterns[name] for name in some])}"
        report.append(Finding(subject, "warning", text, remedy))
    if not report:
        report.append(Finding(subject, "ok", f"the NATS user may publish to {listed(names)}"))
    return report


NATS = NatsSinkType()
