"""What sinks do not get: rows that the source's log lacks (`state.source_state`), and dead letters.

A sink that writes tables needs a table with a gap to be loaded again (`deltaforge resync`), because
it may contain rows that no longer exist. For other sinks, and for a table that the log got only
later, a snapshot of the table delivers the rows that exist. A gap is over for a sink once such a
snapshot is in the journal.

During a run, the queue of dead letters is watched: it warns when the queue fills up, and drops
entries by age.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import Commands
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.state.records import CheckpointRow, DeadLetterDepth
from deltaforge_dagster.state.snapshot_records import RECOVERY, UNFINISHED, SnapshotRow
from deltaforge_dagster.state.source_state import Gap
from deltaforge_dagster.state.store import StateStore

_FIRST_SECONDS = 5.0
_EVERY_SECONDS = 60.0

_WARNING, _ERROR = 0.8, 0.95
"""Shares of `max_entries` from which a queue's size is a warning, and an error."""

Level = Literal["warning", "error"]


@dataclass(frozen=True, slots=True)
class Lack:
    """Sinks that lack a table's rows.

    Attributes:
        gap: Why they lack them.
        text: What is missing, and where.
        remedy: The commands that deliver what is missing; empty if that is under way, or if an
            earlier `Lack` has the commands.
    """

    gap: Gap
    text: str
    remedy: Commands


def sinks_that_lack(
    store: StateStore,
    spec: PipelineSpec,
    gaps: Sequence[Gap],
    checkpoints: Mapping[str, CheckpointRow],
) -> Iterator[Lack]:
    """Yield what sinks lack of tables with gaps.

    Only the first `Lack` has a remedy, which covers all tables: with one snapshot per table, each
    would have to wait for the one before.
    """
    name = spec.metadata.name
    snapshots = store.snapshots.read(name)
    begun = {(resync.sink, resync.table_name) for resync in store.table_commits.resyncs(name)}
    keeping = {
        block.config.id for block in spec.spec.sinks if isinstance(block.config, TableSinkConfig)
    }
    lacking: list[tuple[Gap, list[str]]] = []
    resyncs: dict[str, list[str]] = {}
    reads: tuple[list[str], set[str]] = ([], set())
    for gap in gaps:
        sinks = [sink for sink, row in checkpoints.items() if row.attached]
        if gap.whole:
            sinks = [sink for sink in sinks if sink in keeping]
        sinks = [
            sink for sink in sinks if not _loaded(gap, sink, snapshots, ("complete",), keeping)
        ]
        if not sinks:
            continue
        lacking.append((gap, sinks))
        for sink in sinks:
            if (sink, gap.table) in begun or _loaded(gap, sink, snapshots, UNFINISHED, keeping):
                continue
            if sink in keeping and gap.cause != "new":
                resyncs.setdefault(sink, []).append(gap.table)
            else:
                reads[1].add(sink)
                if gap.table not in reads[0]:
                    reads[0].append(gap.table)
    remedy = [
        f"deltaforge resync {name} --sink {sink} --tables {','.join(tables)}"
        for sink, tables in resyncs.items()
    ]
    if reads[0]:
        # First: a resync waits for a snapshot, which otherwise could not be requested.
        options = f"--tables {','.join(reads[0])} --sinks {','.join(sorted(reads[1]))}"
        remedy.insert(0, f"deltaforge snapshot start {name} {options}")
    for number, (gap, sinks) in enumerate(lacking):
        text = f"{_description(gap)}; this concerns {', '.join(sinks)}"
        text += f" (if nobody needs them there: deltaforge acknowledge {name} --tables {gap.table})"
        yield Lack(gap, text, () if number else tuple(remedy))


class DeadLetterWatch:
    """Watches the queue of one pipeline during a run.

    Args:
        spec: The pipeline.
        store: Where the entries are.
        lease: The run's lease; fences the removal of old entries.
        warn: Called when the queue gets full, and when its limits have removed entries.
    """

    def __init__(
        self, spec: PipelineSpec, store: StateStore, lease: ActiveLease, warn: Callable[[str], None]
    ) -> None:
        self._pipeline = spec.metadata.name
        self._options = spec.spec.journal
        self._store = store
        self._lease = lease
        self._warn = warn
        self._next_look = time.monotonic() + _FIRST_SECONDS
        self._warned_level: Level | None = None
        self._lost: int | None = None

    def poll(self) -> None:
        """Drop entries that are too old, and warn if the queue is full; acts once a minute."""
        if not self._options.enabled or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _EVERY_SECONDS
        if age := self._options.dlq.max_age_secs:
            self._lease.write(lambda writer: writer.dead_letters.expire(age))
        depth = self._store.dead_letters.depth(self._pipeline)
        full = saturation(depth, self._options.dlq.max_entries)
        if full is not None and full[0] != self._warned_level:
            self._warn(f"{self._pipeline}: {full[1]} ({full[0]})")
        self._warned_level = None if full is None else full[0]
        lost = depth.evicted + depth.rejected + depth.expired
        if self._lost is not None and lost > self._lost:
            self._warn(
                f"{self._pipeline}: {lost - self._lost} dead letters were lost to the queue's "
                f"limits lately; so far {depth.evicted} were dropped for newer ones, "
                f"{depth.rejected} rejected, {depth.expired} dropped for their age"
            )
        self._lost = lost


def saturation(depth: DeadLetterDepth, max_entries: int) -> tuple[Level, str] | None:
    """Return the severity of a queue's fill level and a sentence; None if there is enough room."""
    share = depth.entries / max_entries
    if share < _WARNING:
        return None
    level: Level = "error" if share >= _ERROR else "warning"
    return level, f"the dead letters are {share:.0%} full, {depth.entries} of {max_entries} entries"


def _loaded(
    gap: Gap,
    sink: str,
    snapshots: Sequence[SnapshotRow],
    states: Collection[str],
    keeping: Collection[str],
) -> bool:
    """Return whether a snapshot in one of these states gives a sink the rows of a table."""
    replaces = sink in keeping and gap.cause != "new"
    return any(
        snapshot.state in states
        and snapshot.created_at >= gap.until
        and snapshot.condition is None
        and (not snapshot.tables or gap.table in snapshot.tables)
        and (not snapshot.sinks or sink in snapshot.sinks)
        and (not replaces or snapshot.cause in ("resync", RECOVERY))
        for snapshot in snapshots
    )


def _description(gap: Gap) -> str:
    until = _time(gap.until)
    if gap.cause == "new":
        return f"rows written before {until} were not captured, when the log got the table"
    since = "an unknown time" if gap.since is None else _time(gap.since)
    if gap.cause == "away":
        return (
            f"rows written between {since} and {until} were not captured, because the log did not "
            "have the table"
        )
    text = f"the table was dropped and another one made between {since} and {until}"
    if gap.whole:
        return f"{text}: the log does not say that the rows of the former are gone"
    return f"{text}: rows written meanwhile were not captured, nor that the former rows are gone"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
