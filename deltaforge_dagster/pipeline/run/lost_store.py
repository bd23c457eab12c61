"""Check, before a source is read, that the journal belongs to this state store.

A store that was deleted, or replaced by another one, is empty: the pipeline would start from
scratch, and changes in the journal that sinks do not have yet would be skipped silently. The
journal reveals this: it has segments of the pipeline with another uid, and the store has never had
any segment.
"""

from __future__ import annotations

from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.state.store import StateStore


def refuse_lost_store(store: StateStore, journal: Journal, pipeline: str) -> None:
    """Refuse to start a pipeline that is new to the store but has segments in the journal.

    A store in memory is always new, and is not checked.

    Raises:
        NotAllowed: The journal has segments of the pipeline that were recorded in another state
            store.
        StoreUnavailable: The journal cannot be listed.
    """
    row = store.pipelines.get(pipeline)
    if row is None or row.next_segment > 1 or store.database.where == "memory":
        return
    others = journal.written_by_others(pipeline, row.uid)
    if others:
        folders = ", ".join(mask(f"{journal.url}/{folder}") for folder in others)
        raise NotAllowed(
            f"{pipeline}: the journal has segments that this state store knows nothing of "
            f"({folders}): the store was lost, or is another one. Bring it back: "
            "deltaforge state restore FILE --force. Without a copy, what sinks had not got by then "
            "is lost to them: take that folder away, and the pipeline begins as a new one"
        )
