"""What every route uses: the installation's store, journal, Dagster instance and pipelines."""

from __future__ import annotations

import threading
from typing import Annotated

import dagster as dg
from anyio import from_thread
from fastapi import Depends, Request

from deltaforge_dagster.api.errors import ClientGone, PipelineBroken, PipelineNotFound
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.catalog import (
    AnyPipeline,
    PipelineFiles,
    without_file,
)
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from deltaforge_dagster.state.store import StateStore


class ApiContext:
    """The installation, open for the lifetime of the server. Thread-safe.

    Args:
        settings: The installation's settings.
        store: Its state store.
        journal: Its journal.
        instance: The Dagster instance that shows it.
        reload: Makes Dagster load the pipelines again.
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
        self._files = PipelineFiles(settings)

    def pipelines(self) -> list[AnyPipeline]:
        """Return every pipeline as its file or document is now, sorted by name.

        Only files that have changed are read.

        Pipelines that have run, but whose file is gone, are included as broken ones.
        """
        with self._lock:
            pipelines = self._files.installed(self.store)
        gone = without_file(self.store.pipelines.read(), pipelines)
        return (
            sorted([*pipelines, *gone], key=lambda pipeline: pipeline.name) if gone else pipelines
        )

    def pipeline(self, name: str) -> AnyPipeline:
        """Return one pipeline.

        Raises:
            PipelineNotFound: There is no pipeline of that name.
        """
        for pipeline in self.pipelines():
            if pipeline.name == name:
                return pipeline
        raise PipelineNotFound(name)

    def loaded(self, name: str) -> LoadedPipeline:
        """Return one pipeline whose file or document is valid.

        Raises:
            PipelineNotFound: There is no pipeline of that name.
            PipelineBroken: Its file or document has problems.
        """
        pipeline = self.pipeline(name)
        if isinstance(pipeline, BrokenPipeline):
            raise PipelineBroken(pipeline)
        return pipeline


def _context(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
"""The type of a route parameter that receives the installation."""


class RequestClient:
    """The client of a request.

    Routes that run in a thread check between steps that it is still connected.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    def check_still_there(self) -> None:
        """Do nothing while the client is connected.

        Raises:
            ClientGone: The client has closed the connection.
        """
        if from_thread.run(self._request.is_disconnected):
            raise ClientGone("the client has closed its connection")


Caller = Annotated[RequestClient, Depends(RequestClient)]
"""The type of a route parameter that receives the client."""


def _pipeline(name: str, request: Request, context: Context) -> LoadedPipeline:
    loaded = context.loaded(name)
    request.state.tenant = loaded.spec.metadata.tenant  # for the metrics of requests
    return loaded


Pipeline = Annotated[LoadedPipeline, Depends(_pipeline)]
"""The type of a route parameter that receives the pipeline `{name}` of the path."""
