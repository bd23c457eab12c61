"""Stores the results of schema sensing for a pipeline's tables, and its progress.

Keys of the namespace `sensing/{pipeline}`: `progress` is a JSON object (`Progress`); `table/{full
name}` is what is known of a table, in a format that only `deltaforge_dagster.sensing` reads;
`facts/{full name}` is a JSON object of metadata for Dagster. All of them change in one fenced
transaction, so they always reflect the segments up to `segment`, each counted once. The log of the
same namespace holds the changes of schemas, by table or `table:column`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection

from deltaforge_dagster.state import metrics
from deltaforge_dagster.state.database.database import Database
from deltaforge_dagster.state.database.primitives import (
    Kv,
    Log,
    LogEntry,
    append_to_log,
    get_value,
    put_value,
)
from deltaforge_dagster.state.metrics import Tally

_PROGRESS = "progress"
_TABLE = "table/"
_FACTS = "facts/"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of sensing.

    Attributes:
        segment: The last segment that was counted or skipped.
        skipped: Number of segments that were deleted from the journal before they were sensed.
        problem: Why the last attempt failed; None once an attempt has succeeded.
    """

    segment: int
    skipped: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of sensing some segments, to be stored.

    Attributes:
        segment: The last of these segments.
        skipped: Number of segments before them that were deleted from the journal.
        tables: What is now known of the tables that had events, by full name.
        facts: Metadata for Dagster about these tables: by table, then by name.
        evolutions: Changes of schemas, in order; each has a `subject`.
        tally: Metrics to count with it.
    """

    segment: int
    skipped: int = 0
    tables: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    evolutions: Sequence[Mapping[str, Any]] = ()
    tally: Tally | None = None


class SensingRepository:
    """The results of schema sensing for all pipelines: `StateStore.sensing`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def progress(self, name: str) -> Progress | None:
        """Return the progress of a pipeline's sensing, or None before it began."""
        with self._database.read() as connection:
            return _progress(connection, name)

    def tables(self, name: str) -> dict[str, bytes]:
        """Return what sensing knows of a pipeline's tables, by full name."""
        stored = Kv(self._database, _namespace(name)).items(_TABLE)
        return {key.removeprefix(_TABLE): value for key, value in stored.items()}

    def facts(self, name: str) -> dict[str, int | str]:
        """Return the metadata for Dagster about a pipeline's tables, by name."""
        stored = Kv(self._database, _namespace(name)).items(_FACTS)
        return {key: fact for value in stored.values() for key, fact in orjson.loads(value).items()}

    def evolutions(self, name: str, subject: str | None = None) -> list[LogEntry]:
        """Return the changes of one sensed schema, or of all of a pipeline's, oldest first."""
        return Log(self._database, _namespace(name)).entries(subject)


class SensingWrites:
    """Stores the results of a lease holder's schema sensing: `FencedWriter.sensing`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def note(self, findings: Findings) -> None:
        """Store findings, unless they are already stored."""
        before = _progress(self._connection, self._pipeline)
        if before is not None and before.segment >= findings.segment:
            return
        skipped = findings.skipped + (before.skipped if before else 0)
        space = _namespace(self._pipeline)
        for table, state in findings.tables.items():
            put_value(self._connection, space, _TABLE + table, state)
        for table, facts in findings.facts.items():
            put_value(self._connection, space, _FACTS + table, orjson.dumps(facts))
        for evolution in findings.evolutions:
            subject = evolution["subject"]
            rest = {name: value for name, value in evolution.items() if name != "subject"}
            append_to_log(self._connection, space, subject, orjson.dumps(rest))
        metrics.count(self._connection, self._pipeline, findings.tally)
        _put(self._connection, self._pipeline, Progress(findings.segment, skipped))

    def fail(self, problem: str) -> None:
        """Store why sensing has stopped; the next successful attempt clears it."""
        before = _progress(self._connection, self._pipeline) or Progress(0)
        _put(self._connection, self._pipeline, Progress(before.segment, before.skipped, problem))


def _namespace(pipeline: str) -> str:
    return f"sensing/{pipeline}"


def _progress(connection: Connection, pipeline: str) -> Progress | None:
    value = get_value(connection, _namespace(pipeline), _PROGRESS)
    return None if value is None else Progress(**orjson.loads(value))


def _put(connection: Connection, pipeline: str, progress: Progress) -> None:
    put_value(connection, _namespace(pipeline), _PROGRESS, orjson.dumps(asdict(progress)))
