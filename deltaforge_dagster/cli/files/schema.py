"""`deltaforge schema`: print the format of pipeline files, for editors and for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deltaforge_dagster.config.file.schema import pipeline_schema, reference


def schema(
    *,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file instead of standard output.")
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print a Markdown page that explains every field instead."),
    ] = False,
) -> None:
    """Print the format of pipeline files as JSON Schema (draft 2020-12).

    Editors that use the YAML language server complete and check a file whose first line is
    `# yaml-language-server: $schema=pipeline.schema.json` (a path or a URL).
    """
    text = reference() if markdown else json.dumps(pipeline_schema(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, "utf-8")
