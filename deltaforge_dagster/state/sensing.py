"""What sensing has found out about a pipeline's tables, and up to which segment.

Keys and values of the namespace `sensing/{pipeline}`: `progress` is a JSON object, `table/{full name}` what is
known of a table, which only `deltaforge_dagster.sensing` reads, `facts/{full name}` what Dagster is told of it, a JSON object. All change in one fenced transaction, so
what is known is always that of the segments up to `segment`, each of them counted once. How schemas
changed stands in the log of the same namespace, by table or `table:column`.
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
    """How far sensing has come.

    Attributes:
        segment: The last segment that is counted, or was passed over.
        skipped: How many segments were gone from the journal before their turn.
        problem: Why the last try failed, None once one has succeeded.
    """

    segment: int
    skipped: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found out in some segments, to be stored.

    Attributes:
        segment: The last of them.
        skipped: How many segments before them were gone.
        tables: What is known now of tables that had events, by full name.
        facts: What Dagster is told of them, by names of metadata.
        evolutions: How schemas changed, in order; each with its `subject`.
        tally: What was counted.
    """

    segment: int
    skipped: int = 0
    tables: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    evolutions: Sequence[Mapping[str, Any]] = ()
    tally: Tally | None = None


def namespace(pipeline: str) -> str:
    """Return where a pipeline's findings are."""
    return f"sensing/{pipeline}"


def progress(connection: Connection, pipeline: str) -> Progress | None:
    """Return how far sensing has come; None before it began."""
    value = get_value(connection, namespace(pipeline), PROGRESS)
    return None if value is None else Progress(**orjson.loads(value))


def note(connection: Connection, pipeline: str, findings: Findings) -> None:
    """Store what was found out; nothing when it is stored already."""
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
    """Remember why sensing does not go on, until it does."""
    before = progress(connection, pipeline) or Progress(0)
    _put(connection, pipeline, Progress(before.segment, before.skipped, problem))


def _put(connection: Connection, pipeline: str, now: Progress) -> None:
    put_value(connection, namespace(pipeline), PROGRESS, orjson.dumps(asdict(now)))
