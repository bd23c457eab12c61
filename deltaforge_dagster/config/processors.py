"""The processors of a pipeline file, which transform changes between source and sinks.

Installed packages may add processors. SQL expressions are checked as far as possible without Spark,
whose analyzer decides whether an expression is valid when a run starts: they are only split into
tokens. That is enough to find quotes and brackets that are not closed, several statements, and
whatever reads more than the current row, which Spark would accept (subqueries, window functions).
It also finds the columns that an expression may read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from deltaforge_dagster.config.blocks import Block, Count, Name, Text, resolved
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SpecError


def _expression(text: str) -> str:
    reason = expression_problem(resolved(text))
    if reason is not None:
        raise ValueError(reason)
    return text


Expression = Annotated[str, AfterValidator(_expression)]
"""A SQL expression over one row."""


LeafPolicy = Literal["preserve", "drop", "null"]
Glob = Annotated[str, Field(min_length=1)]
"""A pattern of names: `*` and `%` match any text, everything else matches itself."""


def _template(text: str) -> str:
    """Check a template's syntax.

    Any path is valid: it refers to the user's columns of the outbox row.
    """
    try:
        compile_template(text)
    except SpecError as error:
        raise ValueError(str(error)) from error
    return text


def _script(text: str) -> str:
    """Accept any text that is not empty: `${...}` in it belongs to JavaScript."""
    if not text.strip():
        raise ValueError("is empty")
    return text


RowTemplate = Annotated[str, AfterValidator(_template)]


class ScriptLimits(Block):
    """Limits of one call of a script."""

    cpu_ms: Count = 50
    """Milliseconds of processor time."""
    mem_mb: Count = 128
    """MiB of heap."""
    timeout_ms: Count = 500
    """Milliseconds of elapsed time."""


class JavascriptProcessor(Block):
    """A script in JavaScript: changes, drops, adds and routes events."""

    type: Literal["javascript"]
    id: Name
    """Unique in the list. If absent, it is derived from type and index, with a warning."""
    inline: Annotated[str, AfterValidator(_script)]
    """The script.

    Environment variables in it are expanded when the file is loaded: an unknown `${name}` stays,
    `$$` is a dollar sign.
    """
    limits: ScriptLimits = ScriptLimits()
    """Limits of one call."""


class FlattenProcessor(Block):
    """Turns nested objects of row images into columns: `a: {b: 1}` becomes `a__b: 1`."""

    type: Literal["flatten"]
    id: Name = "flatten"
    """Unique in the list."""
    separator: Annotated[str, Field(min_length=1)] = "__"
    """The separator between the names of a path."""
    max_depth: Annotated[int, Field(ge=0)] | None = None
    """Objects at this depth are not flattened; columns are at depth 0."""
    on_collision: Literal["last", "first", "error"] = "last"
    """Which of two values with the same name is kept."""
    empty_object: LeafPolicy = "preserve"
    """What happens to `{}` (write `"null"` with quotes)."""
    lists: Literal["preserve", "index"] = "preserve"
    """Keep lists, or make each element a column (`tags__0`)."""
    empty_list: LeafPolicy = "preserve"
    """What happens to `[]` (write `"null"` with quotes)."""


class OutboxColumns(Block):
    """The names of the columns of an outbox row."""

    payload: Text = "payload"
    """Column of the event's payload."""
    aggregate_type: Text = "aggregate_type"
    """Column of the aggregate's type."""
    aggregate_id: Text = "aggregate_id"
    """Column of the aggregate's id."""
    event_type: Text = "event_type"
    """Column of the event's type."""
    topic: Text = "topic"
    """Column of the topic."""
    event_id: Text = "id"
    """Column of the event's id."""


class OutboxProcessor(Block):
    """Turns rows of outbox tables, and messages with outbox prefixes, into their events."""

    type: Literal["outbox"]
    id: Name = "outbox"
    """Unique in the list."""
    tables: tuple[Glob, ...] = ()
    """Patterns of table names or message prefixes; empty matches all."""
    topic: RowTemplate | None = None
    """Template of the event's destination; variables are columns of the row."""
    default_topic: Text | None = None
    """The topic if neither the template nor the row gives one."""
    key: RowTemplate | None = None
    """Template of the message key; variables are columns of the row.

    By default the aggregate's id.
    """
    raw_payload: bool = False
    """Sinks write the payload without an envelope."""
    strict: bool = False
    """Whether a row without topic, payload, aggregate type, aggregate id or event type stops the
    pipeline.
    """
    additional_headers: Mapping[str, Text] = {}
    """Headers by name, each with the column that its value is taken from."""
    columns: OutboxColumns = OutboxColumns()
    """The names of the row's columns."""


class TableGlobs(Block):
    """Tables by patterns of their full names; `exclude` takes precedence."""

    include: tuple[Glob, ...] = ()
    """Tables that pass; empty matches all."""
    exclude: tuple[Glob, ...] = ()
    """Tables that do not pass."""


