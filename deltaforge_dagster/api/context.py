"""What every route works with: the installation's state store, journal, Dagster instance and pipelines."""

from __future__ import annotations

import threading
from typing import Annotated

import dagster as dg
from anyio import from_thread
from fastapi import Depends, Request

from deltaforge_dagster.api.errors import ClientGone, PipelineBroken, PipelineNotFound
from deltaforge_dagster.config.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.catalog import AnyPipeline, PipelineFiles
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from deltaforge_dagster.state.store import StateStore


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
        self._files = PipelineFiles(settings)

    def pipelines(self) -> list[AnyPipeline]:
        """Return every pipeline as its file or document is now, by name; what did not change is not read again."""
        with self._lock:
            return self._files.installed(self.store)

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


def _context(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
"""The type of a route's parameter that is to be the installation."""


class Client:
    """Who waits for the answer to a request. Routes that run in a thread ask it between two steps."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def check_still_there(self) -> None:
        """Do nothing while somebody waits.

        Raises:
            ClientGone: The connection is closed.
        """
        if from_thread.run(self._request.is_disconnected):
            raise ClientGone("the client has closed its connection")


Caller = Annotated[Client, Depends(Client)]
"""The type of a route's parameter that is to be the client."""


def _pipeline(name: str, request: Request, context: Context) -> LoadedPipeline:
    loaded = context.loaded(name)
    request.state.tenant = loaded.spec.metadata.tenant  # for the metrics of requests
    return loaded


Pipeline = Annotated[LoadedPipeline, Depends(_pipeline)]
"""The type of a route's parameter that is to be the pipeline `{name}` of its path."""
