"""Which sinks lack rows because the source's log lacks changes (`state.gaps`), and the remedy.

A sink that writes tables needs the table to be loaded again (`deltaforge resync`), because it may
contain rows that no longer exist. For other sinks, and for a table that the log got only later, a
snapshot of the table delivers the rows that exist. A gap is over for a sink once such a snapshot is
in the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import Commands
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.state.records import CheckpointRow
from deltaforge_dagster.state.snapshot_records import RECOVERY, UNFINISHED, SnapshotRow
from deltaforge_dagster.state.source_state import Gap
from deltaforge_dagster.state.store import StateStore


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
    begun = {(resync.sink, resync.table_name) for resync in store.lake_commits.resyncs(name)}
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
        sinks = [sink for sink in sinks if not _loaded(gap, sink, snapshots, ("spliced",), keeping)]
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
