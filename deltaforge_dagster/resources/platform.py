"""The installation as a resource: its state store and journal, and the pipelines that it has.

`Platform` opens store and journal while they are used. It is a plain object on purpose: Dagster's
UI shows the configuration of configurable resources, and the state URL may contain a password.

The functions about pipelines also answer while the state store cannot be read.

Definitions import this module, which a code location pays for with each load. What it opens is
imported when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline, load_pipelines
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, SettingsError, SpecError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, installed, united
from deltaforge_dagster.pipeline.control.specs import FormerPipeline, former_pipeline
from deltaforge_dagster.pipeline.interrupts import interrupted_afterwards
from deltaforge_dagster.sinks.registry import ObjectSinkType, TableSinkType, sink_types
from deltaforge_dagster.sources.registry import SourceContext, source_types

if TYPE_CHECKING:
    from deltaforge_dagster.journal.files import Journal
    from deltaforge_dagster.sources.base import Source
    from deltaforge_dagster.state.store import StateStore

PACKAGE = "deltaforge-dagster"
"""What this package is installed as."""

UNREADABLE = "pipelines-of-the-state-store"
"""Name of the placeholder for the pipelines in the state store while it cannot be read."""


AnySettings = Settings | Callable[[], Settings]
"""Settings, or what reads them whenever the installation is opened.

In a project that sets them in a component, a variable may be missing where definitions are loaded.
"""


@contextmanager
def existing_store(settings: AnySettings) -> Iterator[StateStore | None]:
    """Yield the installation's state store, None if it does not exist yet or is in memory."""
    url = _read(settings).state_url
    file = url.removeprefix("sqlite:///")
    if url == "memory" or (file != url and not Path(file).exists()):
        yield None
        return
    store = _open_store(url)
    try:
        yield store
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class Opened:
    """An open state store and journal."""

    settings: Settings
    store: StateStore
    journal: Journal

    def source_builder(self, loaded: LoadedPipeline) -> Callable[[], Source]:
        """Return a function that builds the pipeline's source."""
        return lambda: build_source(loaded.spec)


@dataclass(frozen=True, slots=True)
class Platform:
    """Opens the installation that its settings describe.

    Attributes:
        settings: The installation's settings.
        single_process: Whether all work is done in this process, as in `deltaforge run`; only
            then may the state store be in memory.
    """

    settings: AnySettings
    single_process: bool = False

    @contextmanager
    def open(self) -> Iterator[Opened]:
        """Open store and journal for one tick, run or command.

        Raises:
            SettingsError: The state store is in memory although several processes need it, or
                packages are missing.
            StoreUnavailable: The store or the journal cannot be reached.
        """
        settings = _read(self.settings)
        if settings.state_url == "memory" and not self.single_process:
            raise SettingsError(
                "DELTAFORGE_STATE_URL=memory works only for `deltaforge run`: under Dagster "
                "several processes share the state; use sqlite:///path or postgresql://..."
            )
        store = _open_store(settings.state_url)
        try:
            yield Opened(settings, store, _open_journal(settings.journal_url))
        finally:
            store.close()


def _open_store(url: str) -> StateStore:
    _check_packages()
    with interrupted_afterwards():
        from deltaforge_dagster.state.store import StateStore  # noqa: PLC0415 - see above
    return StateStore.open(url)


def _open_journal(url: str) -> Journal:
    with interrupted_afterwards():
        from deltaforge_dagster.journal.files import Journal  # noqa: PLC0415 - see above
    return Journal(url)


@cache
def _check_packages() -> None:
    """Check that the packages are installed that the work needs; definitions load without them.

    Raises:
        SettingsError: Some are missing; the message says what to install.
    """
    from packaging.requirements import Requirement  # noqa: PLC0415 - see above

    requirements = [Requirement(text) for text in requires(PACKAGE) or ()]
    missing = [
        requirement
        for requirement in requirements
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and not list(distributions(name=requirement.name))
    ]
    if missing:
        names = ", ".join(requirement.name for requirement in missing)
        needed = " ".join(f"'{requirement}'" for requirement in missing)
        raise SettingsError(
            f"{PACKAGE} cannot work in this environment, which lacks {names}; "
            f"to install what is missing: pip install {needed}"
        )


def _read(settings: AnySettings) -> Settings:
    return settings if isinstance(settings, Settings) else settings()


def build_source(spec: PipelineSpec) -> Source:
    """Return the source of a pipeline, connected to nothing yet.

    Raises:
        SpecError: The configuration cannot work.
    """
    declared = spec.spec.source
    kinds = [sink_types()[sink.type] for sink in spec.spec.sinks]
    keeps_rows = any(
        isinstance(kind, TableSinkType) and not isinstance(kind, ObjectSinkType) for kind in kinds
    )
    context = SourceContext(spec.metadata.name, spec.spec.engine, keeps_rows)
    with interrupted_afterwards():  # imports the module of the source
        return source_types()[declared.type].build(declared.config, context)


def installed_pipelines(settings: Settings) -> list[AnyPipeline]:
    """Return every pipeline: those of the files, then those stored in the state store.

    Raises:
        SpecError: The path `settings.pipelines` does not exist; an empty directory is allowed.
    """
    try:
        with existing_store(settings) as store:
            return installed(settings, store)
    except SpecError:
        raise
    except DeltaforgeError as error:
        files = load_pipelines(settings.pipelines, strict=settings.strict)
        return united(files, [BrokenPipeline(None, UNREADABLE, SpecError(str(error)))])


def former_pipelines(
    settings: AnySettings, pipelines: Iterable[AnyPipeline]
) -> list[FormerPipeline]:
    """Return the broken pipelines as they were when last in use.

    While the state store cannot be read, there are none.
    """
    broken = [pipeline for pipeline in pipelines if isinstance(pipeline, BrokenPipeline)]
    if not broken:
        return []
    try:
        with existing_store(settings) as store:
            former = (
                [] if store is None else [former_pipeline(store, pipeline) for pipeline in broken]
            )
    except DeltaforgeError:
        return []
    return [pipeline for pipeline in former if pipeline is not None]
