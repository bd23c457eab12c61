"""How commands write things down: one form per kind of value."""

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
"""Columns of a line that is never folded."""

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def say(text: str, found: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what a command has done: a sentence for people, or one JSON object for programs."""
    typer.echo(json.dumps(found) if as_json else text)


def answers() -> Console:
    """Return what prints a command's answer to standard output.

    A terminal's width folds tables; a file or a pipe has none, and a program that looks for a name
    there must find it whole. Brackets in what is printed are text: errors quote lists.
    """
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNFOLDED
    return console


def print_answer(shown: RenderableType) -> None:
    """Print a command's answer to standard output; in a file or a pipe, lines end where their text does."""
    console = answers()
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as capture:
        console.print(shown)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())


def grid(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, whose cells are folded where the terminal is narrow."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def show_grid(headings: Iterable[str], rows: Sequence[Sequence[str]], *, nothing: str) -> None:
    """Print such a table, or what there is to say when it has no rows."""
    shown = grid(headings, rows) if rows else nothing
    print_answer(shown)


def size(count: int) -> str:
    """Return a number of bytes, such as `12.4 MiB`."""
    value = float(count)
    for unit in _SIZES[:-1]:
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:.1f} {_SIZES[-1]}"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units, such as `1 h 5 min`; `0 s` for none."""
    left = round(max(seconds, 0.0))
    parts = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def moment(seconds: float) -> str:
    """Return a time of the store's clock, such as `2025-03-01 12:00:05`, in the local zone."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def position(text: str | None) -> str:
    """Return a stored position as words, such as `lsn 0/016B6C50 tx_id 731`; `-` for none."""
    if text is None:
        return "-"
    fields = json.loads(text)
    return " ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
