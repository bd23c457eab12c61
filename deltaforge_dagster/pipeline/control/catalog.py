"""Which pipelines an installation has: those of its files, and those that its state store keeps.

If a file and a document of the store claim the same name, the pipeline is broken until one of them
is removed, because it is undefined which one is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from deltaforge_dagster.config.file.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_document,
    load_files,
    load_pipelines,
    pipeline_files,
)
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError, SpecError
from deltaforge_dagster.state.records import PipelineRow

if TYPE_CHECKING:
    from deltaforge_dagster.state.pipelines import StoredSpec
    from deltaforge_dagster.state.store import StateStore

AnyPipeline = LoadedPipeline | BrokenPipeline

_Stamp = tuple[tuple[Path, int, int, int], ...]


def installed(settings: Settings, store: StateStore | None) -> list[AnyPipeline]:
    """Return the pipelines of files below `settings.pipelines`, then those that the store keeps.

    Args:
        settings: Name the files, and say whether unknown fields are problems.
        store: The state store; None where nothing has run yet, so that it keeps none.

    Raises:
        SpecError: There is nothing at `settings.pipelines`; an empty directory is enough.
    """
    files = load_pipelines(settings.pipelines, strict=settings.strict)
    if store is None:
        return united(files, [])
    return united(known_names(files, store.pipelines.read()), kept(store, strict=settings.strict))


class PipelineFiles:
    """Lists an installation's pipelines repeatedly; rereads the files only when one has changed.

    For one thread at a time.

    Args:
        settings: Name the files, and say whether unknown fields are problems.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stamp: _Stamp | None = None
        self._files: list[AnyPipeline] = []
        self._stored: dict[StoredSpec, AnyPipeline] = {}

    def installed(self, store: StateStore) -> list[AnyPipeline]:
        """Return every pipeline as its file or document is now, by name.

        Raises:
            SettingsError: There is nothing at `settings.pipelines`.
            StoreUnavailable: The store cannot be asked.
        """
        files = known_names(self._of_files(), store.pipelines.read())
        strict = self._settings.strict
        self._stored = {
            stored: self._stored.get(stored) or of_document(stored, strict=strict)
            for stored in store.pipelines.documents()
        }
        return sorted(united(files, self._stored.values()), key=lambda pipeline: pipeline.name)

    def _of_files(self) -> list[AnyPipeline]:
        try:
            paths = pipeline_files(self._settings.pipelines)
        except SpecError as error:
            raise SettingsError(f"DELTAFORGE_PIPELINES: {error}") from None
        stamp = tuple(_stamp(path) for path in paths)
        if stamp != self._stamp:
            self._files = load_files(paths, strict=self._settings.strict)
            self._stamp = stamp
        return self._files


def _stamp(path: Path) -> tuple[Path, int, int, int]:
    """Return a file's path, modification time, size and inode; zeros for a file that is gone."""
    try:
        status = path.stat()
    except OSError:
        return path, 0, 0, 0
    return path, status.st_mtime_ns, status.st_size, status.st_ino


def known_names(files: Iterable[AnyPipeline], rows: Iterable[PipelineRow]) -> list[AnyPipeline]:
    """Return the pipelines of files; an unreadable one gets the name under which it last ran."""
    files = list(files)
    taken = {pipeline.name for pipeline in files}
    by_file = {row.file: row.name for row in rows if row.file is not None}
    named: list[AnyPipeline] = []
    for pipeline in files:
        name = None if pipeline.path is None else by_file.get(str(pipeline.path.absolute()))
        if isinstance(pipeline, BrokenPipeline) and name is not None and name not in taken:
            pipeline = replace(pipeline, name=name)  # noqa: PLW2901 - the same file
        named.append(pipeline)
    return named


