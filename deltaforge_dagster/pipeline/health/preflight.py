"""Check that the source, the sinks, the journal and tables are as a pipeline needs them.

The source is inspected at the pipeline's current position, by `deltaforge check` and by the asset
check `preflight` at the end of each run. Each sink must be reachable, and the destinations of its
messages must exist. That uses the pipeline's own credentials, and writes nothing. If only sending
could prove a permission, or if destinations depend on the changes, the finding says so.

`engine.journal.confirm: auto` lets the source discard its log only if the journal survives the loss
of a machine, which its files and the state store that describes them must survive. Some lake tables
may have files of earlier releases that only Spark reads correctly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deltaforge_dagster.config.engine import JournalLimits
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import AvroEncoding, MessageSinkConfig, SinkBlock, SinkConfig
from deltaforge_dagster.config.sources import SourceBlock
from deltaforge_dagster.config.templates import filled
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.snapshots.request import is_snapshot_expected
from deltaforge_dagster.sinks.registry import LakeSinkType, SinkContext, sink_types
from deltaforge_dagster.sinks.tables.writer import PREFIX
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.registry import parse_position, source_types
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite

_OBJECT_STORAGE = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2"}
)
"""The schemes of fsspec whose files are on object storage."""


_TIMESTAMP = re.compile(r"\btimestamp\b")
"""Matches types of columns with timestamps that may be INT96.

Spark calls timestamps without a time zone `timestamp_ntz`, and never wrote these as INT96.
"""


def preflight_source(
    source: Source, store: StateStore | None, loaded: LoadedPipeline
) -> list[Finding]:
    """Return the findings for the source; a server that cannot be reached is a finding, too.

    Args:
        source: The pipeline's source; stays open.
        store: The state store, None when nothing has run yet.
        loaded: The pipeline.
    """
    row = store.pipelines.get(loaded.name) if store is not None else None
    text = row and (row.captured_position or row.start_position)
    newest = store.ranges.read(loaded.name, newest_first=True, limit=1) if store is not None else ()
    try:
        return source.preflight(
            parse_position(text) if text else None,
            newest[0].last_ts_us / 1e6 if newest else None,
            snapshot=is_snapshot_expected(store, loaded),
        )
    except DeltaforgeError as error:
        return [Finding("connection", "error", str(error))]


def preflight_sinks(
    declared: Sequence[SinkBlock], context: SinkContext, destinations: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """Return the findings for each sink, in the file's order; sinks are checked concurrently.

    Args:
        declared: The sinks, as in the file.
        context: The pipeline; `brief` must be set.
        destinations: By sink id, the destinations of its messages; a template if they depend on
            changes.
    """
    with ThreadPoolExecutor(max(1, len(declared)), "preflight") as threads:
        futures = [
            threads.submit(_preflight, sink, context, destinations[sink.config.id])
            for sink in declared
        ]
        return [finding for future in futures for finding in future.result()]


def sink_destinations(sink: SinkConfig, source: SourceBlock) -> list[str]:
    """Return the destinations of a sink, with unknown variables left as they are.

    `${source.table}` and its schema or database are known if no pattern in `tables` has a wildcard.
    """
    kind = source_types()[source.type]
    names = [kind.table_variables(pattern) for pattern in source.config.tables]
    if not names or any("*" in part or "%" in part for name in names for part in name.values()):
        names = [{}]
    return list(dict.fromkeys(filled(sink.destination, sink.variables(name)) for name in names))


def durability_gaps(options: JournalLimits, journal_url: str, store_url: str) -> list[str]:
    """Return what is not durable, each with what would change that; empty if everything is.

    Args:
        options: `engine.journal` of the pipeline.
        journal_url: URL of the journal.
        store_url: URL of the state store.
    """
    gaps = []
    journal, store = _scheme(journal_url), _scheme(store_url)
    if journal == "memory" or (journal not in _OBJECT_STORAGE and not options.durable_disk):
        gaps.append(
            "the journal is not on object storage (DELTAFORGE_JOURNAL_URL), nor on a disk that the "
            "file declares durable (engine.journal.durable_disk)"
        )
    if store == "memory" or (store == "sqlite" and not options.durable_disk):
        gaps.append(
            "the state store is not in PostgreSQL (DELTAFORGE_STATE_URL), nor on a disk that the "
            "file declares durable (engine.journal.durable_disk)"
        )
    return gaps


def confirm_findings(spec: PipelineSpec, journal_url: str, store_url: str) -> list[Finding]:
    """Return whether `confirm: auto` can take effect.

    The list is empty for another `confirm`, and for a source whose server retains no log for a
    pipeline.
    """
    options = spec.spec.engine.journal
    if options.confirm != "auto" or not source_types()[spec.spec.source.type].retains_log:
        return []
    gaps = durability_gaps(options, journal_url, store_url)
    if not gaps:
        text = "the log is confirmed up to what the journal has while sinks are far behind"
        return [Finding("confirm", "ok", text)]
    return [
        Finding(
            "confirm",
            "note",
            "engine.journal.confirm: auto confirms only what was delivered, so the server retains "
            "its log while a sink is down: " + "; ".join(gaps),
        )
    ]


def int96_findings(store: StateStore | None, loaded: LoadedPipeline) -> list[Finding]:
    """Return a warning for each table whose files may have the source's timestamps as INT96."""
    return [] if store is None else list(_findings(store, loaded))


def _preflight(declared: SinkBlock, context: SinkContext, names: Sequence[str]) -> list[Finding]:
    kind, config = sink_types()[declared.type], declared.config
    try:
        findings = kind.preflight(config, context, names)
    except DeltaforgeError as error:
        subject = f"sink {config.id}"
        findings = [Finding(subject, "error", str(error).removeprefix(f"{subject}: "))]
    if isinstance(config, MessageSinkConfig) and isinstance(config.encoding, AvroEncoding):
        # It loads an HTTP client, which ticks and runs do not need.
        from deltaforge_dagster.sinks import schema_registry  # noqa: PLC0415 - see above

        findings = [*findings, *schema_registry.findings(config.id, config.encoding, names)]
    return findings


def _scheme(url: str) -> str:
    return url.partition(":")[0].partition("+")[0].lower()


def _findings(store: StateStore, loaded: LoadedPipeline) -> Iterator[Finding]:
    kinds = {block.config.id: sink_types()[block.type] for block in loaded.spec.spec.sinks}
    for stored in store.table_commits.tables(loaded.name):
        kind, write = kinds.get(stored.sink), stored.write
        if not isinstance(kind, LakeSinkType) or not kind.had_int96 or write.int64_timestamps:
            continue
        columns = _timestamps(write)
        if columns:
            yield Finding(
                f"sink {stored.sink}",
                "warning",
                f"table {'.'.join(write.destination)} has files of an earlier release with "
                f"timestamps as INT96 ({', '.join(columns)}): where they are before 1678 or after "
                "2262, readers other than Spark (delta-rs, for one) read other times without an "
                "error",
                f"deltaforge resync {loaded.name} --sink {stored.sink} "
                f"--tables {'.'.join(write.source)}",
            )


def _timestamps(write: TableWrite) -> list[str]:
    """Return the source's timestamp columns.

    DeltaForge's own columns are left out: their times are never before 1678 or after 2262.
    """
    return [
        name
        for name, type_ in write.columns
        if _TIMESTAMP.search(type_) and not name.lower().startswith(PREFIX)
    ]
