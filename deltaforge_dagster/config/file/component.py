"""Read pipelines that are written in component files (`defs.yaml`) of Dagster projects.

Such a file has one or more documents with `type` and `attributes`. A document of ours has a
pipeline's `metadata` and `spec` among its attributes, or the `path` of a pipeline file. Dagster
evaluates templates in component files as Jinja and Python literals, which would make numbers of
passwords. So a pipeline is read from the file's own text: `{{ env.NAME }}` becomes the variable's
value, always as text, and nothing else is evaluated.
"""

from __future__ import annotations

import re
from typing import Any

from deltaforge_dagster.config.file.document import Document, parse_all

TYPE_NAMES = ("PipelineComponent", "PipelinesComponent")
"""The last part of `type` in our component files."""

PIPELINE_ATTRIBUTES = ("metadata", "spec")
"""The attributes that are a pipeline file's content."""

OTHER_ATTRIBUTES = ("path", "installation", "translation")
"""The others."""

_COMPONENT = re.compile(r"^attributes:", re.MULTILINE)


def component_documents(text: str) -> list[Document]:
    """Return the documents of our components in a file; none if it is no such file."""
    if not _COMPONENT.search(text):
        return []
    return [document for document in parse_all(text) if _is_ours(document.value)]


def attributes_of(document: Document) -> Document:
    """Return the attributes of a component as a document of their own, with their lines."""
    below = {path[1:]: line for path, line in document.lines.items() if path[:1] == ("attributes",)}
    value = document.value.get("attributes")
    value = value if isinstance(value, dict) else {}
    return Document(value, below or {(): document.line(())}, document.problems)


def _is_ours(value: Any) -> bool:
    """Return whether a document is a component of ours, or of a class derived from ours."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return False
    attributes = value.get("attributes")
    named = attributes.keys() if isinstance(attributes, dict) else ()
    return kind.rpartition(".")[2] in TYPE_NAMES or {*PIPELINE_ATTRIBUTES} <= {*named}
