"""Output of benchmark results."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def show(result: DataclassInstance, title: str, *, as_json: bool) -> None:
    """Print the fields of a result as a table, or as one JSON object with `as_json`."""
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    table = Table("measure", "value", title=title)
    for name, value in asdict(result).items():
        table.add_row(
            name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)
        )
    Console().print(table)
