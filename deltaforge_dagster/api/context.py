"""What every route works with: the installation's state store, journal, Dagster instance and pipelines."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import dagster as dg
from fastapi import Depends, Request

from deltaforge_dagster.api.dagster_reload import DagsterReload
from deltaforge_dagster.api.errors import PipelineBroken, PipelineNotFound
from deltaforge_dagster.config.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_files,
    pipeline_files,
)
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError, SpecError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.catalog import AnyPipeline, of_document, united
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.stored_specs import StoredSpec

_Stamp = tuple[tuple[Path, int, int, int], ...]


class ApiContext:
    """The installation, open for as long as the server lives. Thread-safe.

    Args:
        settings: The installation's settings.
        store: Its state store.
        journal: Its journal.
        instance: The Dagster instance that shows it.
        reload: Lets Dagster read the pipelines again.
    """

    def __init__(
        self,
        settings: Settings,
        store: StateStore,
        journal: Journal,
        instance: dg.DagsterInstance,
        reload: DagsterReload,
    ) -> None:
        self.settings = settings
        self.store = store
        self.journal = journal
        self.instance = instance
        self.reload = reload
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._files: list[AnyPipeline] = []
        self._stored: dict[StoredSpec, AnyPipeline] = {}

    def pipelines(self) -> list[AnyPipeline]:
        """Return every pipeline as its file or document is now, by name; what did not change is not read again."""
        with self._lock:
            found = united(self._of_files(), self._of_store())
        return sorted(found, key=lambda one: one.name)

    def pipeline(self, name: str) -> AnyPipeline:
        """Return one pipeline.

        Raises:
            PipelineNotFound: There is none of that name.
        """
        for one in self.pipelines():
            if one.name == name:
                return one
        raise PipelineNotFound(name)

    def loaded(self, name: str) -> LoadedPipeline:
        """Return one pipeline that can be loaded.

        Raises:
            PipelineNotFound: There is none of that name.
            PipelineBroken: Its file or document has problems.
        """
        found = self.pipeline(name)
        if isinstance(found, BrokenPipeline):
            raise PipelineBroken(found)
        return found

    def _of_files(self) -> list[AnyPipeline]:
        try:
            paths = pipeline_files(self.settings.pipelines)
        except SpecError as error:
            raise SettingsError(f"DELTAFORGE_PIPELINES: {error}") from None
        stamp = tuple(_stamp(path) for path in paths)
        if stamp != self._stamp:
            self._files = load_files(paths, strict=self.settings.strict)
            self._stamp = stamp
        return self._files

    def _of_store(self) -> list[AnyPipeline]:
        strict = self.settings.strict
        self._stored = {
            one: self._stored.get(one) or of_document(one, strict=strict)
            for one in self.store.stored_specs()
        }
        return list(self._stored.values())


def _stamp(path: Path) -> tuple[Path, int, int, int]:
    """Return what changes with a file's content; zeros for one that is gone by now."""
    try:
        found = path.stat()
    except OSError:
        return path, 0, 0, 0
    return path, found.st_mtime_ns, found.st_size, found.st_ino


def _context(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
"""The type of a route's parameter that is to be the installation."""


def _pipeline(name: str, request: Request, context: Context) -> LoadedPipeline:
    loaded = context.loaded(name)
    request.state.tenant = loaded.spec.metadata.tenant  # for the metrics of requests
    return loaded


Pipeline = Annotated[LoadedPipeline, Depends(_pipeline)]
"""The type of a route's parameter that is to be the pipeline `{name}` of its path."""
