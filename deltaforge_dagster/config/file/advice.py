"""Warnings about valid settings of a pipeline file that are probably mistakes.

The file loads and does what it says; each warning names the place and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from deltaforge_dagster.config.file.document import DocumentPath, DocumentProblem
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks.base import SinkBlock
from deltaforge_dagster.config.sources.snapshot import Snapshot
from deltaforge_dagster.config.templates import compile_template


def advice(spec: PipelineSpec) -> Iterator[DocumentProblem]:
    """Yield a warning for each setting that is probably a mistake."""
    yield from _snapshot(spec.spec.source.config.snapshot)
    for index, sink in enumerate(spec.spec.sinks):
        path = ("spec", "sinks", index, "config")
        yield from _filter(sink, path)
        yield from _key(sink, path)


def _snapshot(block: Snapshot | None) -> Iterator[DocumentProblem]:
    if block is not None and "mode" not in block.model_fields_set:
        text = (
            "has no `mode`, so that tables are read only on request (write mode: initial to have"
            " them read once, or mode: never)"
        )
        yield DocumentProblem(("spec", "source", "config", "snapshot"), text)


def _filter(sink: SinkBlock, path: DocumentPath) -> Iterator[DocumentProblem]:
    chosen = sink.config.filter
    if chosen is None or not chosen.exclude_synthetic:
        return
    other = "synthetic_only" if chosen.synthetic_only else "producers" if chosen.producers else None
    if other is not None:
        text = f"exclude_synthetic and {other} together let nothing pass (remove one of them)"
        yield DocumentProblem((*path, "filter"), text)


def _key(sink: SinkBlock, path: DocumentPath) -> Iterator[DocumentProblem]:
    if sink.config.key is None:
        return
    for variable in compile_template(sink.config.key).variables:
        image, *fields = variable.path
        if image == "after":
            instead = (
                f" (use ${{key.{fields[0]}}} for a column of the primary key)" if fields else ""
            )
            name = ".".join(variable.path)
            yield DocumentProblem((*path, "key"), f"${{{name}}} is empty text in a delete{instead}")
