"""Stores the results of schema sensing for a pipeline's tables, and its progress.

Keys of the namespace `sensing/{pipeline}`: `progress` is a JSON object (`Progress`); `table/{full name}`
is what is known of a table, in a format that only `deltaforge_dagster.sensing` reads;
`facts/{full name}` is a JSON object of metadata for Dagster. All of them change in one fenced
transaction, so they always reflect the segments up to `segment`, each counted once. The log of the same
namespace holds the changes of schemas, by table or `table:column`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection

from deltaforge_dagster.state import metrics
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.primitives import append_to_log, get_value, put_value

PROGRESS = "progress"
TABLE = "table/"
FACTS = "facts/"


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


def namespace(pipeline: str) -> str:
    """Return the namespace of a pipeline's results."""
    return f"sensing/{pipeline}"


def progress(connection: Connection, pipeline: str) -> Progress | None:
    """Return the progress of sensing, or None before it began."""
    value = get_value(connection, namespace(pipeline), PROGRESS)
    return None if value is None else Progress(**orjson.loads(value))


def note(connection: Connection, pipeline: str, findings: Findings) -> None:
    """Store findings, unless they are already stored."""
    before = progress(connection, pipeline)
    if before is not None and before.segment >= findings.segment:
        return
    skipped = findings.skipped + (before.skipped if before else 0)
    space = namespace(pipeline)
    for table, state in findings.tables.items():
        put_value(connection, space, TABLE + table, state)
    for table, facts in findings.facts.items():
        put_value(connection, space, FACTS + table, orjson.dumps(facts))
    for evolution in findings.evolutions:
        subject = evolution["subject"]
        rest = {name: value for name, value in evolution.items() if name != "subject"}
        append_to_log(connection, space, subject, orjson.dumps(rest))
    metrics.count(connection, pipeline, findings.tally)
    _put(connection, pipeline, Progress(findings.segment, skipped))


def fail(connection: Connection, pipeline: str, problem: str) -> None:
    """Store why sensing has stopped; the next successful attempt clears it."""
    before = progress(connection, pipeline) or Progress(0)
    _put(connection, pipeline, Progress(before.segment, before.skipped, problem))


def _put(connection: Connection, pipeline: str, now: Progress) -> None:
    put_value(connection, namespace(pipeline), PROGRESS, orjson.dumps(asdict(now)))
