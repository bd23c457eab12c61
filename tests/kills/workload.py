"""Inserts, updates and deletes on a real database, and what must arrive because of them.

Every row has a version, which its key counts up for ever, also through deletes; so a change is
known by its key, op and version. A delete has the version of the row that it removed. A row that gets
another key is a delete of the old and an insert of the new one. Each writer
has keys of its own, and its transactions range from one row to all of its rows at once. One that is alone may also empty the
table and add columns to it; there a row that gets another key is one update.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

TABLE = "CREATE TABLE items (id bigint PRIMARY KEY, version bigint NOT NULL, body text)"
LEDGER = "CREATE TABLE ledger (tx bigint PRIMARY KEY)"

KEYS = 600
"""Keys of one writer."""

_MOST_ADDED = 8
"""How many columns a table gets."""


@dataclass(frozen=True, order=True, slots=True)
class Change:
    """One change of one row; that a table was emptied is `EMPTIED`.

    Attributes:
        was: The key that the row had before, where that is part of the change.
    """

    key: int
    version: int
    op: str
    was: int | None = None


EMPTIED = Change(0, 0, "t")


class Connection(Protocol):
    """What a writer needs of a database."""

    def transaction(self, statements: Sequence[str]) -> None:
        """Run statements in one transaction, durable when this returns; connects if need be.

        Raises:
            ConnectionError: It is not known whether the transaction was committed.
        """
        ...

    def count(self, query: str) -> int:
        """Return the number that a query selects; connects if need be.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        ...

    def log_end(self) -> int:
        """Return a place in the log that every committed change lies before."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction that is durable.

    Attributes:
        changes: Its changes.
        log_end: A place in the log behind it.
        ordered: Whether the changes are in the log's order; in which order one statement changes rows, the database decides.
    """

    changes: tuple[Change, ...]
    log_end: int
    ordered: bool


@dataclass
class Workload:
    """Writers at work, each in a thread of its own.

    Attributes:
        moves: Rows get other keys, too.
        reshapes: The table is emptied, gets more columns, and these get other names, too; needs a writer that is alone.
        body: The most characters that a row's text has.
        room: They write while it is set: a slow machine shall not be left with a mountain.
    """

    connections: Sequence[Connection]
    seed: int
    pause: float = 0.03
    moves: bool = False
    reshapes: bool = False
    body: int = 300
    room: threading.Event = field(default_factory=threading.Event)
    _writers: list[_Writer] = field(default_factory=list)

    def start(self) -> None:
        """Begin writing, unless they have begun."""
        if self._writers:
            return
        assert not self.reshapes or len(self.connections) == 1
        for number, connection in enumerate(self.connections):
            rng = random.Random(f"{self.seed}/{number}")
            writer = _Writer(
                number,
                connection,
                rng,
                self.pause,
                self.room,
                moves=self.moves,
                reshapes=self.reshapes,
                body=self.body,
            )
            self._writers.append(writer)
        for writer in self._writers:
            writer.thread.start()

    def stop(self) -> None:
        """End writing, and raise what went wrong with it."""
        for writer in self._writers:
            writer.over.set()
        for writer in self._writers:
            writer.thread.join(60)
            assert not writer.thread.is_alive(), "a writer hangs"
            writer.connection.close()
        for writer in self._writers:
            if writer.error is not None:
                raise writer.error

    @property
    def rows(self) -> int:
        """How many changes are committed so far."""
        return sum(writer.rows for writer in self._writers)

    @property
    def moved(self) -> int:
        """How many rows have got another key so far."""
        return sum(writer.moved for writer in self._writers)

    def committed(self) -> list[Committed]:
        """Return every transaction, those of one writer in order."""
        return [one for writer in self._writers for one in writer.committed]

    def expected(self) -> dict[int, list[Change]]:
        """Return what must arrive, by key, in order."""
        found = defaultdict(list)
        for one in self.committed():
            for change in one.changes:
                found[change.key].append(change)
        return dict(found)


