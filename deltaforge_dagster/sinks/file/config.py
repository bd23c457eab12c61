"""`config` of a file sink in a pipeline file."""

from __future__ import annotations

from deltaforge_dagster.config.blocks import TemplateText
from deltaforge_dagster.config.sinks import MessageSinkConfig


class FileSinkConfig(MessageSinkConfig):
    """Where to write."""

    destination_field = "path"

    path: TemplateText
    """Template of the file's path. The file and its directories are created if they are missing.
    Variables can choose a file only below the directory that the beginning of the template names.
    """
