"""`config` of a Kafka sink in a pipeline file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    SecretStr,
    field_serializer,
    model_validator,
)

from deltaforge_dagster.config.blocks import (
    AlsoAccepts,
    Seconds,
    TemplateText,
    Text,
    environment_filled,
)
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks import MessageSinkConfig
from deltaforge_dagster.config.templates import compile_template

_BROKER = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@,\[\]]+)(?::(?P<port>\d{1,9}))?"
)


IS_TRUE = frozenset({"true", "t", "1"})
"""What librdkafka takes for true, in small letters."""
_IDEMPOTENT: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "acks": ("all", lambda text: text.lower() in {"all", "-1"}),
    "max.in.flight": ("at most 5", lambda text: not text.isdecimal() or int(text) <= 5),
    "retries": ("more than 0", lambda text: text != "0"),
}
"""What properties must be while the producer is idempotent, as librdkafka requires.

librdkafka itself names other mistakes in them.
"""
_ALIASES = {
    "request.required.acks": "acks",
    "max.in.flight.requests.per.connection": "max.in.flight",
    "message.send.max.retries": "retries",
}


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


class KafkaSinkConfig(MessageSinkConfig):
    """How to write to Kafka."""

    destination_field = "topic"
    takes_bytes = True

    brokers: Annotated[Text, AfterValidator(_brokers)]
    """`host:port,host:port`: some brokers of the cluster."""
    topic: Annotated[TemplateText, AfterValidator(_topic)]
    """Template of the topic's name.

    An event for which a variable cannot be resolved makes the sink fail until the file is changed.
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

    @model_validator(mode="after")
    def _check_idempotence(self) -> KafkaSinkConfig:
        conf = {name: value.get_secret_value() for name, value in self.client_conf.items()}
        idempotent = conf.get("enable.idempotence", "true").lower() in IS_TRUE
        if not idempotent and self.exactly_once:
            raise ValueError(
                "client_conf.enable.idempotence: must be true with `exactly_once` (leave it out)"
            )
        for name, text in conf.items() if idempotent else ():
            must, fits = _IDEMPOTENT.get(_ALIASES.get(name, name), ("", bool))
            if must and not fits(text):
                instead = (
                    "the order of messages needs it"
                    if self.exactly_once
                    else (
                        "or set `enable.idempotence: false` beside it, "
                        "if brokers may lose or reorder messages"
                    )
                )
                raise ValueError(f"client_conf.{name}: must be {must} (leave it out; {instead})")
        return self

    @field_serializer("client_conf")
    def _mask_client_conf(self, conf: Mapping[str, SecretStr]) -> dict[str, str]:
        return {
            name: "***" if SECRET_NAME.search(name) else mask(value.get_secret_value())
            for name, value in conf.items()
        }
