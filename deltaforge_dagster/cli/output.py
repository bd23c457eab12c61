"""How commands format their output: one format per kind of value."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table

_UNFOLDED = 10_000
"""A line width at which no line is folded."""


def say(text: str, fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command: a sentence, or one JSON object with `as_json`."""
    typer.echo(json.dumps(fields) if as_json else text)


def answers() -> Console:
    """Return the console that prints a command's result to standard output.

    Tables are folded at the width of a terminal. In a file or a pipe they are not, so that a
    program which searches for a name finds it whole. Brackets are printed as they are, since errors
    quote lists.
    """
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNFOLDED
    return console


def print_answer(shown: RenderableType) -> None:
    """Print a command's result to standard output, without trailing blanks in a file or a pipe."""
    console = answers()
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as capture:
        console.print(shown)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())


def grid(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, whose cells are folded if the terminal is narrow."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def show_grid(headings: Iterable[str], rows: Sequence[Sequence[str]], *, nothing: str) -> None:
    """Print a table without lines, or the text `nothing` if it has no rows."""
    shown = grid(headings, rows) if rows else nothing
    print_answer(shown)


def moment(seconds: float) -> str:
    """Return seconds since 1970 as a local time, such as `2025-03-01 12:00:05`."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def position(text: str | None) -> str:
    """Return a stored position (JSON) as text, such as `lsn 0/016B6C50 tx_id 731`; `-` for None."""
    if text is None:
        return "-"
    fields = json.loads(text)
    return " ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
