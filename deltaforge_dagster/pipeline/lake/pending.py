"""Finds or makes the table with the pending changes of another table.

It belongs to exactly one table. Both have the same random property (`PENDING`). If the table was
dropped and made again, the properties differ, which shows that the changes that are still pending
belong to its predecessor.
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
    has_rows,
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
        table: The table itself; its base is that of the table that the changes are for.
        commit: The commit that writes to it.
        key: The key columns of its rows.
        empty: Whether it has no rows.
    """

    table: LakeTarget
    commit: TableCommit
    key: tuple[str, ...]
    empty: bool

    @property
    def source_columns(self) -> Sequence[tuple[str, str]]:
        """Names and types of its columns that are the source's."""
        own = pending_columns()
        return [column for name, column in self.table.columns.items() if name not in own]

    @property
    def rows(self) -> PendingRows:
        """Its rows, to be read in SQL."""
        return PendingRows(self.table.name, [name for name, _ in self.source_columns], self.key)

    def takes(self, commit: TableCommit, main: LakeTarget) -> bool:
        """Return whether changes can be added: there are no rows, or no new columns or key."""
        same = not self._lacking(main) and self.key == commit.table.key
        return self.empty or same

    def align(self, main: LakeTarget) -> None:
        """Add the source's columns that the main table has.

        This is done only while there are no rows: existing rows would have null in these columns.
        """
        if lacking := self._lacking(main):
            self.commit.execute(
                *self.commit.dialect.add_columns(
                    self.table.name, [LakeColumn(*column) for column in lacking]
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
        """Store the key of the rows that follow, if it has changed."""
        if key != self.key:
            self.commit.execute(_set(self.table.name, {KEY: _json(key)}))
            self.key = key


def open_pending(
    commit: TableCommit, main: LakeTarget, *, make: bool, required: bool
) -> PendingTarget | None:
    """Return the table with the pending changes of a table; None if there is none.

    Args:
        commit: A commit to the table.
        main: The table.
        make: Whether the table of pending changes is made if there is none.
        required: Whether it must exist, because it has changes that the table lacks.

    Raises:
        TableRejected: The table of pending changes is gone, or does not belong to the sink.
    """
    if main.token is None and not make:
        return None
    command = commit.owner.resync_command(commit.table)
    commit = _pending_commit(commit)
    name = commit.dialect.table(commit.table.destination)
    if (required or not make) and not table_exists(commit, name):
        if required:
            raise TableRejected(
                f"{commit.label} is gone, with changes that its table does not have yet; bring it "
                f"back, or have its table loaded again",
                remedy=command,
            )
        return None
    # After a crash between the two statements, the next run makes the table of pending changes with
    # the token that is stored here.
    if main.token is None:
        token = secrets.token_hex(8)
        commit.execute(_set(main.name, {PENDING: token}))
        main.token = token
    own_properties = _properties(commit, main.token, main.base)
    if make:
        _create(commit, own_properties, replace=False)
    properties = _checked_properties(commit, name)
    if properties.get(PENDING) != main.token:  # the changes were those of a table that was dropped
        # The settings that stamp statements stay set in the session. With the stamp of an earlier
        # statement, Delta would skip this one.
        stamps = commit.dialect.stamp(f"{commit.stamp}/{main.token}/emptied", 0, 0)
        for setting, value in stamps.items():
            commit.session.conf.set(setting, value)
        commit.execute(f"DELETE FROM {name}", _set(name, own_properties))
        properties = own_properties
    target = LakeTarget(name, columns_of(commit.session, name), main.base)
    empty = not has_rows(commit, name)
    key = tuple(orjson.loads(properties[KEY]))
    return PendingTarget(target, replace(commit, series=_series(main.token)), key, empty)


def pending_writer(owner: TableOwner, token: str) -> str:
    """Return the writer in stamps of commits to the table of pending changes with a token."""
    return f"{owner.name}{_series(token)}"


def _series(token: str) -> str:
    return f"/{token}"


def replace_pending(commit: TableCommit) -> str | None:
    """Replace the table with the pending changes of a table by an empty one, if there is one.

    If there is none, it is made, provided that the sink keeps pending changes.

    Returns:
        The value that the property `PENDING` of the table itself must have from now on, so that
        both belong together; None if there is no table of pending changes. Until the property is
        set, rows that are pending do not count as changes of the table, and are deleted.

    Raises:
        TableRejected: The table of pending changes does not belong to the sink.
    """
    commit = _pending_commit(commit)
    name = commit.dialect.table(commit.table.destination)
    exists = table_exists(commit, name)
    if not exists and commit.config.pending is None:
        return None
    if exists:
        _checked_properties(commit, name)
    token = secrets.token_hex(8)
    _create(commit, _properties(commit, token, 0), replace=exists)
    return token


def _pending_commit(commit: TableCommit) -> TableCommit:
    """Return the commit that writes to the table with the pending changes of a commit's table."""
    pending_table = replace(commit.table, destination=pending_name(commit.table.destination))
    return replace(commit, table=pending_table, pending=True)


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


def _checked_properties(commit: TableCommit, name: str) -> dict[str, str]:
    """Return the properties of a table of pending changes that is this sink's.

    Raises:
        TableRejected: The table is something else, or does not belong to the sink.
    """
    properties = table_properties(commit.session, name)
    owner = Ownership.from_json(properties.get(OWNER, ""))
    if (
        not owner.is_of(commit.owner, incarnation=False)
        or properties.get(SOURCE) != commit.table.source_name
        or KEY not in properties
    ):
        raise TableRejected(
            f"{commit.label} exists and is not where the sink keeps pending changes; rename that "
            "table, or change the sink's `table`"
        )
    return dict(properties)


def _set(table: str, properties: dict[str, str]) -> str:
    return f"ALTER TABLE {table} SET TBLPROPERTIES ({properties_text(properties)})"


def _json(key: Sequence[str]) -> str:
    return orjson.dumps(key).decode()
