"""Pipelines: registration, start, desired state, positions, and documents of those without a file.

A document is JSON text as a user supplied it, including secrets, so only the code that loads
pipelines reads it. Its version increases with each change, so that of two concurrent changes one
fails.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any
from uuid import uuid4

import orjson
from sqlalchemy import Connection, delete, func, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state import legacy, metrics, since, snapshots
from deltaforge_dagster.state.checkpoints import status_columns
from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    find_pipeline,
    known_pipeline,
    kv,
    leases,
    log,
    metadata,
    pipelines,
    position_before,
    queue,
    read_checkpoints,
    read_rows,
    segments,
    slot,
    stored_specs,
    table_commits,
    table_pending,
    table_resyncs,
    table_writes,
)
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.ranges import CHANGES
from deltaforge_dagster.state.records import (
    CheckpointRow,
    DesiredState,
    EarlyConfirmation,
    Failure,
    LogLook,
    NotedFinding,
    PipelineRow,
    SinkStart,
    SourceLog,
)
from deltaforge_dagster.state.since import read_early, write_early
from deltaforge_dagster.state.source_state import DefinitionWrites

_LAUNCHES = "launches"
_CODE = "code"
_LOG = "log"
_LOOKS = "looks"
_NUMBERS = "numbers"
"""Namespace of the next segment and range numbers of removed pipelines.

A pipeline that is created again under such a name begins with them.
"""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A pipeline's document; `version` counts its changes from 1."""

    name: str
    document: str
    version: int


