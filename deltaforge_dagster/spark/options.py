"""Options of a write, and the sink they describe.

The options of a format are the fields of that sink in a pipeline file, without those that need an
event (templates, envelopes, filters), and `job`, a name for the write. A mapping is written with a
dot: `client_conf.security.protocol`.

Spark shows options in plans, in its UI and in logs. So a secret is never written into one: `${NAME}`
stands for it, and its value comes from `register(spark, secrets={...})`, or from the environment of the
tasks. A literal password is refused.
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
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sentences import sentence
from deltaforge_dagster.config.sink_config import SinkConfig
from deltaforge_dagster.config.sinks import KafkaConfig, NatsConfig, RedisConfig
from deltaforge_dagster.config.sinks import Sink as DeclaredSink
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
    """A kind of sink as a data source.

    Attributes:
        name: As `type` has it in a pipeline file.
        config: Model of its fields.
        destination: The field that says where messages go.
        without: Fields that are no options.
        null_values: Whether a message may have no value: a tombstone of Kafka.
        always_named: Whether the destination is given also when each row has its own.
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
        """Names of its options, without `job`."""
        return set(self.config.model_fields) - set(SinkConfig.model_fields) - self.without


KINDS = (
    Kind("redis", RedisConfig, "stream"),
    Kind("kafka", KafkaConfig, "topic", frozenset(["tombstones"]), null_values=True),
    # Exactly once a sink is alone on its subjects; partitions are not. A stream is asked for a subject.
    Kind("nats", NatsConfig, "subject", frozenset(["exactly_once"]), always_named=True),
)


def check(kind: Kind, options: Mapping[str, str]) -> None:
    """Check what can be checked before any task runs.

    Raises:
        SpecError: An option is unknown, or holds a secret.
    """
    problems = []
    for name, text in options.items():
        if name.partition(".")[0] not in {*kind.fields, JOB}:
            known = ", ".join(sorted({*kind.fields, JOB}))
            problems.append(f"option {name!r} is unknown; there are {known}")
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
        return True  # NATS takes a name without a password for a token
    return mask(literal) != literal


def sink(
    kind: Kind, options: Mapping[str, str], secrets: Mapping[str, str], job: str, partition: int
) -> Sink:
    """Return the sink of one partition of a job, not open.

    Raises:
        SpecError: An option is missing or wrong.
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
        # Options are text, whatever their field is.
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
            f"{kind.format}: option {kind.destination!r} has a variable, but rows are no events; "
            "give the rows a column `destination`"
        )
    return make_sink(declared, f"spark-{job}", brief=True)