Comparison = Literal[
    "exists", "not_exists", "eq", "ne", "gt", "gte", "lt", "lte",
    "in", "not_in", "contains", "regex", "changed",
]  # fmt: skip

_NEEDS_NO_VALUE = frozenset({"exists", "not_exists", "changed"})


class Predicate(Block):
    """A condition on one field of `after`."""

    path: Text
    """The path to the field: names separated by dots."""
    op: Comparison
    """How to compare ([processors.md](processors.md#filter))."""
    value: Any = None
    """The value that the field is compared with."""

    @model_validator(mode="after")
    def _check_value(self) -> Predicate:
        if self.op in {"in", "not_in"} and not isinstance(self.value, list | tuple):
            raise ValueError(f"{self.op} needs `value`, a list")
        if self.op == "regex":
            if not isinstance(self.value, str):
                raise ValueError("regex needs `value`, a text")
            try:
                re.compile(self.value)
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}") from error
        if self.op not in _NEEDS_NO_VALUE and "value" not in self.model_fields_set:
            raise ValueError(f"{self.op} needs `value`")
        return self


class FilterProcessor(Block):
    """Passes only some events: those that match by operation, table and fields."""

    type: Literal["filter"]
    id: Name = "filter"
    """Unique in the list."""
    ops: tuple[Literal["create", "update", "delete", "read", "truncate"], ...] = ()
    """Operations that pass; empty matches all."""
    tables: TableGlobs = TableGlobs()
    """Tables that pass."""
    fields: tuple[Predicate, ...] = ()
    """Conditions on `after`."""
    match: Literal["all", "any"] = "all"
    """Whether all conditions of `fields` must hold, or any of them."""


class SqlRoute(Block):
    """Where events go, by SQL expressions; null leaves a part as it is."""

    topic: Expression | None = None
    """The destination, which overrides the sink's template."""
    key: Expression | None = None
    """The message key."""
    headers: Mapping[str, Expression] = {}
    """Headers by name, added to those that the event has."""


class SqlProcessor(Block):
    """Spark SQL over each event: which pass, which fields are computed or dropped, the route."""

    type: Literal["sql"]
    id: Name = "sql"
    """Unique in the list."""
    where: Expression | None = None
    """Events for which this is true pass; others, including null, are dropped."""
    set: Mapping[str, Expression] = {}
    """Fields, as `after.<name>` or `before.<name>`, with the expressions of their values.

    A missing field is added; an image that is null stays null.
    """
    drop: tuple[Text, ...] = ()
    """Names of fields that are removed from both images."""
    route: SqlRoute = SqlRoute()
    """Where the events go."""

    @property
    def computed(self) -> dict[str, str]:
        """The expressions that Spark computes for each row, by their path in the block."""
        expressions = {} if self.where is None else {"where": self.where}
        expressions |= {f"set.{target}": text for target, text in self.set.items()}
        parts = {"topic": self.route.topic, "key": self.route.key}
        expressions |= {f"route.{name}": text for name, text in parts.items() if text is not None}
        return expressions | {
            f"route.headers.{name}": text for name, text in self.route.headers.items()
        }

    @model_validator(mode="after")
    def _check_work(self) -> SqlProcessor:
        if not self.computed and not self.drop:
            raise ValueError("does nothing (give `where`, `set`, `drop` or `route`)")
        for target in self.set:
            image, _, name = target.partition(".")
            if image not in {"before", "after"} or not name:
                raise ValueError(
                    f"set names {target}; `after.<field>` and `before.<field>` can be set "
                    "(topic, key and headers belong to `route`)"
                )
            if name in self.drop:
                raise ValueError(f"sets {target} and drops it (remove one)")
        return self


