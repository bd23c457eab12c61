"""What the demo writes into its database, and its own record of it.

A `Workload` inserts, updates and deletes rows of three tables, in transactions of several
statements, from one thread. After each commit it notes every change in the order of the source:
that record, not anything the pipeline counts, is what `demo_proof` compares the sinks with.

Each row carries a `version` that counts the changes of its key, and every other value is a function
of key and version, so an event shows by itself which change it is and what must stand in it.

`orders` has keys that come back after a delete, and in PostgreSQL REPLICA IDENTITY FULL (its events show
the old row); the other tables have the default identity there, and a deleted key stays away.
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
"""One change of a key: what happened, and the version the row has after it, or had (delete)."""

_STATES = ("new", "paid", "packed", "sent")
_SHARE_INSERTED = 0.5
_SHARE_UPDATED = 0.35
_RETURNING = 4
"""Every so many deleted orders one comes back."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its type, and the value that key and version give it.

    `value` is what is written, which is also what JSON must show; `shown` where that differs.
    """

    name: str
    type: str
    value: Callable[[int, int], Any]
    shown: Callable[[Any], Any] = field(default=lambda value: value)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the demo; `id` and `version` come first in each."""

    name: str
    columns: tuple[Column, ...]
    full_identity: bool = False

    def row(self, key: int, version: int) -> dict[str, Any]:
        """Return the row image that an event of this change must carry."""
        shown = {column.name: column.shown(column.value(key, version)) for column in self.columns}
        return {"id": key, "version": version, **shown}


TABLES = (
    Table(
        "customers",
        (
            Column("name", "text", lambda key, version: f'Zoë {key} «{version}» "q"\t\\'),
            Column("email", "text", lambda key, version: f"c{key}.{version}@example.com"),
            Column("active", "boolean", lambda key, version: (key + version) % 3 > 0),
        ),
    ),
    Table(
        "orders",
        (
            Column("customer_id", "bigint", lambda key, _: key * 7919 % 100_003),
            Column("status", "text", lambda _, version: _STATES[version % len(_STATES)]),
            Column("amount", "numeric(12,2)", lambda key, version: f"{key % 997}.{version % 100:02}"),
            Column("note", "text", lambda key, version: None if key % 5 else f"note {version}"),
        ),
        full_identity=True,
    ),
    Table(
        "payments",
        (
            Column("order_id", "bigint", lambda key, _: key),
            Column("paid_on", "date", lambda key, version: f"2024-{version % 12 + 1:02}-{key % 28 + 1:02}"),
            Column("details", "jsonb", lambda key, version: f'{{"k": [{key}, {version}]}}',
                   lambda text: {"k": [int(part) for part in text[7:-2].split(",")]}),
        ),
    ),
)  # fmt: skip


class Record:
    """Every change in source order, per key; filled by the writer, after each commit."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, int], list[Step]] = {}
        self.total = 0

    def note(self, table: str, key: int, op: Op, version: int) -> None:
        """Add the next change of a key."""
        self.steps.setdefault((table, key), []).append((op, version))
        self.total += 1


class _Rows:
    """The rows of one table that exist now, to choose from at random."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.versions: dict[int, int] = {}
        self.keys: list[int] = []
        self.returning: dict[int, int] = {}
        self.next_key = 1
        self.deleted = 0

    def insert(self, count: int) -> dict[int, int]:
        """Return new keys, with keys that come back among them, and their first versions."""
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
        """Return rows that exist, with their next versions."""
        chosen = chance.sample(self.keys, min(count, len(self.keys)))
        changed = {key: self.versions[key] + 1 for key in chosen}
        self.versions.update(changed)
        return changed

    def delete(self, count: int, chance: random.Random) -> dict[int, int]:
        """Return rows to delete, with the versions they have."""
        removed = {}
        for _ in range(min(count, len(self.keys))):
            place = chance.randrange(len(self.keys))
            key, self.keys[place] = self.keys[place], self.keys[-1]
            self.keys.pop()
            removed[key] = self.versions.pop(key)
            self.deleted += 1
            if self.table.full_identity and self.deleted % _RETURNING == 0:
                self.returning[key] = removed[key] + 1
        return removed


Write = Callable[[Table, Op, Mapping[int, int]], None]
"""Writes one kind of change of rows: their keys, with the version that each has then or had."""


class Database(Protocol):
    """Where the demo writes; see `demo_databases`.

    Attributes:
        title: What people call it.
        pipeline: The pipeline that reads it, whose file is `<pipeline>.yaml`.
        tables: Its tables.
        environment: Variables that the pipeline's file needs.
        errors: What it raises when it refuses something.
    """

    title: str
    pipeline: str
    tables: tuple[Table, ...]
    environment: Mapping[str, str]
    errors: tuple[type[Exception], ...]

    def create_tables(self) -> None:
        """Create the tables, empty."""
        ...

    def connected(self) -> AbstractContextManager[tuple[Write, Callable[[], None]]]:
        """Connect; lend what writes, and what commits."""
        ...


class Workload:
    """Writes changes and remembers them.

    Args:
        database: Where; `create_tables` makes the tables there.
        seed: The same seed writes the same changes.
    """

    def __init__(self, database: Database, seed: int = 1) -> None:
        self.record = Record()
        self._database = database
        self._chance = random.Random(seed)  # noqa: S311 - not for secrets
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
        """Write so many changes, spread over so many seconds (0: as fast as possible).

        Returns early, between two transactions, when `stop` is set.
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
        """Write up to `size` changes, at least one, of one table after another, and commit."""
        written: list[tuple[Table, Op, dict[int, int]]] = []
        for place, rows in enumerate(self._rows):
            share = size // len(self._rows) + (place < size % len(self._rows))
            inserted = rows.insert(max(round(share * _SHARE_INSERTED), min(share, 1)))
            updated = rows.update(round(share * _SHARE_UPDATED), self._chance)
            deleted = rows.delete(share - len(inserted) - len(updated), self._chance)
            statements: list[tuple[Op, dict[int, int]]]
            statements = [("c", inserted), ("u", updated), ("d", deleted)]
            written += [(rows.table, op, changed) for op, changed in statements if changed]
        for table, op, changed in written:
            write(table, op, changed)
        commit()
        for table, op, changed in written:
            for key, version in changed.items():
                self.record.note(table.name, key, op, version)
