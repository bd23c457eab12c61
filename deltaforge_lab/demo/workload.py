"""The changes that the demo writes into its database, and the record of them.

A `Workload` inserts, updates and deletes rows of three tables from one thread, in transactions of
several statements. After each commit it records every change in source order. `proof` compares the
sinks with this record, not with anything that the pipeline counts.

Each row has a `version` that counts the changes of its key. Every other value is a function of key
and version, so an event identifies its change and the values it must have.

In `orders` some deleted keys are inserted again, and in PostgreSQL the table has REPLICA IDENTITY
FULL (its events have the old row). The other tables have the default identity there, and a deleted
key never comes back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Op = Literal["c", "u", "d"]
Step = tuple[Op, int]
"""One change of a key: the operation, and the row's version after it (before it, for a delete)."""

_STATES = ("new", "paid", "packed", "sent")
_SHARE_INSERTED = 0.5
_SHARE_UPDATED = 0.35
_RETURNING = 4
"""One of this many deleted orders is inserted again."""


@dataclass(frozen=True, slots=True)
class DemoColumn:
    """A column: its name, its type and its value as a function of key and version.

    `value` returns what is written. `shown` converts that to what the event's JSON must have, where
    it differs.
    """

    name: str
    type: str
    value: Callable[[int, int], Any]
    shown: Callable[[Any], Any] = field(default=lambda value: value)


@dataclass(frozen=True, slots=True)
class DemoTable:
    """A table of the demo; its first columns are `id` and `version`."""

    name: str
    columns: tuple[DemoColumn, ...]
    full_identity: bool = False

    def row(self, key: int, version: int) -> dict[str, Any]:
        """Return the row image that an event of this change must carry."""
        shown = {column.name: column.shown(column.value(key, version)) for column in self.columns}
        return {"id": key, "version": version, **shown}


TABLES = (
    DemoTable(
        "customers",
        (
            DemoColumn("name", "text", lambda key, version: f'Zoë {key} «{version}» "q"\t\\'),
            DemoColumn("email", "text", lambda key, version: f"c{key}.{version}@example.com"),
            DemoColumn("active", "boolean", lambda key, version: (key + version) % 3 > 0),
        ),
    ),
    DemoTable(
        "orders",
        (
            DemoColumn("customer_id", "bigint", lambda key, _: key * 7919 % 100_003),
            DemoColumn("status", "text", lambda _, version: _STATES[version % len(_STATES)]),
            DemoColumn("amount", "numeric(12,2)",
                   lambda key, version: f"{key % 997}.{version % 100:02}"),
            DemoColumn("note", "text", lambda key, version: None if key % 5 else f"note {version}"),
        ),
        full_identity=True,
    ),
    DemoTable(
        "payments",
        (
            DemoColumn("order_id", "bigint", lambda key, _: key),
            DemoColumn("paid_on", "date",
                   lambda key, version: f"2024-{version % 12 + 1:02}-{key % 28 + 1:02}"),
            DemoColumn("details", "jsonb", lambda key, version: f'{{"k": [{key}, {version}]}}',
                   lambda text: {"k": [int(part) for part in text[7:-2].split(",")]}),
        ),
    ),
)  # fmt: skip