class PipelineRepository:
    """All pipelines and their documents: `StateStore.pipelines`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(
        self,
        name: str,
        spec_hash: str,
        sinks: Sequence[str],
        starts: Mapping[str, SinkStart] | None = None,
        *,
        stored: bool = False,
    ) -> PipelineRow:
        """Make the store agree with a pipeline's file; change nothing if it already does.

        The first registration gives the pipeline its uid, and every sink starts with segment 1. A
        sink added later starts where the sink that is furthest behind will resume (or at the start
        of the journal if there was no sink); the checkpoint's `began` describes where. The
        checkpoint of a sink that is no longer listed is deleted. While a run holds the lease, its
        deliverer may still be active, so a later call deletes the checkpoint. A renamed sink counts
        as a new one.

        Args:
            name: Name of the pipeline.
            spec_hash: Hash of the file.
            sinks: Ids of its sinks.
            starts: Where sinks that are added now start instead.
            stored: Whether the store itself keeps the pipeline's document.

        Raises:
            NotAllowed: A sink is called `changes`, the name of another asset; or the document and
                with it the pipeline have been deleted.
        """
        if CHANGES in sinks:
            raise NotAllowed(f"pipeline {name!r}: a sink cannot be called {CHANGES!r}")
        with self._database.read() as connection:
            row = find_pipeline(connection, name)
            existing = set(read_checkpoints(connection, name))
        if row is not None and (row.spec_hash, existing) == (spec_hash, set(sinks)):
            return row
        with self._database.write() as connection:
            if stored:
                _check_kept(connection, name)
            return _register(connection, name, spec_hash, sinks, starts or {})

    def get(self, name: str) -> PipelineRow | None:
        """Return a pipeline, or None if it was never registered."""
        with self._database.read() as connection:
            return find_pipeline(connection, name)

    def read(self) -> list[PipelineRow]:
        """Return all pipelines, sorted by name."""
        with self._database.read() as connection:
            return sorted(read_rows(connection, PipelineRow), key=lambda row: row.name)

    def set_start(
        self,
        name: str,
        position: str,
        definitions: Mapping[str, str] | None = None,
        *,
        has: Mapping[str, str] | None = None,
        source_id: str | None = None,
    ) -> PipelineRow:
        """Set the pipeline's start position, if it has none yet, and return the pipeline.

        If several processes call this, one of them wins, and all get its position. The start
        position also becomes the source position of checkpoints without one, and the table
        definitions at this position are stored with it (`source_state`).

        Args:
            name: Name of the pipeline.
            position: The start position, JSON text.
            definitions: Table definitions at this position.
            has: Sinks that already have everything up to a later position, JSON text, by id.
            source_id: Id of the source whose imported checkpoints (`legacy`) are now used up.
        """
        with self._database.write() as connection:
            won = connection.execute(
                update(pipelines)
                .where(pipelines.c.name == name, pipelines.c.start_position.is_(None))
                .values(start_position=position)
            )
            if won.rowcount:
                connection.execute(
                    update(checkpoints)
                    .where(checkpoints.c.pipeline == name, checkpoints.c.source_position.is_(None))
                    .values(source_position=position)
                )
                for sink, up_to in (has or {}).items():
                    connection.execute(
                        update(checkpoints)
                        .where(checkpoints.c.pipeline == name, checkpoints.c.sink == sink)
                        .values(skip=up_to)
                    )
                if source_id is not None:
                    legacy.forget(connection, source_id)
                DefinitionWrites(connection, name).define(definitions or {}, position)
            return known_pipeline(connection, name)

    def set_desired_state(self, name: str, state: DesiredState) -> None:
        """Set the pipeline's desired state; a run sees it when it next renews its lease."""
        with self._database.write() as connection:
            lock_lease(connection, name)
            before = known_pipeline(connection, name).desired_state
            connection.execute(
                update(pipelines).where(pipelines.c.name == name).values(desired_state=state)
            )
            metrics.count(connection, name, metrics.of_desired_state(before, state))

    def try_again(self, name: str) -> None:
        """Let the next run try every sink at once, and the next tick the source."""
        with self._database.write() as connection:
            this = checkpoints.c.pipeline == name
            connection.execute(update(checkpoints).where(this).values(next_attempt_at=0.0))
            this = pipelines.c.name == name
            connection.execute(update(pipelines).where(this).values(probe_after=0.0))

    def set_probe(self, name: str, after: float, wait: float) -> None:
        """Set when the sensor may next query the source, and the back-off until then in seconds."""
        self._update(name, probe_after=after, probe_wait=wait)

    def set_failure(self, name: str, failure: Failure | None) -> None:
        """Record why nothing is captured now, or None once capture works again."""
        text = None if failure is None else json.dumps(asdict(failure))
        self._update(name, failure=text)

    def note_file(self, name: str, file: str | None) -> None:
        """Record the path of the pipeline's file; None if the store keeps the document."""
        self._update(name, file=file)

    def note_tick(self, name: str, outdated_since: float | None = None) -> None:
        """Record a tick of a sensor or schedule, and since when its definitions are outdated."""
        self._update(name, ticked_at=self._database.now(), outdated_since=outdated_since)

    def note_source_seen(self, name: str, findings: Sequence[NotedFinding]) -> None:
        """Record that the source has just answered, and the findings about its configuration."""
        text = json.dumps([asdict(finding) for finding in findings])
        self._update(name, findings=text, source_seen_at=self._database.now())

    def note_launches(self, name: str, failing: Sequence[NotedFinding]) -> None:
        """Record which jobs' runs Dagster could not start."""
        text = json.dumps([asdict(finding) for finding in failing])
        with self._database.write() as connection:
            put_value(connection, _dagster(name), _LAUNCHES, text.encode())

    def launches(self, name: str) -> list[NotedFinding]:
        """Return what `note_launches` last recorded; nothing if it never did."""
        with self._database.read() as connection:
            text = get_value(connection, _dagster(name), _LAUNCHES)
        return [] if text is None else [NotedFinding(**finding) for finding in json.loads(text)]

    def note_code(self, name: str, code: str) -> None:
        """Record which code ticks for a pipeline: its version, and the image that has it."""
        with self._database.write() as connection:
            put_value(connection, _dagster(name), _CODE, code.encode())

    def code(self, name: str) -> str | None:
        """Return what `note_code` last recorded; None if it never did."""
        with self._database.read() as connection:
            code = get_value(connection, _dagster(name), _CODE)
        return None if code is None else code.decode()

    def note_source_log(
        self, name: str, seen: SourceLog, looks: Sequence[LogLook] | None = None
    ) -> None:
        """Record what was seen of the source's log, and the looks to keep.

        If `looks` is None, the stored looks are kept.
        """
        with self._database.write() as connection:
            put_value(connection, _source(name), _LOG, json.dumps(asdict(seen)).encode())
            if looks is not None:
                text = json.dumps([astuple(look) for look in looks])
                put_value(connection, _source(name), _LOOKS, text.encode())

    def source_log(self, name: str) -> SourceLog | None:
        """Return what `note_source_log` last recorded; None if it never did."""
        with self._database.read() as connection:
            text = get_value(connection, _source(name), _LOG)
        return None if text is None else SourceLog(**json.loads(text))

    def log_looks(self, name: str) -> list[LogLook]:
        """Return the looks at the source's log that `note_source_log` last kept, in order."""
        with self._database.read() as connection:
            text = get_value(connection, _source(name), _LOOKS)
        return [] if text is None else [LogLook(*look) for look in json.loads(text)]

    def early_confirmation(self, name: str) -> EarlyConfirmation | None:
        """Return since when and why the log is confirmed before delivery; None if it is not."""
        with self._database.read() as connection:
            return read_early(connection, name)

    def note_since(self, name: str, condition: str) -> None:
        """Record that a condition of `state.since` begins now."""
        with self._database.write() as connection:
            since.begin(connection, name, condition)

    def since(self, name: str, condition: str) -> float | None:
        """Return when a condition of `state.since` last began; None if that was not recorded."""
        with self._database.read() as connection:
            return since.read_since(connection, name, condition)

    def documents(self) -> list[StoredSpec]:
        """Return all stored documents, sorted by name."""
        with self._database.read() as connection:
            return _read_documents(connection)

    def document(self, name: str) -> StoredSpec | None:
        """Return the document of one pipeline, or None if it has a file or does not exist."""
        with self._database.read() as connection:
            documents = _read_documents(connection, name)
        return documents[0] if documents else None

    def add_document(self, name: str, document: str) -> bool:
        """Store a new pipeline's document; return False if the name is taken."""
        with self._database.write() as connection:
            added = connection.execute(
                upsert(connection, stored_specs)
                .values(
                    name=name, document=document, version=1, created_at=clock(), updated_at=clock()
                )
                .on_conflict_do_nothing()
                .returning(stored_specs.c.name)
            )
            return added.first() is not None

    def replace_document(self, name: str, version: int, document: str) -> bool:
        """Replace this version of a document; return False if it has been changed meanwhile."""
        with self._database.write() as connection:
            changed = connection.execute(
                update(stored_specs)
                .where(stored_specs.c.name == name, stored_specs.c.version == version)
                .values(document=document, version=version + 1, updated_at=clock())
            )
            return changed.rowcount == 1

    def remove_document(self, name: str) -> bool:
        """Delete a document only, as when a file has its name; return False if there is none."""
        with self._database.write() as connection:
            return _remove_document(connection, name)

    def remove(self, name: str) -> str | None:
        """Delete a pipeline's document and state: positions, checkpoints, dead letters, and so on.

        Its slot and publication in the source are kept, and so are the files of its journal, which
        are in the directory of the returned uid. Return None if the pipeline was never registered.

        The epoch and the next numbers are kept: if a pipeline of this name is created again, an old
        run cannot write for it, and Dagster does not show a new range as the old one with the same
        number.

        Raises:
            NotAllowed: A run holds the lease.
        """
        with self._database.write() as connection:
            row = find_pipeline(connection, name)
            if row is None:
                _remove_document(connection, name)
                return None
            locked = lock_lease(connection, name)
            if locked.live:
                raise NotAllowed(f"pipeline {name!r} is held by run {locked.run_id}; stop it first")
            _remove_document(connection, name)
            for table in metadata.sorted_tables:
                if "pipeline" in table.c and table is not leases:
                    connection.execute(delete(table).where(table.c.pipeline == name))
            connection.execute(delete(pipelines).where(pipelines.c.name == name))
            for primitive in (kv, log, slot, queue):
                in_namespace = primitive.c.ns.endswith(f"/{name}", autoescape=True)
                connection.execute(delete(primitive).where(in_namespace))
            numbers = orjson.dumps([row.next_segment, row.next_range])
            put_value(connection, _NUMBERS, name, numbers)
            return row.uid

    def removed(self) -> set[str]:
        """Return the names of the pipelines that were removed and have not been created again."""
        with self._database.read() as connection:
            names = connection.execute(select(kv.c.key).where(kv.c.ns == _NUMBERS)).scalars().all()
            existing = connection.execute(select(pipelines.c.name)).scalars().all()
        return {*names} - {*existing}

    def _update(self, name: str, **values: Any) -> None:
        with self._database.write() as connection:
            changed = connection.execute(
                update(pipelines).where(pipelines.c.name == name).values(**values)
            )
            if changed.rowcount == 0:
                raise NotAllowed(f"no pipeline {name!r} in the state store")


