"""Access to the installation's state store for commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed, SpecError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, installed, kept
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore


@contextmanager
def opened_store() -> Iterator[StateStore]:
    """Yield the installation's state store, which must exist.

    Raises:
        NotAllowed: The store does not exist because nothing has run yet, or it is in another
            process's memory.
    """
    url = Settings.from_env().state_url
    if url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: only the run itself can see that state")
    file = url.removeprefix("sqlite:///")
    if file != url and not Path(file).exists():
        raise NotAllowed(
            f"no state in {file}: nothing has run here yet (deltaforge dev, deltaforge run), or "
            "DELTAFORGE_HOME is another directory"
        )
    store = StateStore.open(url)
    try:
        yield store
    finally:
        store.close()


def installed_files(store: StateStore) -> list[AnyPipeline]:
    """Return the pipelines of the pipeline files and of the state store.

    If the folder of files cannot be read, return only those of the store: pipelines that have run
    were then started with the path of their file (`catalog.of_row`).
    """
    settings = Settings.from_env()
    try:
        return installed(settings, store)
    except SpecError:
        return kept(store, strict=settings.strict)


def known_pipeline(store: StateStore, name: str) -> PipelineRow:
    """Return a pipeline's row by name.

    Raises:
        NotAllowed: The store does not have it; the message lists those that it has.
    """
    row = store.pipelines.get(name)
    if row is None:
        names = ", ".join(pipeline.name for pipeline in store.pipelines.read()) or "none"
        raise NotAllowed(f"no pipeline {name!r} in the state store (there is: {names})")
    return row
