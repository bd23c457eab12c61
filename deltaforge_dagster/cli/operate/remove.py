"""`deltaforge remove`: remove a pipeline for good, with what its source's server keeps for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    PipelineArgument,
    installed_files,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.operate.checkpoint import (
    confirm_deletion,
    deleted_state,
    on_terminal,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.config.sources.base import SourceBlock
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control import reset_pipeline
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.specs import last_spec
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.sources.base import RemovableSource
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore


def remove(
    pipeline: PipelineArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    keep_source: Annotated[
        bool,
        typer.Option(
            "--keep-source",
            help="Drop nothing on the source's server, as when it does not exist any more.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Remove a pipeline whose file was deleted: its slot, publication, state and journal.

    What its sinks hold stays. The command lists what it will drop, and asks for confirmation; --yes
    is needed where nobody can be asked. A publication or table that somebody else made stays, and
    so does whatever another pipeline uses.

    The last file's connection string is known, but not its password. On a terminal the command asks
    for it; elsewhere set PGPASSWORD, or name a copy of the file, outside of the folder of pipeline
    files, in place of the pipeline.
    """
    settings = Settings.from_env()
    with opened_store() as store:
        name, file = _named(settings, pipeline)
        row = known_pipeline(store, name)
        files = installed_files(store)
        spec = _spec(store, row, files, file)
        source = None if keep_source or spec is None else build_source(spec)
        try:
            removable = source if isinstance(source, RemovableSource) else None
            spared = set() if spec is None else set(_used_by_others(store, name, spec, files))
            dropped: list[str] = []
            if removable is not None:
                with _with_hints(name):
                    dropped = removable.remove(spared=spared, dry_run=True)
            listed = [*dropped, *deleted_state(store, row)]
            if not yes:
                confirm_deletion(listed)
            # The state goes last: until then, the command can be repeated if a step before fails.
            reset_pipeline.end_run(store, name)
            if removable is not None:
                removable.remove(spared=spared, dry_run=False)
            reset_pipeline.remove(store, Journal(settings.journal_url), name)
        finally:
            if source is not None:
                source.close()
    dagster = None if settings.dagster_url is None else DagsterReload(settings.dagster_url)()
    if json_output:
        typer.echo(json.dumps({"pipeline": name, "dropped": listed, "dagster": dagster}))
        return
    typer.echo(f"{name} is removed. Dropped: {'; '.join(listed)}. What its sinks hold stays.")


def _named(settings: Settings, pipeline: str) -> tuple[str, LoadedPipeline | None]:
    """Return the name of the pipeline that the argument means; and its file, if it is a path."""
    if Path(pipeline).suffix in {".yaml", ".yml"} and Path(pipeline).exists():
        _, file = select_pipeline(settings, pipeline)
        return file.name, file
    return pipeline, None


def _spec(
    store: StateStore,
    row: PipelineRow,
    files: Iterable[AnyPipeline],
    file: LoadedPipeline | None,
) -> PipelineSpec | None:
    """Return the spec to connect to the source with: that of a file, or the last one that was used.

    The last one was stored without secrets; on a terminal the user is asked for the password. None
    if there is no spec.

    Raises:
        NotAllowed: The pipeline still has its file, with which it would start again.
    """
    for installed in files:
        if installed.name == row.name and installed.path is not None:
            raise NotAllowed(
                f"pipeline {row.name!r} still has its file {installed.path}, with which it would "
                "start again: delete the file or move it elsewhere, then run this again"
            )
        if installed.name == row.name and isinstance(installed, LoadedPipeline):
            return installed.spec
    if file is not None:
        return file.spec
    spec = last_spec(store, row)
    if spec is None:
        return None
    block = spec.spec.source
    kind = source_types()[block.type]
    if not kind.masked(block.config):
        return spec
    secret = None
    if on_terminal() and "PGPASSWORD" not in os.environ:
        secret = typer.prompt(
            f"Password or token of {'/'.join(kind.database_place(block.config))}",
            "",
            hide_input=True,
            err=True,
        )
    config = kind.with_secret(block.config, secret or None)
    content = spec.spec.model_copy(update={"source": block.model_copy(update={"config": config})})
    return spec.model_copy(update={"spec": content})


def _used_by_others(
    store: StateStore, name: str, spec: PipelineSpec, files: Iterable[AnyPipeline]
) -> Iterator[str]:
    """Yield the names on the source's server that other pipelines use."""
    specs = {
        other.name: other.spec for other in files if isinstance(other, LoadedPipeline)
    } | {  # a pipeline whose file cannot be loaded now still needs its slot
        row.name: last
        for row in store.pipelines.read()
        if (last := last_spec(store, row)) is not None
    }
    own = _database(spec.spec.source)
    for other, theirs in specs.items():
        block = theirs.spec.source
        if other != name and _database(block) == own:
            yield from map(str, source_types()[block.type].names(block.config, other).values())


def _database(block: SourceBlock) -> tuple[str, ...]:
    return (block.type, *source_types()[block.type].database_place(block.config))


@contextmanager
def _with_hints(name: str) -> Iterator[None]:
    """Add hints to errors of the source: what to do without its password, or without the server."""
    try:
        yield
    except DeltaforgeError as error:
        raise DeltaforgeError(
            f"{error}. Nothing was removed. If the server wants a password: set PGPASSWORD, "
            f"or name a copy of the pipeline's file in place of {name}; "
            f"if it is gone for good: deltaforge remove {name} --keep-source"
        ) from error