class PipelineWrites:
    """Moves the positions of a lease holder's pipeline: `FencedWriter.pipeline`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def set_captured(self, position: str) -> None:
        """Advance the captured position past a part of the log without changes for the pipeline.

        It never moves backwards: if a segment was added meanwhile that ends later, its end remains.
        """
        captured = known_pipeline(self._connection, self._pipeline).captured_position
        if captured is not None:
            before: Position = parse_position(captured)
            after: Position = parse_position(position)
            if after <= before:
                return
        self._update({"captured_position": position})

    def set_capture_pause(self, why: str | None) -> None:
        """Store why capture is paused, or None once it continues."""
        paused = known_pipeline(self._connection, self._pipeline).capture_pause is not None
        if why is not None and not paused:
            since.begin(self._connection, self._pipeline, since.CAPTURE_PAUSED)
        self._update({"capture_pause": why})

    def set_early_confirmation(self, early: EarlyConfirmation | None) -> None:
        """Store since when and why the log is confirmed before delivery; None once it is not."""
        write_early(self._connection, self._pipeline, early)

    def set_confirmed(self, position: str) -> None:
        """Store the committed position, before it is confirmed to the source."""
        self._update({"confirmed_position": position})

    def _update(self, values: Mapping[str, Any]) -> None:
        this = pipelines.c.name == self._pipeline
        self._connection.execute(update(pipelines).where(this).values(**values))


def _dagster(name: str) -> str:
    """Return the namespace of what is recorded about Dagster's work for a pipeline."""
    return f"dagster/{name}"


