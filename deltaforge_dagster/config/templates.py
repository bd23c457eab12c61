"""Routing templates: `${path}` in a stream name, a file path or a message key.

A template is literal text with variables in it. A variable is a dotted path into the native event,
of one to three segments: `${source.table}`, `${op}`, `${after.customer_id}`. In addition,
`${key.id}` is a column of the row's primary key, which inserts, updates and deletes all have.
Templates are compiled when the pipeline file is loaded; variables are resolved for each event when
messages are encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltaforge_dagster.errors import SpecError

MAX_DEPTH = 3

EVENT_FIELDS = frozenset(
    [
        "before",
        "after",
        "source",
        "op",
        "ts_ms",
        "transaction",
        "event_id",
        "tenant_id",
        "schema_version",
        "schema_sequence",
        "ddl",
        "trace_id",
        "tags",
        "synthetic",
        "tx_end",
    ]
)
"""Top-level keys of the native event."""

KEY = "key"
"""First segment of variables for the row's primary key."""

SOURCE_FIELDS = frozenset(
    [
        "version",
        "connector",
        "name",
        "ts_ms",
        "db",
        "schema",
        "table",
        "snapshot",
        "server_id",
        "gtid",
        "file",
        "pos",
        "row",
        "lsn",
        "txId",
        "xmin",
        "sequence",
    ]
)
"""Keys of the native event's `source`, for all source types together."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A path into the event: `("after", "id")` for `${after.id}`."""

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled template.

    Attributes:
        text: The template as written.
        parts: Literals and variables, in order; never two adjacent literals.
    """

    text: str
    parts: tuple[str | Variable, ...]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables in order of appearance; empty when every event gives the same text."""
        return tuple(part for part in self.parts if isinstance(part, Variable))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a template's text with the variables in `values`, which maps dotted paths, replaced.

    Other variables stay as they are.
    """
    parts = []
    for part in compile_template(text).parts:
        path = ".".join(part.path) if isinstance(part, Variable) else None
        parts.append(str(part) if path is None else values.get(path, f"${{{path}}}"))
    return "".join(parts)


def unknown_variable(template: Template) -> str | None:
    """Return the first variable that no event can resolve, such as `source.tabel`, or None."""
    for variable in template.variables:
        first, *rest = variable.path
        if first not in EVENT_FIELDS | {KEY} or (
            first == "source" and not SOURCE_FIELDS.issuperset(rest)
        ):
            return ".".join(variable.path)
    return None


def compile_template(text: str) -> Template:
    """Return the compiled form of `text`.

    Raises:
        SpecError: A variable is not closed, empty, or deeper than three segments. Positions in
            the message count characters from 0.
    """
    parts: list[str | Variable] = []
    at = 0
    while (start := text.find("${", at)) >= 0:
        end = text.find("}", start)
        if end < 0:
            raise SpecError(f"unclosed '${{' at position {start} in template: {text}")
        if start > at:
            parts.append(text[at:start])
        parts.append(_variable(text[start + 2 : end], start, text))
        at = end + 1
    if at < len(text):
        parts.append(text[at:])
    return Template(text, tuple(parts))


def _variable(path: str, position: int, text: str) -> Variable:
    if not path.strip():
        raise SpecError(f"empty variable '${{}}' at position {position} in template: {text}")
    segments = tuple(path.split("."))
    if len(segments) > MAX_DEPTH:
        raise SpecError(f"path '{path}' exceeds max depth of 3 segments in template: {text}")
    if not all(segments):
        raise SpecError(f"path '{path}' has an empty segment in template: {text}")
    return Variable(segments)