def _function(text: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", text):
        raise ValueError("must be `module:function`, such as `shop.cleaning:clean`")
    return text


class FunctionLimits(Block):
    """Limits of one call of a Python function."""

    timeout_ms: Count | None = None
    """Milliseconds of elapsed time; no limit by default.

    With a limit the function runs in a separate process, which is killed at the limit, even inside
    C code ([what that costs](processors.md#a-time-limit)).
    """


class PythonProcessor(Block):
    """A Python function over batches of events, as Arrow tables or pandas frames."""

    type: Literal["python"]
    id: Name = "python"
    """Unique in the list."""
    function: Annotated[str, AfterValidator(_function)]
    """`module:function`."""
    format: Literal["arrow", "pandas"] = "arrow"
    """The type of the tables that the function takes and returns."""
    path: Text | None = None
    """Directory that is searched first for the module, relative to the pipeline file.

    By default only the module search path of the Spark workers is used.
    """
    limits: FunctionLimits = FunctionLimits()
    """Limits of one call."""


_GROUP = "deltaforge_dagster.processors"


def processor_types() -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages that provide processors, by `type`.

    A package declares each in its `pyproject.toml` (Python Packaging User Guide, "Entry points
    specification"); `processors.plugins` describes what the object must be::

        [project.entry-points."deltaforge_dagster.processors"]
        redact = "acme_processors:Redact"
    """
    return {
        entry_point.name: entry_point
        for entry_point in sorted(
            entry_points(group=_GROUP), key=lambda entry_point: entry_point.name
        )
    }


def _installed(text: str) -> str:
    installed = processor_types()
    if text not in installed:
        types = ", ".join([*OWN_TYPES, *installed])
        raise ValueError(f"is {text}, which no installed package provides; known are {types}")
    return text


class CustomProcessor(Block):
    """A processor of an installed package."""

    type: Annotated[
        str,
        AfterValidator(_installed),
        Field(json_schema_extra=lambda schema: schema.update({"not": {"enum": [*OWN_TYPES]}})),
    ]
    id: Name
    """Unique in the list; by default the type."""
    config: Mapping[str, Any] = {}
    """The processor's configuration; the package documents it."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"id": value["type"], **value} if isinstance(value, dict) else value


CUSTOM = "custom processor"
"""Stands for the block of a custom processor in the paths of validation errors, never in a file."""


def _form(value: Any) -> str | None:
    """Return the tag of the model that a block is meant for."""
    type_name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(type_name, str):
        return None
    return type_name if type_name in OWN_TYPES else CUSTOM


Processor = Annotated[
    Annotated[JavascriptProcessor, Tag("javascript")]
    | Annotated[FlattenProcessor, Tag("flatten")]
    | Annotated[OutboxProcessor, Tag("outbox")]
    | Annotated[FilterProcessor, Tag("filter")]
    | Annotated[SqlProcessor, Tag("sql")]
    | Annotated[PythonProcessor, Tag("python")]
    | Annotated[CustomProcessor, Tag(CUSTOM)],
    Discriminator(_form),
]

OWN_TYPES: tuple[str, ...] = tuple(
    get_args(form)[1].tag for form in get_args(get_args(Processor)[0])[:-1]
)
"""The types of the built-in processors."""


_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | --[^\n]* | /\*.*?\*/ )
  | (?P<text> [rR]'[^']*' | [rR]"[^"]*" | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" )
  | (?P<quoted> `(?:[^`]|``)*` )
  | (?P<word> [^\W\d]\w* )
  | (?P<number> \d[\w.]* )
  | (?P<mark> :: | /\* | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {")": "(", "]": "[", "}": "{"}
_QUERY = frozenset({"select", "values", "with", "using", "lateral"})
"""Keywords of queries that cannot occur in an expression over one row."""
_OPERATORS = frozenset(
    {"and", "between", "collate", "ilike", "in", "is", "like", "not", "or", "regexp", "rlike"}
)
"""What may follow a column named `table` or `from`, in contrast to a query."""
_STATEMENTS = frozenset(
    {
        "alter", "analyze", "begin", "cache", "call", "clear", "create", "declare", "delete",
        "describe", "drop", "execute", "explain", "grant", "insert", "load", "merge", "refresh",
        "reset", "revoke", "set", "show", "truncate", "uncache", "update", "use",
    }
)  # fmt: skip


def expression_words(expression: str) -> set[str]:
    """Return all words of an expression that may be names of columns, in lower case."""
    return {
        text.strip("`").lower() for kind, text in _tokens(expression) if kind in {"word", "quoted"}
    }


def expression_problem(expression: str) -> str | None:
    """Return why text cannot be an expression over one row, or None if only Spark can decide."""
    tokens = list(_tokens(expression))
    return _form_problem(tokens) or _meaning_problem(tokens)


def _form_problem(tokens: list[tuple[str, str]]) -> str | None:
    """Find unbalanced quotes and brackets, and semicolons."""
    if not tokens:
        return "is empty"
    open_brackets = []
    for kind, text in tokens:
        if kind != "mark":
            continue
        if text in {"'", '"', "`", "/*"}:
            return f"has an unclosed {text}"
        if text == ";":
            return "contains `;` (only one expression is allowed)"
        if text in _CLOSING.values():
            open_brackets.append(text)
        elif text in _CLOSING and (not open_brackets or open_brackets.pop() != _CLOSING[text]):
            return f"has {text} without an opening bracket"
    return f"has an unclosed {open_brackets[-1]}" if open_brackets else None


def _meaning_problem(tokens: list[tuple[str, str]]) -> str | None:
    """Find statements, subqueries and window functions."""
    before = ("", "")
    for index, (kind, text) in enumerate(tokens):
        word = text.lower() if kind == "word" and before[1] not in {":", "."} else ""
        following = tokens[index + 1] if index + 1 < len(tokens) else ("", "")
        if not index and word in _STATEMENTS and following[0] in {"word", "quoted"}:
            return f"is a statement ({text}), not an expression"
        opens = (
            before[1] == "("
            and following[0] in {"word", "quoted"}
            and following[1].lower() not in _OPERATORS
        )
        if word in _QUERY or (word in {"from", "table"} and opens):
            return f"holds a subquery ({text}), but only the row itself can be read"
        if word == "over":
            return "holds a window function (over), but only the row itself can be read"
        before = (kind, text)
    return None


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(expression):
        if match.lastgroup != "space":
            yield str(match.lastgroup), match.group()
