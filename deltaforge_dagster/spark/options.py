"""The options of a write, and the sink that they configure.

The options of a format are the fields of that sink in a pipeline file, except those that need an
event (templates, envelopes, filters), and `job`, a name for the write. The entries of a mapping are written
with a dot: `client_conf.security.protocol`.

Spark shows options in plans, in its UI and in logs. So an option must not contain a secret, but `${NAME}`,
whose value comes from `register(spark, secrets={...})`, or from the environment of the
tasks. A literal password is rejected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deltaforge_dagster.config.blocks import NAME
from deltaforge_dagster.config.env import expand
from deltaforge_dagster.config.file.sentences import sentence
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks.base import SinkConfig
from deltaforge_dagster.config.sinks.sinks import KafkaConfig, NatsConfig, RedisConfig
from deltaforge_dagster.config.sinks.sinks import Sink as DeclaredSink
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.build import make_sink

JOB = "job"

_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_TOKEN = re.compile(r"//([^/@:]+)@")
_ANY_NAME = "destination"
_DECLARED: TypeAdapter[DeclaredSink] = TypeAdapter(DeclaredSink)


@dataclass(frozen=True, slots=True)
class Kind:
    """A sink type as a data source.

    Attributes:
        name: The sink's `type` in a pipeline file.
        config: The model of its fields.
        destination: The field for the destination of messages.
        without: Fields that are not available as options.
        null_values: Whether a message may have no value: a Kafka tombstone.
        always_named: Whether the destination is required even if each row has its own.
    """

    name: str
    config: type[SinkConfig]
    destination: str
    without: frozenset[str] = frozenset()
    null_values: bool = False
    always_named: bool = False

    @property
    def format(self) -> str:
        """Name for `df.write.format`."""
        return f"deltaforge_{self.name}"

    @property
    def fields(self) -> set[str]:
        """The names of its options, except `job`."""
        return set(self.config.model_fields) - set(SinkConfig.model_fields) - self.without


KINDS = (
    Kind("redis", RedisConfig, "stream"),
    Kind("kafka", KafkaConfig, "topic", frozenset(["tombstones"]), null_values=True),
    # Exactly once requires a single writer per subject, but partitions share subjects. A subject is required,
    # because the sink checks its stream with it.
    Kind("nats", NatsConfig, "subject", frozenset(["exactly_once"]), always_named=True),
)


def check(kind: Kind, options: Mapping[str, str]) -> None:
    """Check the options as far as possible before any task runs.

    Raises:
        SpecError: An option is unknown or contains a secret, or `job` is invalid.
    """
    problems = []
    for name, text in options.items():
        if name.partition(".")[0] not in {*kind.fields, JOB}:
            known = ", ".join(sorted({*kind.fields, JOB}))
            problems.append(f"option {name!r} is unknown; known are {known}")
        elif _holds_secret(name, text):
            problems.append(
                f"option {name!r} holds a secret, which Spark would show: write ${{NAME}} for it, and "
                "give its value to register(spark, secrets={...}) or to the tasks' environment"
            )
    if JOB in options and not NAME.fullmatch(options[JOB]):
        problems.append("option 'job' must be 1 to 100 letters, digits, `-`, `_` or `.`")
    if problems:
        raise SpecError(*(f"{kind.format}: {problem}" for problem in problems))


def _holds_secret(name: str, text: str) -> bool:
    literal = _REFERENCE.sub("", text)
    if SECRET_NAME.search(name):
        return bool(literal)
    literal = literal.replace(":@", "@")
    if name == "url" and any(_REFERENCE.sub("", token) for token in _TOKEN.findall(text)):
        return True  # NATS treats a user name without a password as a token
    return mask(literal) != literal


def sink(
    kind: Kind, options: Mapping[str, str], secrets: Mapping[str, str], job: str, partition: int
) -> Sink:
    """Return the sink for one partition of a job, not yet open.

    Raises:
        SpecError: An option is missing or invalid.
    """
    config: dict[str, Any] = {"id": f"partition-{partition}", kind.destination: _ANY_NAME}
    for name, text in options.items():
        if name == JOB:
            continue
        filled, _ = expand(text, {**os.environ, **secrets})
        field, dot, inner = name.partition(".")
        if dot:
            config.setdefault(field, {})[inner] = filled
        else:
            config[field] = filled
    try:
        # Options are always text, whatever the type of their field.
        declared = _DECLARED.validate_python({"type": kind.name, "config": config}, strict=False)
    except ValidationError as error:
        raise SpecError(
            *(
                f"{kind.format}: option {'.'.join(map(str, one['loc'][2:]))!r} {sentence(one)}"
                for one in error.errors()
            )
        ) from None
    if compile_template(config[kind.destination]).variables:
        raise SpecError(
            f"{kind.format}: option {kind.destination!r} has a variable, but rows are not events; "
            "give the rows a column `destination`"
        )
    return make_sink(declared, f"spark-{job}", brief=True)
