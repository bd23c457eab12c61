"""Which pipelines an installation has: those of its files, and those that its state store keeps.

A file and a document of the store that claim one name are both broken until one of them is gone: nobody
could say which of them is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import orjson

from deltaforge_dagster.config.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_document,
    load_files,
    load_pipelines,
)
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.stored_specs import StoredSpec

AnyPipeline = LoadedPipeline | BrokenPipeline


def installed(settings: Settings, store: StateStore | None) -> list[AnyPipeline]:
    """Return every pipeline: of the files below `settings.pipelines`, then those that the store keeps.

    Args:
        settings: Name the files, and say whether unknown fields are problems.
        store: The state store; None where nothing has run yet, so that it keeps none.

    Raises:
        SpecError: There is nothing at `settings.pipelines`; an empty directory is enough.
    """
    files = load_pipelines(settings.pipelines, strict=settings.strict)
    return united(files, [] if store is None else kept(store, strict=settings.strict))


def kept(store: StateStore, *, strict: bool = False) -> list[AnyPipeline]:
    """Return the pipelines that the store keeps."""
    return [of_document(one, strict=strict) for one in store.stored_specs()]


def of_document(stored: StoredSpec, *, strict: bool = False) -> AnyPipeline:
    """Return the pipeline of a document that the store keeps."""
    found = load_document(stored.name, orjson.loads(stored.document), strict=strict)
    return replace(found, name=stored.name) if isinstance(found, BrokenPipeline) else found


def united(files: Iterable[AnyPipeline], stored: Iterable[AnyPipeline]) -> list[AnyPipeline]:
    """Return pipelines of files and of the store together, each name once."""
    by_name = {one.name: one for one in files}
    for one in stored:
        rival = by_name.get(one.name)
        by_name[one.name] = one if rival is None else _both(rival)
    return list(by_name.values())


def reread(store: StateStore, loaded: LoadedPipeline) -> AnyPipeline | None:
    """Return a pipeline as its file or document is now; None when that is gone."""
    if loaded.path is None:
        stored = store.stored_spec(loaded.name)
        return None if stored is None else of_document(stored)
    if not loaded.path.exists():
        return None
    found = load_files([loaded.path])[0]
    return found if found.name == loaded.name else None


def _both(file: AnyPipeline) -> BrokenPipeline:
    problem = (
        f"{file.path}: metadata.name: the name {file.name} is also used by a pipeline that the state "
        f"store keeps (rename this one, or remove the other: DELETE /pipelines/{file.name})"
    )
    before = file.error.problems if isinstance(file, BrokenPipeline) else ()
    return BrokenPipeline(file.path, file.name, SpecError(*before, problem), file.warnings)