def _source(name: str) -> str:
    """Return the namespace of what was seen of a pipeline's source."""
    return f"source/{name}"


def _register(
    connection: Connection,
    name: str,
    spec_hash: str,
    sinks: Collection[str],
    starts: Mapping[str, SinkStart],
) -> PipelineRow:
    """Make pipeline, lease and checkpoints agree with the file."""
    _insert_missing(connection, name, spec_hash)
    locked = lock_lease(connection, name)
    connection.execute(
        update(pipelines).where(pipelines.c.name == name).values(spec_hash=spec_hash)
    )
    pipeline = known_pipeline(connection, name)
    existing = read_checkpoints(connection, name)
    at_work = pipeline.captured_position is not None
    gone = sorted(set(existing) - set(sinks))
    for sink in sorted(set(sinks) - set(existing)):
        first, why = _beginning(connection, pipeline, existing.values(), starts.get(sink))
        began = f"added; begins with segment {first}, {why}{_renamed(gone)}" if at_work else None
        position = position_before(connection, pipeline, first)
        connection.execute(
            insert(checkpoints).values(
                pipeline=name,
                sink=sink,
                state="attached",
                first_segment=first,
                overrules=False,  # the sink may hold a position of an earlier state store
                began=began,
                snapshot_due=starts.get(sink) == "snapshot",
                **status_columns(first - 1, -1, True, position),
            )
        )
    if not locked.live:
        for table in (checkpoints, table_commits, table_pending, table_resyncs, table_writes):
            connection.execute(
                delete(table).where(table.c.pipeline == name, table.c.sink.not_in(sorted(sinks)))
            )
        snapshots.cancel_without_sinks(connection, name, sinks)
    return pipeline