class Record:
    """Every change of each key in source order; the writer adds them after each commit."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, int], list[Step]] = {}
        self.total = 0

    def note(self, table: str, key: int, op: Op, version: int) -> None:
        """Add the next change of a key."""
        self.steps.setdefault((table, key), []).append((op, version))
        self.total += 1


class _Rows:
    """The existing rows of one table, from which changes are chosen at random."""

    def __init__(self, table: DemoTable) -> None:
        self.table = table
        self.versions: dict[int, int] = {}
        self.keys: list[int] = []
        self.returning: dict[int, int] = {}
        self.next_key = 1
        self.deleted = 0

    def insert(self, count: int) -> dict[int, int]:
        """Return keys to insert, some of them deleted before, with their versions."""
        added = dict(list(self.returning.items())[:count])
        for key in added:
            del self.returning[key]
        fresh = range(self.next_key, self.next_key + count - len(added))
        self.next_key = fresh.stop
        added.update(dict.fromkeys(fresh, 1))
        self.versions.update(added)
        self.keys += added
        return added

    def update(self, count: int, chance: random.Random) -> dict[int, int]:
        """Return keys to update, with their next versions."""
        chosen = chance.sample(self.keys, min(count, len(self.keys)))
        changed = {key: self.versions[key] + 1 for key in chosen}
        self.versions.update(changed)
        return changed

    def delete(self, count: int, chance: random.Random) -> dict[int, int]:
        """Return keys to delete, with their current versions."""
        removed = {}
        for _ in range(min(count, len(self.keys))):
            index = chance.randrange(len(self.keys))
            key, self.keys[index] = self.keys[index], self.keys[-1]
            self.keys.pop()
            removed[key] = self.versions.pop(key)
            self.deleted += 1
            if self.table.full_identity and self.deleted % _RETURNING == 0:
                self.returning[key] = removed[key] + 1
        return removed


Write = Callable[[DemoTable, Op, Mapping[int, int]], None]
"""Writes one operation on several rows of a table: the keys, each with its `Step` version."""


class DemoDatabase(Protocol):
    """A database that the demo writes to; implemented in `databases`.

    Attributes:
        title: Display name.
        pipeline: The pipeline that reads it, whose file is `<pipeline>.yaml`.
        tables: Its tables.
        environment: Environment variables that the pipeline file needs.
        errors: The exceptions that it raises when it refuses a statement.
    """

    title: str
    pipeline: str
    tables: tuple[DemoTable, ...]
    environment: Mapping[str, str]
    errors: tuple[type[Exception], ...]

    def create_tables(self) -> None:
        """Create the tables, empty."""
        ...

    def connected(self) -> AbstractContextManager[tuple[Write, Callable[[], None]]]:
        """Connect; yield a function that writes changes and one that commits."""
        ...


class Workload:
    """Writes changes and remembers them.

    Args:
        database: The database to write to.
        seed: The same seed writes the same changes.
    """

    def __init__(self, database: DemoDatabase, seed: int = 1) -> None:
        self.record = Record()
        self._database = database
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._rows = [_Rows(table) for table in database.tables]

    def create_tables(self) -> None:
        """Create the tables, empty."""
        self._database.create_tables()

    def write(
        self,
        changes: int,
        per_transaction: int,
        *,
        seconds: float = 0,
        stop: threading.Event | None = None,
    ) -> None:
        """Write `changes` changes, spread over `seconds` (0: as fast as possible).

        Return early, between two transactions, when `stop` is set.
        """
        begun = time.monotonic()
        first = self.record.total
        with self._database.connected() as (write, commit):
            while (done := self.record.total - first) < changes:
                if stop and stop.is_set():
                    return
                self._transaction(write, commit, min(per_transaction, changes - done))
                ahead = seconds * (self.record.total - first) / changes - (time.monotonic() - begun)
                if ahead > 0:
                    (stop or threading.Event()).wait(ahead)

    def _transaction(self, write: Write, commit: Callable[[], None], size: int) -> None:
        """Write between one and `size` changes, one table after another, and commit."""
        written: list[tuple[DemoTable, Op, dict[int, int]]] = []
        for index, rows in enumerate(self._rows):
            share = size // len(self._rows) + (index < size % len(self._rows))
            inserted = rows.insert(max(round(share * _SHARE_INSERTED), min(share, 1)))
            updated = rows.update(round(share * _SHARE_UPDATED), self._random)
            deleted = rows.delete(share - len(inserted) - len(updated), self._random)
            statements: list[tuple[Op, dict[int, int]]]
            statements = [("c", inserted), ("u", updated), ("d", deleted)]
            written += [(rows.table, op, changed) for op, changed in statements if changed]
        for table, op, changed in written:
            write(table, op, changed)
        commit()
        for table, op, changed in written:
            for key, version in changed.items():
                self.record.note(table.name, key, op, version)
