"""The options of a write, and the sink that they configure.

The options of a format are the fields of that sink in a pipeline file, except those that need an
event (templates, envelopes, filters), and `job`, a name for the write. The entries of a mapping are
written with a dot: `client_conf.security.protocol`.

Spark shows options in plans, in its UI and in logs. So an option must not contain a secret itself,
only `${NAME}`, whose value comes from `register(spark, secrets={...})`, or from the environment of
the tasks. A literal password is rejected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deltaforge_dagster.config.blocks import NAME, sentence
from deltaforge_dagster.config.env import expand
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks import MessageSinkConfig
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.registry import (
    MessageSinkType,
    SinkContext,
    SparkOptions,
    message_sink_types,
)

JOB = "job"

_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_TOKEN = re.compile(r"//([^/@:]+)@")
_ANY_NAME = "destination"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of sink as a data source.

    Attributes:
        type: The kind.
        spark: How it differs as a data source.
    """

    type: MessageSinkType[Any]
    spark: SparkOptions

    @property
    def format(self) -> str:
        """Name for `df.write.format`."""
        return f"deltaforge_{self.type.name}"

    @property
    def destination(self) -> str:
        """The option for the destination of messages."""
        return str(self.type.config.destination_field)

    @property
    def fields(self) -> set[str]:
        """The names of its options, except `job`."""
        fields = set(self.type.config.model_fields) - set(MessageSinkConfig.model_fields)
        return fields - self.spark.without


KINDS = tuple(
    Kind(sink_type, sink_type.spark)
    for sink_type in message_sink_types().values()
    if sink_type.spark is not None
)


def check(kind: Kind, options: Mapping[str, str]) -> None:
    """Check the options as far as possible before any task runs.

    Raises:
        SpecError: An option is unknown or contains a secret, or `job` is invalid.
    """
    problems = []
    for name, text in options.items():
        if name.partition(".")[0] not in {*kind.fields, JOB}:
            names = ", ".join(sorted({*kind.fields, JOB}))
            problems.append(f"option {name!r} is unknown; known are {names}")
        elif _holds_secret(kind, name, text):
            problems.append(
                f"option {name!r} holds a secret, which Spark would show: write ${{NAME}} for it, "
                "and give its value to register(spark, secrets={...}) or to the tasks' environment"
            )
    if JOB in options and not NAME.fullmatch(options[JOB]):
        problems.append("option 'job' must be 1 to 100 letters, digits, `-`, `_` or `.`")
    if problems:
        raise SpecError(*(f"{kind.format}: {problem}" for problem in problems))


def _holds_secret(kind: Kind, name: str, text: str) -> bool:
    literal = _REFERENCE.sub("", text)
    if SECRET_NAME.search(name):
        return bool(literal)
    literal = literal.replace(":@", "@")
    if name in kind.spark.tokens and any(
        _REFERENCE.sub("", token) for token in _TOKEN.findall(text)
    ):
        return True
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
        declared = kind.type.config.model_validate(config, strict=False)
    except ValidationError as error:
        raise SpecError(
            *(
                f"{kind.format}: option {'.'.join(map(str, detail['loc']))!r} {sentence(detail)}"
                for detail in error.errors()
            )
        ) from None
    if compile_template(config[kind.destination]).variables:
        raise SpecError(
            f"{kind.format}: option {kind.destination!r} has a variable, but rows are not events; "
            "give the rows a column `destination`"
        )
    return kind.type.build(declared, SinkContext(f"spark-{job}", brief=True))
