"""The file sink as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.sinks.registry import MessageSinkType, SinkContext, folder_finding
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # it needs Arrow
    from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.config.blocks import TemplateText
from deltaforge_dagster.config.sinks import MessageSinkConfig


class FileSinkConfig(MessageSinkConfig):
    """Where to write."""

    destination_field = "path"

    path: TemplateText
    """Template of the file's path. The file and its directories are created if they are missing.
    Variables can choose a file only below the directory that the beginning of the template names.
    """


class FileSinkType(MessageSinkType[FileSinkConfig]):
    """Local files of JSON lines."""

    name = "file"
    # An example that works at once.
    sample: Mapping[str, Any] = {"path": "/tmp/NAME.jsonl"}  # noqa: S108
    summary = "A file sink, for local use: it writes JSON lines."
    config = FileSinkConfig
    destinations = "files"
    where = frozenset({"path"})
    spark = None

    def build(self, config: FileSinkConfig, context: SinkContext) -> FileSink:  # noqa: ARG002
        """Return a sink, not yet open."""
        from deltaforge_dagster.sinks.file.sink import FileSink  # noqa: PLC0415 - needs Arrow

        return FileSink(config.id, compile_template(config.path))

    def preflight(
        self,
        config: FileSinkConfig,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> list[Finding]:
        """Check that a run can create files in the directory of the template's literal prefix."""
        literal = compile_template(config.path).parts[0]
        # `abspath` resolves no links.
        folder = Path(
            os.path.abspath(  # noqa: PTH100
                os.path.dirname(literal if isinstance(literal, str) else "")  # noqa: PTH120
            )
        )
        return [folder_finding(f"sink {config.id}", folder, "files", "correct the sink's path")]


FILE = FileSinkType()
