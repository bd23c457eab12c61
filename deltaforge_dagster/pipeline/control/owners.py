"""What two pipelines cannot share, claimed in the state store before a pipeline works.

Pipeline files name these resources. The first pipeline that names a replication slot, a table, a
folder of objects or the like owns it. Another one that names it, such as a copy of the file under
another name, is refused wherever it would use it: in ticks, runs, snapshots and commands.
`deltaforge validate` and `deltaforge check` compare the files, and report the conflict for both. If
`metadata.name` changes in a file at the same path, the new pipeline takes over what the former one
owned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.owned import CapturedTables, OwnedResource
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.state.store import StateStore


def owned_resources(spec: PipelineSpec) -> list[OwnedResource]:
    """Return what a pipeline cannot share, as far as its file determines it."""
    declared = spec.spec
    kind, config = source_types()[declared.source.type], declared.source.config
    patterns = [kind.table_variables(pattern) for pattern in config.tables]
    tables = CapturedTables(kind.database_place(config), patterns)
    owned = list(kind.owned(config))
    for index, sink in enumerate(declared.sinks):
        of_sink = sink_types()[sink.type].owned(sink.config, spec.metadata.name, tables)
        path = f"spec.sinks[{index}].config"
        owned += [replace(resource, field=f"{path}.{resource.field}") for resource in of_sink]
    return owned


def rivalries(loaded: LoadedPipeline, others: Iterable[LoadedPipeline]) -> list[str]:
    """Return what a pipeline names that another file names as well, one line each, for users."""
    wanted = owned_resources(loaded.spec)
    return [
        _line(loaded, shared, other.name, _file(other.path))
        for other in others
        if other.name != loaded.name
        for shared in _shared(wanted, owned_resources(other.spec))
    ]


def claim(store: StateStore, loaded: LoadedPipeline) -> None:
    """Record in the store what a pipeline cannot share, before any of it is used.

    Raises:
        SpecError: Another pipeline owns some of it.
    """
    resources = owned_resources(loaded.spec)
    if store.owners.of(loaded.name) == resources:
        return
    if not store.owners.claim(loaded.name, resources, _replaced(store, loaded)):
        raise SpecError(*conflicts(store, loaded))


def conflicts(store: StateStore, loaded: LoadedPipeline) -> list[str]:
    """Return what a pipeline names but another one owns, one line each for users; claim nothing."""
    wanted, gone = owned_resources(loaded.spec), _replaced(store, loaded)
    lines = []
    for owner, owned in store.owners.others(loaded.name).items():
        row = store.pipelines.get(owner)
        if owner not in gone:
            file = None if row is None or row.file is None else Path(row.file)
            lines += [
                _line(loaded, shared, owner, _file(file)) for shared in _shared(wanted, owned)
            ]
    return lines


def _replaced(store: StateStore, loaded: LoadedPipeline) -> set[str]:
    """Return the pipelines that this file defined under other names, and that no run holds."""
    if loaded.path is None:
        return set()
    file, now = str(loaded.path.absolute()), store.now()
    former = {row.name for row in store.pipelines.read() if row.file == file} - {loaded.name}
    leases = {name: store.leases.get(name) for name in former}
    return {name for name, lease in leases.items() if lease is None or not lease.active_at(now)}


def _shared(
    wanted: Sequence[OwnedResource], others: Sequence[OwnedResource]
) -> Iterator[OwnedResource]:
    """Yield, for each field of the file, the first resource that both pipelines name."""
    fields = set()
    for resource in wanted:
        if resource.field not in fields and any(resource.is_same(other) for other in others):
            fields.add(resource.field)
            yield resource


def _line(loaded: LoadedPipeline, shared: OwnedResource, owner: str, file: str) -> str:
    where = "" if loaded.path is None else f"{loaded.path}: "
    return (
        f"{where}{shared.field}: {shared.what} {shared.name!r} is used by pipeline {owner} "
        f"({file}) as well, and two pipelines cannot share it (give {loaded.name} another one, or "
        f"remove {owner})"
    )


def _file(path: Path | None) -> str:
    if path is None:
        return "in the state store"
    path = path.absolute()
    return str(path) if path.exists() else f"{path}, which is gone"
