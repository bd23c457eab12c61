"""Whether the journal survives the loss of a machine, so that the source may discard its log.

Both must survive: the journal's files, and the state store that describes them.
"""

from __future__ import annotations

from deltaforge_dagster.config.engine import JournalLimits
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.registry import source_types

_OBJECT_STORAGE = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2"}
)
"""The schemes of fsspec whose files are on object storage."""


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


def _scheme(url: str) -> str:
    return url.partition(":")[0].partition("+")[0].lower()