class _Writer:
    def __init__(
        self,
        number: int,
        connection: Connection,
        rng: random.Random,
        pause: float,
        room: threading.Event,
        *,
        moves: bool,
        reshapes: bool,
        body: int,
    ) -> None:
        self.connection = connection
        self.committed: list[Committed] = []
        self.rows = 0
        self.moved = 0
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"writer {number}", daemon=True)
        self._number = number
        self._rng = rng
        self._pause = pause
        self._room = room
        self._moves = moves
        self._reshapes = reshapes
        self._added: list[str] = []
        self._renamed = 0
        self._body = body
        self._first = number * KEYS
        self._versions = dict.fromkeys(range(self._first, self._first + KEYS), 0)
        self._live: set[int] = set()

    def _run(self) -> None:
        try:
            tx = self._number * 1_000_000_000
            while not self.over.is_set():
                if not self._room.wait(0.5):
                    continue
                tx += 1
                self._write(tx)
                self.over.wait(self._rng.uniform(0, 2 * self._pause))
        except BaseException as error:  # noqa: BLE001 - raised again by `stop`
            self.error = error

    def _write(self, tx: int) -> None:
        """Write one transaction; after a lost connection the ledger says whether it was committed."""
        statements, changes = self._next_transaction()
        ordered = len(statements) > 1
        statements.append(f"INSERT INTO ledger VALUES ({tx})")
        written = f"SELECT count(*) FROM ledger WHERE tx = {tx}"
        deadline = time.monotonic() + 120
        unsure = False
        while True:
            try:
                if not unsure or not self.connection.count(written):
                    unsure = True
                    self.connection.transaction(statements)
                log_end = self.connection.log_end()
                break
            except ConnectionError:
                assert time.monotonic() < deadline, "the database has not come back in 120 s"
                time.sleep(0.1)
        self.committed.append(Committed(tuple(changes), log_end, ordered))
        self.rows += len(changes)

    def _next_transaction(self) -> tuple[list[str], list[Change]]:
        chance = self._rng.random()
        if chance < 0.02:
            return self._wide()
        if self._reshapes and chance < 0.03:
            self._live.clear()
            return ["TRUNCATE TABLE items"], [EMPTIED]
        if self._reshapes and chance < 0.04 and len(self._added) < _MOST_ADDED:
            self._added.append(f"added{len(self._added)}")
            return [f"ALTER TABLE items ADD COLUMN {self._added[-1]} bigint"], []
        if self._reshapes and chance < 0.05 and self._added:
            self._renamed += 1
            number = self._rng.randrange(len(self._added))
            old, self._added[number] = self._added[number], f"renamed{self._renamed}"
            return [f"ALTER TABLE items RENAME COLUMN {old} TO {self._added[number]}"], []
        return self._mixed()

    def _wide(self) -> tuple[list[str], list[Change]]:
        """Change every row at once."""
        changes = [self._next(key, "u") for key in sorted(self._live)]
        last = self._first + KEYS
        where = f"id >= {self._first} AND id < {last}"
        return [f"UPDATE items SET version = version + 1 WHERE {where}"], changes

    def _mixed(self) -> tuple[list[str], list[Change]]:
        """Change a few rows one after the other."""
        statements, changes = [], []
        for _ in range(self._rng.choice((1, 1, 3, 10, 30))):
            key = self._rng.randrange(self._first, self._first + KEYS)
            body = f"repeat('x', {self._rng.randrange(self._body)})"
            if key not in self._live:
                change = self._next(key, "c")
                self._live.add(key)
                statements.append(
                    f"INSERT INTO items (id, version, body) VALUES ({key}, {change.version}, {body})"
                )
            elif self._rng.random() < 0.2:
                change = Change(key, self._versions[key], "d")
                self._live.remove(key)
                statements.append(f"DELETE FROM items WHERE id = {key}")
            elif self._moves and self._rng.random() < 0.2 and len(self._live) < KEYS:
                old = Change(key, self._versions[key], "d")
                to = self._rng.choice(sorted(self._versions.keys() - self._live))
                change = self._next(to, "c")
                self._live ^= {key, to}
                if self._reshapes:
                    change = Change(to, change.version, "u", was=key)
                else:
                    changes.append(old)
                self.moved += 1
                statements.append(
                    f"UPDATE items SET id = {to}, version = {change.version} WHERE id = {key}"
                )
            else:
                change = self._next(key, "u")
                added = f", {self._added[-1]} = {change.version}" if self._added else ""
                statements.append(
                    f"UPDATE items SET version = {change.version}, body = {body}{added}"
                    f" WHERE id = {key}"
                )
            changes.append(change)
        return statements, changes

    def _next(self, key: int, op: str) -> Change:
        self._versions[key] += 1
        return Change(key, self._versions[key], op)
