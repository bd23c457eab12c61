"""`config` of a NATS sink in a pipeline file."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr, field_serializer, field_validator, model_validator

from deltaforge_dagster.config.blocks import FilledSecret, Seconds, TemplateText, Text, resolved
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sinks import MessageSinkConfig, check_address
from deltaforge_dagster.config.templates import compile_template


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
