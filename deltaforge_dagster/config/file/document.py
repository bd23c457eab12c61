"""Parse YAML into plain values, and keep the line of each value.

Scalars follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema), as
DeltaForge reads them: `yes`, `on` and `12:30` are text, only `true` and `false` are booleans.
Sequences become tuples, so that everything built from a document can be frozen. A key without a
value counts as absent. Duplicate keys, tags and merge keys, which PyYAML would accept silently, are
most likely mistakes and are reported as problems.

`variables_of` tells which environment variables a block of a pipeline file takes its values from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deltaforge_dagster.config.env import expand

DocumentPath = tuple[str | int, ...]
"""Keys and list indexes from the top of a document down: `("spec", "sinks", 0, "type")`."""

_TAG = "tag:yaml.org,2002:"


_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _Resolvers()


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        (
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    """Something wrong at one place of a document; `line` counts from 1, 0 is the whole file."""

    path: DocumentPath
    text: str
    line: int = 0


@dataclass(slots=True)
class Document:
    """A parsed file.

    Attributes:
        value: Dicts, tuples, text, numbers, booleans; None for an empty or unreadable file.
        lines: The line of each key and list item.
        problems: What is wrong with the YAML itself.
    """

    value: Any = None
    lines: dict[DocumentPath, int] = field(default_factory=dict)
    problems: list[DocumentProblem] = field(default_factory=list)

    def line(self, path: DocumentPath) -> int:
        """Return the line of `path`, or of the nearest thing above it that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def at(self, path: DocumentPath) -> Any:
        """Return the value at `path`, or None if there is none."""
        value = self.value
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value


def parse_all(text: str) -> list[Document]:
    """Return each YAML document in `text`; what is not YAML is left out, nothing is raised."""
    documents = []
    try:
        for root in yaml.compose_all(text, _Loader):
            document = Document()
            document.value = _convert(root, (), document, ())
            documents.append(document)
    except (yaml.YAMLError, RecursionError):
        return []
    return documents


def format_path(path: DocumentPath) -> str:
    """Return a path as messages show it, `spec.sinks[0].type`; empty for the whole document."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def parse(text: str) -> Document:
    """Return the one YAML document in `text`; problems are collected, never raised."""
    document = Document()
    try:
        root = _Loader(text).get_single_node()
        if root is not None:
            document.value = _convert(root, (), document, ())
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error))
    except yaml.YAMLError:
        document.problems.append(DocumentProblem((), "holds a character that YAML does not allow"))
    except RecursionError:
        document.problems.append(DocumentProblem((), "is nested too deeply"))
    return document


def plain(value: Any) -> Any:
    """Convert JSON values to the form of a parsed document: tuples for lists, no null values."""
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items() if member is not None}
    if isinstance(value, list | tuple):
        return tuple(plain(element) for element in value)
    return value


def _syntax_problem(error: yaml.MarkedYAMLError) -> DocumentProblem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    if error.problem == "but found another document":
        text = "holds more than one YAML document (one file is one pipeline)"
    elif error.problem == r"found character '\t' that cannot start any token":
        text = "is not valid YAML: a tab stands before a key or value (indent with spaces)"
    else:
        # PyYAML quotes parts of the file, which may be parts of a password; the names of its
        # tokens and single characters are harmless and useful.
        message = ", ".join(filter(None, (error.context, error.problem)))
        message = re.sub(r"'(?!<[a-z ]+>'|.')[^']*'|\"(?!.\")[^\"]*\"", "'...'", message)
        text = f"is not valid YAML: {message} (column {column})"
    return DocumentProblem((), text, line)


def _convert(
    node: yaml.Node, path: DocumentPath, document: Document, above: tuple[yaml.Node, ...]
) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    if node in above:
        document.problems.append(DocumentProblem(path, "contains itself through an alias", line))
        return None
    if isinstance(node, yaml.MappingNode):
        return _convert_mapping(node, path, document, (*above, node))
    if isinstance(node, yaml.SequenceNode):
        return tuple(
            _convert(child, (*path, index), document, (*above, node))
            for index, child in enumerate(node.value)
        )
    return _convert_scalar(node, path, document)


def _convert_mapping(
    node: yaml.MappingNode, path: DocumentPath, document: Document, above: tuple[yaml.Node, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append(
                DocumentProblem(path, "has a key that is not plain text", line)
            )
            continue
        key: str = key_node.value
        key_path = (*path, key)
        if key == "<<":
            text = "merge keys are not supported (write the fields out)"
            document.problems.append(DocumentProblem(key_path, text, line))
        elif key in first_lines:
            text = f"is given twice, first in line {first_lines[key]} (keep one)"
            document.problems.append(DocumentProblem(key_path, text, line))
        else:
            first_lines[key] = line
            document.lines[key_path] = line
            value = _convert(value_node, key_path, document, above)
            if value is not None:
                values[key] = value
    return values


def _convert_scalar(node: yaml.Node, path: DocumentPath, document: Document) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    line = node.start_mark.line + 1
    try:
        match kind:
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
            case "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
            case _:
                document.problems.append(DocumentProblem(path, "has a YAML tag (remove it)", line))
    except (ValueError, KeyError):
        document.problems.append(
            DocumentProblem(path, f"is tagged !!{kind}, but is not a valid {kind}", line)
        )
    return None


_MARKED = re.compile("\ue000(\\w+)\ue001")
"""The name of a variable between two characters of private use."""


def variables_of(path: Path, sink: str | None) -> list[str]:
    """Return the names of the set environment variables that the source, or a sink, uses.

    The list is empty if the file cannot be read. Sinks without an id cannot be told apart, so the
    variables of all of them are returned.

    Args:
        path: The pipeline file.
        sink: Id of the sink; None for the source.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return []
    marked, _ = expand(text, {name: f"\ue000{name}\ue001" for name in os.environ})
    document = parse(marked).value
    spec = document.get("spec") if isinstance(document, dict) else None
    if not isinstance(spec, dict):
        return []
    blocks = [spec.get("source")] if sink is None else _sinks(spec.get("sinks"), sink)
    return sorted(set(_MARKED.findall(json.dumps(blocks, ensure_ascii=False, default=str))))


def _sinks(sinks: Any, sink: str) -> list[Any]:
    configs = [block.get("config") for block in sinks if isinstance(block, dict)] if sinks else []
    return [
        config for config in configs if isinstance(config, dict) and config.get("id", sink) == sink
    ]
