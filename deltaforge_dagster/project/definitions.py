"""The definitions of one pipeline, to be merged with others of a project."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from deltaforge_dagster.assets.translator import DeltaforgeTranslator, translate
from deltaforge_dagster.errors import SettingsError, SpecError

if TYPE_CHECKING:  # see the package: projects that do not use this must not pay for it
    from deltaforge_dagster.config.file.load import BrokenPipeline
    from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
    from deltaforge_dagster.sensors.watch_room import WatchRoom

logger = logging.getLogger(__name__)


def pipeline_definitions(
    file_or_spec: str | os.PathLike[str] | Mapping[str, Any],
    *,
    installation: Mapping[str, str] | None = None,
    translator: DeltaforgeTranslator | None = None,
    folder: Path | None = None,
) -> dg.Definitions:
    """Return the definitions of one pipeline, for `dagster.Definitions.merge`.

    They have no executor and no resources, and every name in them has the pipeline's, so they can
    be merged with whatever a project has. Nothing is connected to but the state store, if there is
    one: to show the tables that sinks have written. Code that calls this as often as Dagster loads
    the definitions needs no other command of ours.

    A pipeline that cannot be loaded is an asset with a failing check, and the others load; only
    `dg check defs` and `dagster definitions validate` fail.

    Args:
        file_or_spec: A pipeline file, or its content: a mapping with `metadata` and `spec`, whose
            text may name environment variables as `{{ env.NAME }}`. It is read again by each run
            and tick if it is a file.
        installation: `home`, `state_url`, `journal_url`, `spark_remote`, `lake_jars`: what the
            environment variables `DELTAFORGE_HOME` and so on mean, which win. Values may be
            `{{ env.NAME }}`, which is read when it is needed, not when definitions are loaded.
        translator: Says what the assets look like.
        folder: What relative paths in `installation` are relative to, and where `.deltaforge` is
            if nothing says where the home is; the current directory by default.

    Raises:
        SettingsError: `installation` has an unknown name.
        SpecError: The pipeline is invalid, and definitions are only validated.
    """
    from deltaforge_dagster.config.file.load import load_files, load_inline  # noqa: PLC0415

    folder = (Path.cwd() if folder is None else folder).absolute()
    if isinstance(file_or_spec, Mapping):
        return definitions_of(
            load_inline("pipeline", file_or_spec, folder), installation or {}, translator, folder
        )
    path = Path(file_or_spec).absolute()
    pipelines = load_files([path])
    if len(pipelines) != 1:
        raise SpecError(f"{path}: has {len(pipelines)} pipelines (name a file that has one)")
    return definitions_of(pipelines[0], installation or {}, translator, folder)


def definitions_of(
    pipeline: AnyPipeline,
    installation: Mapping[str, str],
    translator: DeltaforgeTranslator | None,
    folder: Path,
) -> dg.Definitions:
    """Return the definitions of a pipeline that was loaded; see `pipeline_definitions`."""
    from deltaforge_dagster.assets.names import SharedNames  # noqa: PLC0415
    from deltaforge_dagster.config.file.load import BrokenPipeline  # noqa: PLC0415
    from deltaforge_dagster.config.settings import (  # noqa: PLC0415
        INSTALLATION_FIELDS,
        project_settings,
    )
    from deltaforge_dagster.definitions import compose  # noqa: PLC0415
    from deltaforge_dagster.pipeline.control.catalog import still_installed  # noqa: PLC0415
    from deltaforge_dagster.resources.platform import Platform  # noqa: PLC0415

    for name in installation.keys() - INSTALLATION_FIELDS:
        fields = ", ".join(INSTALLATION_FIELDS)
        raise SettingsError(f"installation.{name}: is not known (known are {fields})")
    platform = Platform(lambda: project_settings(installation, folder))

    def composed(pipeline: AnyPipeline) -> dg.Definitions:
        return compose(
            [pipeline],
            platform,
            lambda store: still_installed(store, [pipeline]),
            SharedNames.of_pipeline(pipeline.name),
            _watch_room(),
        )

    if isinstance(pipeline, BrokenPipeline):
        pipeline = _unless_validated(pipeline)
    translate(pipeline.name, translator)
    try:
        return composed(pipeline)
    except SpecError as error:  # of the translation
        where = f"{pipeline.path}: " if pipeline.path else ""
        problems = [f"{where}{problem}" for problem in error.problems]
        broken = BrokenPipeline(None, pipeline.name, SpecError(*problems), in_code=True)
        translate(pipeline.name, None)
        return composed(_unless_validated(broken))


@cache
def _watch_room() -> WatchRoom:
    """Return what all pipelines of this process share, whichever component has them."""
    from deltaforge_dagster.sensors.watch_room import WatchRoom  # noqa: PLC0415

    return WatchRoom()


def _unless_validated(broken: BrokenPipeline) -> BrokenPipeline:
    """Return a broken pipeline, to be shown as an asset with a failing check.

    Raises:
        SpecError: Definitions are only validated. If the pipeline lacks variables, which another
            process may have, this is logged instead.
    """
    if not os.environ.get("DAGSTER_IS_DEFS_VALIDATION_CLI"):
        return broken
    if broken.unset:
        names = ", ".join(broken.unset)
        logger.warning("%s is not checked: %s not set in this process", broken.name, names)
        return broken
    raise broken.error