def of_row(row: PipelineRow, pipelines: Iterable[AnyPipeline]) -> AnyPipeline | None:
    """Return the file or document of a pipeline that the state store knows; None when it is gone.

    Args:
        row: The pipeline.
        pipelines: The installed pipelines; a pipeline that is not among them was started with the
            path of its file, which is read then.
    """
    for pipeline in pipelines:
        if pipeline.name == row.name:
            return pipeline
    if row.file is None or not Path(row.file).is_file():
        return None
    return _of_file(Path(row.file), row.name)


def without_file(
    rows: Iterable[PipelineRow], pipelines: Iterable[AnyPipeline]
) -> list[BrokenPipeline]:
    """Return the pipelines of the state store that have no file any more.

    Args:
        rows: The pipelines of the state store.
        pipelines: The installed pipelines.
    """
    pipelines = list(pipelines)
    return [
        _without_file(row.name, Path(row.file))
        for row in rows
        if row.file is not None and of_row(row, pipelines) is None
    ]


def is_gone(pipeline: AnyPipeline) -> bool:
    """Return whether a pipeline has no file any more."""
    return isinstance(pipeline, BrokenPipeline) and pipeline.gone


def _without_file(name: str, path: Path) -> BrokenPipeline:
    why = "is another pipeline's now" if path.exists() else "is gone"
    return BrokenPipeline(path, name, SpecError(f"its file {path} {why}"), gone=True)


def kept(store: StateStore, *, strict: bool = False) -> list[AnyPipeline]:
    """Return the pipelines that the store keeps."""
    return [of_document(stored, strict=strict) for stored in store.pipelines.documents()]


def of_document(stored: StoredSpec, *, strict: bool = False) -> AnyPipeline:
    """Return the pipeline of a document that the store keeps."""
    pipeline = load_document(stored.name, orjson.loads(stored.document), strict=strict)
    return replace(pipeline, name=stored.name) if isinstance(pipeline, BrokenPipeline) else pipeline


def united(files: Iterable[AnyPipeline], stored: Iterable[AnyPipeline]) -> list[AnyPipeline]:
    """Return pipelines of files and of the store together, each name once."""
    by_name = {pipeline.name: pipeline for pipeline in files}
    for pipeline in stored:
        rival = by_name.get(pipeline.name)
        by_name[pipeline.name] = pipeline if rival is None else _with_name_conflict(rival)
    return list(by_name.values())


def reread(store: StateStore, loaded: LoadedPipeline) -> AnyPipeline | None:
    """Return a pipeline as its file or document is now; None when that is gone."""
    if loaded.in_code:
        return loaded
    if loaded.path is None:
        stored = store.pipelines.document(loaded.name)
        return None if stored is None else of_document(stored)
    return _of_file(loaded.path, loaded.name)


def still_installed(store: StateStore, pipelines: Iterable[AnyPipeline]) -> list[AnyPipeline]:
    """Return those of the pipelines that there still are, as they are now.

    A pipeline without a readable file or document is broken as it was.
    """
    current = []
    for pipeline in pipelines:
        if isinstance(pipeline, LoadedPipeline):
            now = reread(store, pipeline)
        else:
            file = pipeline.path
            now = pipeline if file is None else _of_file(file, pipeline.name)
        if now is not None:
            current.append(now)
    return current


def _of_file(path: Path, name: str) -> AnyPipeline | None:
    """Return the pipeline that a file has under this name, None if it has another one only.

    A file that cannot be loaded is taken for the pipeline's. A component file may have several.
    """
    pipelines = load_files([path]) if path.exists() else []
    for pipeline in pipelines:
        if pipeline.name == name:
            return pipeline
    broken = [pipeline for pipeline in pipelines if isinstance(pipeline, BrokenPipeline)]
    return replace(broken[0], name=name) if broken else None


def _with_name_conflict(file: AnyPipeline) -> BrokenPipeline:
    problem = (
        f"{file.path}: metadata.name: the name {file.name} is also used by a pipeline that the "
        f"state store keeps (rename this one, or remove the other: DELETE /pipelines/{file.name})"
    )
    before = file.error.problems if isinstance(file, BrokenPipeline) else ()
    return BrokenPipeline(file.path, file.name, SpecError(*before, problem), file.warnings)
