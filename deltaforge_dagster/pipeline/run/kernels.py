"""Compile the kernels that a run needs before it reads anything, once per version and machine.

That takes a minute or more, so a run says what it is doing. `deltaforge warm` compiles everything
beforehand. A mark beside the machine code says that a part was compiled, so a run need not load the
kernels to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.processors import SqlProcessor
from deltaforge_dagster.kernels.compiler import cache_folder
from deltaforge_dagster.pipeline.encode import messages
from deltaforge_dagster.pipeline.tables import keys
from deltaforge_dagster.processors import sql_values
from deltaforge_dagster.sensing import scan
from deltaforge_dagster.sinks.registry import SinkType, TableSinkType, sink_types
from deltaforge_dagster.sources.registry import SourceType, source_types
from deltaforge_dagster.sources.rows import hiding
from deltaforge_dagster.sources.rows import snapshot as snapshot_rows
from deltaforge_dagster.typed_rows import tables as typed_tables


def all_kernels() -> Mapping[str, Callable[[], None]]:
    """Return, by name, what compiles each part of the kernels or loads it from the cache.

    The names are shown to users, and are parts of file names.
    """
    sources = [kind for kind in source_types().values() if type(kind).warm is not SourceType.warm]
    sinks = [kind for kind in sink_types().values() if type(kind).warm is not SinkType.warm]
    return {
        **{f"source {kind.name}": kind.warm for kind in sources},
        "messages": messages.warm,
        "hidden columns": hiding.warm,
        "snapshots": snapshot_rows.warm,
        "sensing": scan.warm,
        "sql": sql_values.warm,
        "typed rows": typed_tables.warm,
        "keys of tables": keys.warm,
        **{f"sink {kind.name}": kind.warm for kind in sinks},
        **{f"snapshots of {kind.name}": kind.warm_snapshots for kind in sources},
    }


def kernels_of(spec: PipelineSpec) -> list[str]:
    """Return the names of the parts that the live runs of a pipeline need, the slowest first."""
    declared = spec.spec
    kinds = {sink.type for sink in declared.sinks}
    names = {f"source {declared.source.type}", *(f"sink {kind}" for kind in kinds), "messages"}
    if any(isinstance(sink_types()[kind], TableSinkType) for kind in kinds):
        names |= {"typed rows", "keys of tables"}
    if any(isinstance(processor, SqlProcessor) for processor in declared.processors):
        names.add("sql")
    if declared.engine.columns != ColumnOptions():
        names.add("hidden columns")
    return [name for name in all_kernels() if name in names]


def is_ready(name: str) -> bool:
    """Return whether the kernels of this name are in the cache."""
    return _mark(name).exists()


def make_ready(name: str) -> None:
    """Compile the kernels of this name, or load them from the cache."""
    all_kernels()[name]()
    mark = _mark(name)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def prepare(spec: PipelineSpec, tell: Callable[[str], None]) -> None:
    """Compile the parts that a pipeline's runs need and the cache lacks; `tell` announces each."""
    missing = [name for name in kernels_of(spec) if not is_ready(name)]
    for number, name in enumerate(missing, 1):
        tell(
            f"compiles the kernels of {name} ({number} of {len(missing)}), once for this version "
            "of deltaforge on this machine, which takes a minute or two in all "
            "(`deltaforge warm` does it beforehand)"
        )
        make_ready(name)


def _mark(name: str) -> Path:
    return cache_folder() / "ready" / name.replace(" ", "-")
