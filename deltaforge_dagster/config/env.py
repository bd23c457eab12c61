"""Expand environment variables in the raw text of a pipeline file, before YAML is parsed.

`${NAME}` and `$NAME` become the variable's value, `${NAME:-default}` becomes the default when the
variable is unset or empty, `$$` becomes `$`. The reference to an unknown variable stays unchanged,
because routing templates (`${source.table}`), which are resolved later for each event, have the
same syntax.

Component files of Dagster projects name variables as `{{ env.NAME }}` instead (`expand_templates`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deltaforge_dagster.config.templates import EVENT_FIELDS

_REFERENCE = re.compile(r"\$(?:(\$)|\{([^{}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_TEMPLATE = re.compile(r"""\{\{\s*env(?:\.(\w+)|\(\s*['"](\w+)['"]\s*\))\s*\}\}""")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Note:
    """Something to report about the variable `name`; `line` counts from 1.

    A `fatal` note is a problem of the file, the others are warnings.
    """

    line: int
    name: str
    text: str
    fatal: bool = False


def expand(text: str, environment: Mapping[str, str]) -> tuple[str, list[Note]]:
    """Return `text` with its variables expanded, and the notes about them.

    References to unknown variables stay in the text; the code that reads the field decides about
    them. Notes never contain the values of variables.
    """
    notes: list[Note] = []

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        body = match[2] if match[2] is not None else match[3]
        name, colon, default = body.partition(":-")
        value = environment.get(name)
        line = text.count("\n", 0, match.start()) + 1
        if value is not None and (value or not colon):
            if name in EVENT_FIELDS:
                notes.append(
                    Note(
                        line,
                        name,
                        f"${{{name}}} was replaced by the environment variable {name}, although "
                        "events have a field of that name "
                        "(unset the variable to route by the field)",
                    )
                )
            if not _is_text(value):
                note = f"${{{name}}}: the environment variable {name} is not UTF-8 text"
                notes.append(Note(line, name, note, fatal=True))
            return value
        if colon and _NAME.fullmatch(name):
            return default
        if _NAME.fullmatch(name) and name not in EVENT_FIELDS:
            text_of_note = f"${{{name}}} stays as it is: no environment variable {name} is set"
            notes.append(Note(line, name, text_of_note))
        return f"${{{body}}}"

    return _REFERENCE.sub(replace, text), notes


def expand_templates(
    text: str, environment: Mapping[str, str], missing: Callable[[str], None]
) -> str:
    """Return `text` with `{{ env.NAME }}` and `{{ env('NAME') }}` replaced by the values.

    A value stays text, whatever it looks like, and nothing in it is expanded. `missing` is called
    with the name of a variable that is not set; its reference becomes `${NAME}`, as it is written
    in a pipeline file.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in environment:
            return environment[name]
        missing(name)
        return f"${{{name}}}"

    return _TEMPLATE.sub(replace, text)


def unexpanded(text: str) -> list[str]:
    """Return the names in `text` written as `${NAME}` that are not fields of events."""
    names = (match[2].partition(":-")[0] for match in _REFERENCE.finditer(text) if match[2])
    return [name for name in names if _NAME.fullmatch(name) and name not in EVENT_FIELDS]


def _is_text(value: str) -> bool:
    """Return whether a value is UTF-8 text; Python represents other bytes as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def unresolved(text: str) -> str | None:
    """Return the first `${...}` that is left in `text`, without its braces, or None."""
    match = re.search(r"\$\{([^{}]*)\}", text)
    return match[1] if match else None
