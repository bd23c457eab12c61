"""The sensor that compares Dagster's definitions with pipeline files, and has Dagster reload them.

Definitions are only as new as the loaded code location. A pipeline that was added, changed or
removed since then appears once the location is reloaded, and so does a lake table that was written
for the first time. That happens by itself if the webserver's URL is known (`deltaforge dev` and
`demo`, or `DELTAFORGE_DAGSTER_URL`), else when a user presses Reload, as the tick's message says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache as once
from typing import TYPE_CHECKING

import dagster as dg

from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import lake_table_key
from deltaforge_dagster.config.file.load import BrokenPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, without_file
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from deltaforge_dagster.sensors.every_tick import NOT_WELL, TickCache, red

if TYPE_CHECKING:
    from deltaforge_dagster.sensors.launches import LaunchWatch
    from deltaforge_dagster.state.store import StateStore

_INTERVAL_SECONDS = 4
"""In Dagster's daemon this makes five seconds; see `every_tick.interval_seconds`."""

_AGAIN_TICKS = 12  # a minute of ticks
"""Ticks after which a reload is requested again if it had no effect."""


def build_files_sensor(
    name: str,
    pipelines: Sequence[AnyPipeline],
    installed_now: Callable[[StateStore], Sequence[AnyPipeline]],
    tables: Mapping[str, Sequence[KnownTable]],
    cache: TickCache,
) -> dg.SensorDefinition:
    """Return the sensor of the files of pipelines.

    Args:
        name: Its name.
        pipelines: The pipelines that the definitions were built from.
        installed_now: Returns which pipelines there are now.
        tables: The tables that the definitions have, for each pipeline that writes tables.
        cache: The resources that ticks share.
    """
    loaded = _contents(pipelines)
    shown = {
        _table_name(name, table.sink, table.source)
        for name, known in tables.items()
        for table in known
    }
    reload = _Reload()
    forgotten: set[str] = set()

    @once
    def launches() -> LaunchWatch:
        from deltaforge_dagster.sensors.launches import LaunchWatch  # noqa: PLC0415 - as below

        return LaunchWatch()

    @dg.sensor(
        name=name,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Makes Dagster reload pipeline files that were added, changed or removed, and "
        "shows the problems of those that cannot be loaded.",
    )
    def pipeline_files(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        try:
            with cache.lend(context) as (instance, opened):
                # See `live` for why this is imported here.
                from deltaforge_dagster.pipeline.health.health import health  # noqa: PLC0415
                from deltaforge_dagster.pipeline.health.recorded import note_broken  # noqa: PLC0415
                from deltaforge_dagster.sensors.history import forget_assets  # noqa: PLC0415
                from deltaforge_dagster.sensors.report import report_health  # noqa: PLC0415

                installed = installed_now(opened.store)
                launches().look(instance, opened.store, [pipeline.name for pipeline in installed])
                written = {
                    _table_name(name, stored.sink, stored.write.source)
                    for name in tables
                    for stored in opened.store.table_commits.tables(name)
                }
                for pipeline in installed:
                    if isinstance(pipeline, BrokenPipeline):
                        note_broken(opened.store, pipeline.name)
                        if pipeline.name in loaded:
                            report_health(
                                instance,
                                opened.store,
                                pipeline.name,
                                health(opened.store, pipeline),
                            )
                rows = [row for row in opened.store.pipelines.read() if row.name in loaded]
                for gone in without_file(rows, installed):
                    note_broken(opened.store, gone.name)
                # Before or after the reload that takes a removed pipeline out of the definitions;
                # while it is in them, its sensors may report something again.
                removed = opened.store.pipelines.removed() - {
                    pipeline.name for pipeline in installed
                }
                forget_assets(instance, removed - forgotten)
                forgotten.update(removed - loaded.keys())
                dagster_url = opened.settings.dagster_url
        except DeltaforgeError as error:
            return red(dg.SkipReason(f"{NOT_WELL}{error}"))
        messages = [
            f"{NOT_WELL}{pipeline.error}"
            for pipeline in installed
            if isinstance(pipeline, BrokenPipeline)
        ]
        changes = _differences(loaded, _contents(installed))
        if added := written - shown:
            new = f"new tables: {', '.join(sorted(added))}"
            changes = f"{changes}; {new}" if changes else new
        if changes:
            messages.append(f"{changes}: {reload.ask(changes, dagster_url)}")
        return red(dg.SkipReason("; ".join(messages) or "Dagster's definitions are up to date"))

    return pipeline_files


class _Reload:
    """Requests the webserver to reload the code location, in a thread, without waiting for it.

    Waiting is not possible: this process is the code server, which the reload replaces.
    """

    def __init__(self) -> None:
        self._requested_changes: str | None = None
        self._ticks = 0
        self._answer = ""

    def ask(self, changes: str, url: str | None) -> str:
        """Request a reload, unless one was requested for the same changes recently.

        Args:
            changes: What has changed, as text.
            url: The webserver; None if none is known, so that a user has to reload.

        Returns:
            The status as text.
        """
        if url is None:
            return "press Reload in the UI (Deployment, Code locations)"
        self._ticks += 1
        if changes != self._requested_changes or self._ticks > _AGAIN_TICKS:
            self._requested_changes, self._ticks, self._answer = changes, 0, ""
            threading.Thread(target=self._request, args=(url,), name="reload", daemon=True).start()
        return self._answer or "Dagster was asked to reload"

    def _request(self, url: str) -> None:
        self._answer = DagsterReload(url)()


def _contents(pipelines: Sequence[AnyPipeline]) -> dict[str, AnyPipeline]:
    return {pipeline.name: pipeline for pipeline in pipelines}


def _table_name(pipeline: str, sink: str, source: tuple[str, str]) -> str:
    """Return the name of the asset of a table of a sink."""
    return lake_table_key(pipeline, sink, source).to_user_string()


def _differences(loaded: Mapping[str, AnyPipeline], current: Mapping[str, AnyPipeline]) -> str:
    """Return which pipelines are new, gone or changed, as text; empty if none is."""
    parts = [
        (word, sorted(names))
        for word, names in (
            ("new", current.keys() - loaded.keys()),
            ("gone", loaded.keys() - current.keys()),
            (
                "changed",
                {
                    name
                    for name in current.keys() & loaded.keys()
                    if _content(current[name]) != _content(loaded[name])
                },
            ),
        )
    ]
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts if names)


def _content(pipeline: AnyPipeline) -> str:
    """Return a string that differs between two versions whose definitions may differ."""
    return str(pipeline.error) if isinstance(pipeline, BrokenPipeline) else pipeline.hash