def _insert_missing(connection: Connection, name: str, spec_hash: str) -> None:
    segment, number = _first_numbers(connection, name)
    connection.execute(
        upsert(connection, pipelines)
        .values(
            name=name,
            uid=uuid4().hex,
            spec_hash=spec_hash,
            next_segment=segment,
            next_range=number,
            desired_state="running",
            probe_after=0.0,
            probe_wait=0.0,
        )
        .on_conflict_do_nothing()
    )
    connection.execute(
        upsert(connection, leases)
        .values(pipeline=name, epoch=0, expires_at=0.0)
        .on_conflict_do_nothing()
    )


def _beginning(
    connection: Connection,
    pipeline: PipelineRow,
    existing: Collection[CheckpointRow],
    start: SinkStart | None,
) -> tuple[int, str]:
    """Return the first segment for a new sink, and the reason as text."""
    if start == "tail":
        return pipeline.next_segment, "with what was captured after it was added (start: tail)"
    if start == "snapshot":
        return pipeline.next_segment, (
            "with what was captured after it was added; a snapshot brings it the rows of before "
            "(start: snapshot)"
        )
    attached = [row for row in existing if row.attached]
    if attached and start is None:
        last = min(attached, key=lambda row: (row.whole_segment, row.ordinal))
        return last.whole_segment + 1, f"where sink {last.sink}, the slowest, stood"
    query = select(func.min(segments.c.segment)).where(segments.c.pipeline == pipeline.name)
    first = connection.execute(query).scalar() or pipeline.next_segment
    return first, "the journal's oldest" + (" (start: journal)" if start else "")


def _renamed(gone: Collection[str]) -> str:
    if not gone:
        return ""
    return (
        f"; {', '.join(gone)} is no longer in the file: a renamed sink is a new one, so if this is "
        "the same destination, it gets again what lies after that segment, and nothing before it"
    )


def _read_documents(connection: Connection, name: str | None = None) -> list[StoredSpec]:
    """Return all stored documents, sorted by name, or the one with this name."""
    query = select(stored_specs.c.name, stored_specs.c.document, stored_specs.c.version)
    if name is not None:
        query = query.where(stored_specs.c.name == name)
    return sorted(
        (StoredSpec(*row) for row in connection.execute(query)), key=lambda spec: spec.name
    )


def _check_kept(connection: Connection, name: str) -> None:
    """Check that a pipeline's document still exists: it may have been removed since it was loaded.

    Raises:
        NotAllowed: The document was removed.
    """
    if not _read_documents(connection, name):
        raise NotAllowed(f"pipeline {name!r} was removed")


def _remove_document(connection: Connection, name: str) -> bool:
    gone = connection.execute(delete(stored_specs).where(stored_specs.c.name == name))
    return gone.rowcount == 1


def _first_numbers(connection: Connection, name: str) -> tuple[int, int]:
    """Return a new pipeline's first segment and range numbers, beyond any used under its name."""
    value = get_value(connection, _NUMBERS, name)
    if value is None:
        return 1, 1
    segment, number = orjson.loads(value)
    return segment, number
