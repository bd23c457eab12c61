"""Records gaps: changes of tables that the source's log lacks, and tables that were replaced.

Each check of a source returns the tables that the log has now, and an identity of each. A log that
contains statements also says which tables were dropped and created. A table has a *gap* if the log
did not have it for a while or got it only later, or if the table was dropped and created again. The
gap lasts until the table's rows were read again (`SnapshotRepository`) or a user acknowledges it.

What is known of a pipeline's tables is one value of the key-value table (`primitives.Kv`), written
only if something has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import kv
from deltaforge_dagster.tables import LoggedTable, TableFate

_KEY = "tables"

GapCause = Literal["new", "away", "remade"]
"""Why there is a gap.

`new`: the log has the table only since `until`. `away`: the log did not have it from `since` to
`until`. `remade`: the table was dropped in between, and another one has its name.
"""


@dataclass(frozen=True, slots=True)
class Gap:
    """A part of a table's changes that the log does not have.

    Attributes:
        table: Full name of the table.
        cause: See `GapCause`.
        since: The log had the table up to then at least; None if it never had.
        until: The log has the table from then on, at the latest.
        whole: Whether the log has every row of the current table, so that it only lacks the end of
            the former table of this name.
    """

    table: str
    cause: GapCause
    since: float | None
    until: float
    whole: bool


@dataclass(slots=True)
class _KnownTables:
    """What is stored of a pipeline's tables.

    Attributes:
        identities: By name, the identities that each table has had, oldest first.
        away: By name, since when the log does not have a table.
        dropped: By name, when a run read that a table was dropped; only for logs that contain
            statements.
        gaps: By name of the table.
    """

    identities: dict[str, list[str]] = field(default_factory=dict)
    away: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, Gap] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)


class GapRepository:
    """The gaps of all pipelines: `StateStore.gaps`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str) -> list[Gap]:
        """Return the gaps of a pipeline, by table."""
        with self._database.read() as connection:
            stored = _read(connection, name)
        return [] if stored is None else [stored.gaps[table] for table in sorted(stored.gaps)]

    def note(self, name: str, tables: Mapping[str, LoggedTable], checked_at: float | None) -> None:
        """Record which tables the log has now, and the gaps that follow from it.

        Args:
            name: The pipeline.
            tables: The tables by their full names.
            checked_at: When that was last recorded.
        """
        with self._database.read() as connection:
            if _noted(_read(connection, name), tables, checked_at, 0.0) is None:
                return
        with self._database.write() as connection:
            now = connection.execute(select(clock())).scalar_one()
            noted = _noted(_read(connection, name), tables, checked_at, now)
            if noted is not None:
                _write(connection, name, noted)

    def note_fates(self, name: str, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what the log says of tables, in order.

        A table that is created after another one of its name was dropped has a gap.

        Args:
            name: The pipeline.
            fates: Full name of each table, and what became of it.
        """
        with self._database.write() as connection:
            now = connection.execute(select(clock())).scalar_one()
            stored = _read(connection, name) or _KnownTables()
            if not any(fate == "dropped" or table in stored.dropped for table, fate in fates):
                return
            for table, fate in fates:
                since = stored.dropped.pop(table, None)
                if fate == "dropped":
                    stored.dropped[table] = now
                elif fate == "made" and since is not None:
                    before = stored.gaps.get(table)
                    whole = before is None or before.whole
                    stored.gaps[table] = Gap(
                        table, "remade", since if before is None else before.since, now, whole
                    )
            _write(connection, name, stored)

    def acknowledge(self, name: str, tables: Collection[str] = ()) -> list[str]:
        """Forget the gaps of these tables, by default of all; return the tables that had any."""
        with self._database.write() as connection:
            stored = _read(connection, name)
            if stored is None:
                return []
            acknowledged = sorted(table for table in stored.gaps if not tables or table in tables)
            for table in acknowledged:
                del stored.gaps[table]
            _write(connection, name, stored)
            return acknowledged


def forget(connection: Connection, pipeline: str) -> None:
    """Forget what is known of a pipeline's tables, because its sinks get all rows again."""
    connection.execute(delete(kv).where(kv.c.ns == _namespace(pipeline)))


def _noted(
    stored: _KnownTables | None,
    tables: Mapping[str, LoggedTable],
    checked_at: float | None,
    now: float,
) -> _KnownTables | None:
    """Return what is known after a check of the source; None if nothing has changed."""
    if stored is None:
        return _KnownTables({name: [table.identity] for name, table in tables.items()})
    changed = False
    for name in stored.identities.keys() - tables.keys() - stored.away.keys():
        stored.away[name] = now if checked_at is None else checked_at
        changed = True
    for name, table in tables.items():
        identities = stored.identities.setdefault(name, [])
        away = stored.away.pop(name, None)
        if table.identity in identities and away is None:
            continue
        changed = True
        cause: GapCause = (
            "new" if not identities else "away" if table.identity in identities else "remade"
        )
        if table.identity not in identities:
            identities.append(table.identity)
        if cause == "new" and (table.whole or table.empty):
            continue
        since = None if cause == "new" else away if away is not None else checked_at
        gap = Gap(name, cause, since, now, whole=table.whole and cause == "remade")
        before = stored.gaps.get(name)
        if before is not None:
            # A sink that lacks the earlier gap lacks both, so they become one with the worse cause.
            causes = {before.cause, cause}
            worst: GapCause = "remade" if "remade" in causes else cause
            gap = replace(gap, cause=worst, since=before.since, whole=gap.whole and before.whole)
        stored.gaps[name] = gap
    return stored if changed else None


def _read(connection: Connection, pipeline: str) -> _KnownTables | None:
    value = get_value(connection, _namespace(pipeline), _KEY)
    if value is None:
        return None
    fields = orjson.loads(value)
    gaps = {name: Gap(**gap) for name, gap in fields["gaps"].items()}
    return _KnownTables(fields["identities"], fields["away"], gaps, fields.get("dropped", {}))


def _write(connection: Connection, pipeline: str, stored: _KnownTables) -> None:
    gaps = {name: asdict(gap) for name, gap in stored.gaps.items()}
    value = {
        "identities": stored.identities,
        "away": stored.away,
        "gaps": gaps,
        "dropped": stored.dropped,
    }
    put_value(connection, _namespace(pipeline), _KEY, orjson.dumps(value))


def _namespace(pipeline: str) -> str:
    return f"gaps/{pipeline}"
