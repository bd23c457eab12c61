"""Publication: writes the materializations of ranges into Dagster's event log.

Both a live run, while it works (`RunObserver`), and a sensor tick call `publish`. Their events are
reported without a run, which Dagster+ does not charge for; they link to the run all the same. A
run that was started for chosen partitions writes its events as its own (`materialize`), since a
backfill counts only those. With `engine.dagster.events`, the others may be left out.

The event is written first, its `published` row second. A call that finds an event without the row
(a run was killed between the two) writes only the row, so that a range is published once.

A materialization links to the run that produced it, and to the range's first file in the journal;
the other files are in the same directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from deltaforge_dagster.assets.lake_tables import publish_writes
from deltaforge_dagster.assets.names import asset_key, partition_key, partitions_name
from deltaforge_dagster.assets.schemas import publish_versions
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES, Publication, Value, pending
from deltaforge_dagster.pipeline.failpoints import failpoint

if TYPE_CHECKING:
    from deltaforge_dagster.journal.files import Journal
    from deltaforge_dagster.pipeline.run_context import RunContext
    from deltaforge_dagster.state.store import StateStore

Emit = Callable[[dg.AssetMaterialization], None]
_CODE_VERSION = "dagster/code_version"
_DATA_VERSION = "dagster/data_version"
_INPUT_VERSION = "dagster/input_data_version"
_INPUT_EVENT = "dagster/input_event_pointer"


def publish(
    instance: dg.DagsterInstance,
    store: StateStore,
    pipeline: str,
    emit: Emit,
    journal: Journal,
    *,
    wanted: Callable[[Publication], bool] = lambda _: True,
) -> int:
    """Publish everything due, in range order; return how many materializations were written.

    What is not wanted counts as published without one.
    """
    # Definitions import this module, and need no database.
    from deltaforge_dagster.state.since import UNREPORTED  # noqa: PLC0415

    written = 0
    for publication in pending(store, pipeline):
        add_partition(instance, pipeline, publication.range)
        if not wanted(publication):
            store.pipelines.note_since(pipeline, UNREPORTED)
        elif not _is_recorded(instance, pipeline, publication):
            emit(materialization(pipeline, publication, journal))
            written += 1
        store.ranges.mark_published(pipeline, publication.range, publication.asset)
    return written


def add_partition(instance: dg.DagsterInstance, pipeline: str, number: int) -> None:
    """Add a range to Dagster's partitions, if it is not there yet."""
    instance.add_dynamic_partitions(partitions_name(pipeline), [partition_key(number)])


def materialization(
    pipeline: str,
    publication: Publication,
    journal: Journal,
    more: Mapping[str, Value] | None = None,
) -> dg.AssetMaterialization:
    """Return the event for a publication, with additional metadata if given."""
    return dg.AssetMaterialization(
        asset_key=asset_key(pipeline, publication.asset),
        partition=partition_key(publication.range),
        metadata={
            **_links(publication, journal),
            **publication.metadata,
            **(more or {}),
        },
        tags=_provenance(pipeline, publication),
    )


def _links(publication: Publication, journal: Journal) -> dict[str, dg.MetadataValue[Any]]:
    """Return the metadata that links a range to its run and to its first file."""
    links: dict[str, dg.MetadataValue[Any]] = {}
    if publication.run_id is not None:
        links["run"] = dg.MetadataValue.dagster_run(publication.run_id)
    if publication.file is not None:
        links["journal"] = dg.MetadataValue.path(journal.spark_path(publication.file))
    return links


def _provenance(pipeline: str, publication: Publication) -> dict[str, str]:
    """Return the tags with code version, data version and input versions.

    They are those that Dagster writes for yielded results.

    The data version of a range is its content hash in every asset. It stays the same when the range
    is verified or replayed again, so only a changed spec makes a range stale.
    """
    if publication.code_version is None:
        return {}
    data = str(publication.metadata["content_hash"])
    tags = {_CODE_VERSION: publication.code_version, _DATA_VERSION: data}
    if publication.asset != CHANGES:
        source = asset_key(pipeline, CHANGES).to_user_string()
        tags[f"{_INPUT_VERSION}/{source}"] = data
        tags[f"{_INPUT_EVENT}/{source}"] = "NULL"
    return tags


def recorded(
    instance: dg.DagsterInstance, pipeline: str, asset: str, number: int
) -> dg.AssetMaterialization | None:
    """Return the newest materialization of a range in Dagster's event log, or None."""
    page = instance.fetch_materializations(
        dg.AssetRecordsFilter(
            asset_key=asset_key(pipeline, asset), asset_partitions=[partition_key(number)]
        ),
        limit=1,
    )
    return page.records[0].asset_materialization if page.records else None


def _is_recorded(instance: dg.DagsterInstance, pipeline: str, publication: Publication) -> bool:
    """Return whether Dagster has the event of this range, not of an earlier one with its number.

    Range numbers start again if the state store is deleted and Dagster's storage is kept.
    """
    event = recorded(instance, pipeline, publication.asset, publication.range)
    if event is None:
        return False
    hashed = event.metadata.get("content_hash")
    return hashed is not None and hashed.value == publication.metadata["content_hash"]


class RunObserver:
    """Publishes a run in Dagster: partitions when ranges open, events when they are due.

    Args:
        context: The Dagster context of the run.
        run_context: State store and journal.
        loaded: The pipeline.
        chosen: The assets and ranges for which somebody started the run: their events are its own.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        run_context: RunContext,
        loaded: LoadedPipeline,
        chosen: Iterable[tuple[str, int]] = (),
    ) -> None:
        self._context = context
        self._run_context = run_context
        self._loaded = loaded
        self._chosen = set(chosen)
        self._chosen_keys = {
            (asset_key(loaded.name, asset), partition_key(number)) for asset, number in self._chosen
        }

    def range_opened(self, number: int) -> None:
        """Add the range as a partition."""
        add_partition(self._context.instance, self._loaded.name, number)

    def publish(self) -> None:
        """Publish the ranges, table versions and commits to tables that are due."""
        instance, run_context = self._context.instance, self._run_context
        name = self._loaded.name
        report = instance.report_runless_asset_event
        publish(
            instance,
            run_context.store,
            name,
            self._emit,
            run_context.journal,
            wanted=lambda publication: (
                self._loaded.spec.spec.engine.dagster.reports_ranges
                or (publication.asset, publication.range) in self._chosen
            ),
        )
        publish_versions(instance, run_context.store, name, report)
        publish_writes(instance, run_context.store, self._loaded, report)

    def warn(self, message: str) -> None:
        """Log a warning."""
        self._context.log.warning(message)

    def _emit(self, event: dg.AssetMaterialization) -> None:
        if (event.asset_key, event.partition) in self._chosen_keys:
            self._context.log_event(event)
        else:
            self._context.instance.report_runless_asset_event(event)
        failpoint("range-published")
