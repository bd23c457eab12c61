"""The table with the pending changes of another table: found or made, and what of it is to be folded.

It belongs to exactly one table. Both have the same random property (`PENDING`), so if the table was dropped and
made again, it is seen that changes which are still pending were changes of its predecessor.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.lake.target import (
    LakeTarget,
    Ownership,
    TableCommit,
    columns_of,
    table_exists,
    table_properties,
)
from deltaforge_dagster.sinks.lake.config import TableLayout
from deltaforge_dagster.sinks.lake.dialect import (
    KEY,
    OWNER,
    PENDING,
    SOURCE,
    LakeColumn,
    properties_text,
)
from deltaforge_dagster.sinks.lake.pending import PendingRows, pending_name
from deltaforge_dagster.sinks.lake.statements import pending_columns
from deltaforge_dagster.sinks.tables.writer import TableOwner


@dataclass(slots=True)
class PendingTarget:
    """A table of pending changes, as it was last seen.

    Attributes:
        table: The table; its base is that of the table that the changes are for.
        commit: What is needed to write to it.
        key: The key columns of its rows.
        empty: Whether it has no rows.
    """

    table: LakeTarget
    commit: TableCommit
    key: tuple[str, ...]
    empty: bool

    @property
    def source_columns(self) -> Sequence[tuple[str, str]]:
        """Name and type of the source's columns that it has."""
        own = pending_columns()
        return [column for name, column in self.table.columns.items() if name not in own]

    @property
    def rows(self) -> PendingRows:
        """Its rows."""
        return PendingRows(self.table.name, [name for name, _ in self.source_columns], self.key)

    def takes(self, commit: TableCommit, main: LakeTarget) -> bool:
        """Return whether changes can be added to those that it has: without other columns, and with the same key."""
        same = not self._lacking(main) and self.key == commit.table.key
        return self.empty or same

    def align(self, main: LakeTarget) -> None:
        """Add the columns of the source that the table has; only while there are no rows, which would have them as null."""
        if lacking := self._lacking(main):
            self.commit.execute(
                *self.commit.dialect.add_columns(
                    self.table.name, [LakeColumn(*one) for one in lacking]
                )
            )
            self.table.columns = columns_of(self.commit.session, self.table.name)

    def _lacking(self, main: LakeTarget) -> Sequence[tuple[str, str]]:
        return [
            column
            for name, column in main.columns.items()
            if name not in self.table.columns and not name.startswith("df_")
        ]

    def key_becomes(self, key: tuple[str, ...]) -> None:
        """Note the key of the rows to come, if it is another one."""
        if key != self.key:
            self.commit.execute(_set(self.table.name, {KEY: _json(key)}))
            self.key = key


def open_pending(
    commit: TableCommit, main: LakeTarget, *, make: bool, required: bool
) -> PendingTarget | None:
    """Return the table with the pending changes of a table, None if there is none.

    Args:
        commit: A commit to the table.
        main: The table.
        make: Whether it is made if there is none.
        required: Whether it must be there, because it has changes that the table lacks.

    Raises:
        TableRejected: It is gone, or is somebody else's.
    """
    if main.token is None and not make:
        return None
    command = commit.owner.resync_command(commit.table)
    commit = _beside(commit)
    name = commit.dialect.table(commit.table.destination)
    if (required or not make) and not table_exists(commit, name):
        if required:
            raise TableRejected(
                f"{commit.label} is gone, with changes that its table does not have yet; bring it back, or have its "
                f"table loaded again",
                remedy=command,
            )
        return None
    if main.token is None:
        token = secrets.token_hex(8)
        commit.execute(_set(main.name, {PENDING: token}))
        main.token = token
    ours = _properties(commit, main.token, main.base)
    if make:
        _create(commit, ours, replace=False)
    found = _owned(commit, name)
    if found.get(PENDING) != main.token:  # of a table that was dropped
        # What stamps statements stays set, and must not let this one be skipped.
        stamps = commit.dialect.stamp(f"{commit.stamp}/{main.token}/emptied", 0, 0)
        for setting, value in stamps.items():
            commit.session.conf.set(setting, value)
        commit.execute(f"DELETE FROM {name}", _set(name, ours))
        found = ours
    target = LakeTarget(name, columns_of(commit.session, name), main.base)
    empty = not commit.rows(f"SELECT 1 FROM {name} LIMIT 1")
    key = tuple(orjson.loads(found[KEY]))
    return PendingTarget(target, replace(commit, series=_series(main.token)), key, empty)


def pending_writer(owner: TableOwner, token: str) -> str:
    """Return what stamps the commits to a table of pending changes that has this `PENDING`."""
    return f"{owner.name}{_series(token)}"


def _series(token: str) -> str:
    return f"/{token}"


def replace_pending(commit: TableCommit) -> str | None:
    """Replace the table with the pending changes of a table by one without rows; make it if the sink has such tables.

    Returns:
        What the table itself must have as `PENDING` from now on, so that they belong together; None if there is no such
        table. Until it has it, what it finds pending is nothing of its own, and is deleted.

    Raises:
        TableRejected: It is somebody else's.
    """
    commit = _beside(commit)
    name = commit.dialect.table(commit.table.destination)
    exists = table_exists(commit, name)
    if not exists and commit.config.pending is None:
        return None
    if exists:
        _owned(commit, name)
    token = secrets.token_hex(8)
    _create(commit, _properties(commit, token, 0), replace=exists)
    return token


def _beside(commit: TableCommit) -> TableCommit:
    """Return what is needed to write to the table with the pending changes of the table of a commit."""
    beside = replace(commit.table, destination=pending_name(commit.table.destination))
    return replace(commit, table=beside, pending=True)


def _properties(commit: TableCommit, token: str, base: int) -> dict[str, str]:
    owned = Ownership(commit.owner.uid, commit.owner.pipeline, commit.owner.sink_id, base)
    return {
        OWNER: owned.to_json(),
        SOURCE: commit.table.source_name,
        PENDING: token,
        KEY: _json(commit.table.key),
    }


def _create(commit: TableCommit, properties: dict[str, str], *, replace: bool) -> None:
    destination, columns = commit.table.destination, [*commit.columns, *commit.own_columns]
    commit.execute(
        *commit.dialect.prepare(destination),
        commit.dialect.create(destination, columns, TableLayout(), properties, replace=replace),
    )


def _owned(commit: TableCommit, name: str) -> dict[str, str]:
    """Return the properties of a table of pending changes that is this sink's.

    Raises:
        TableRejected: It is something else.
    """
    found = table_properties(commit.session, name)
    known = Ownership.from_json(found.get(OWNER, ""))
    if (
        not known.is_of(commit.owner, incarnation=False)
        or found.get(SOURCE) != commit.table.source_name
        or KEY not in found
    ):
        raise TableRejected(
            f"{commit.label} exists and is not where the sink keeps pending changes; rename that table, or change the "
            "sink's `table`"
        )
    return dict(found)


def _set(table: str, properties: dict[str, str]) -> str:
    return f"ALTER TABLE {table} SET TBLPROPERTIES ({properties_text(properties)})"


def _json(key: Sequence[str]) -> str:
    return orjson.dumps(key).decode()
