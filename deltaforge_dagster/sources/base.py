"""The seam between the run and a database: what every source promises.

A source knows its log and nothing else: not the journal, not the store, not Spark. The run asks
for the head, reads change batches from a position on, and tells the source which position it may
forget. `read` is one long-lived stream per run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.tables import SchemaStamp, TableDetails, TableSchema


class SchemaRegistry(Protocol):
    """Where a source registers the table versions it meets, with the position they start at."""

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return the stamp of `table`: an earlier one with the same fingerprint, or a new one.

        The version is durable when this returns.

        Raises:
            LeaseLost: The run that reads no longer holds the pipeline.
        """
        ...


class DetachedRegistry:
    """The registry of a decoder that works without a store: every table version has the same stamp."""

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return that stamp, and register nothing."""
        del table, position
        return SchemaStamp("sha256:", 1, 1)


class SourceNotes(SchemaRegistry, Protocol):
    """What a source may keep between runs beside its position: notes on tables, by position."""

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Note what the log does not say of tables: how they look from `position` on.

        Texts of the source's own, by table, None for one that is gone; durable when this returns.

        Raises:
            LeaseLost: The run that reads no longer holds the pipeline.
        """
        ...

    def defined(self, position: Position) -> dict[str, str]:
        """Return what was noted of tables as they were at `position`."""
        ...

    def held(self) -> Mapping[str, str]:
        """Return the full names of tables whose events are kept back, and why.

        Everything that comes of them is kept back, too (`HeldEvent`), whether it is understood or
        not: nothing may overtake what is held.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How large one change batch may get, and how long the reader may wait for it.

    `max_wait` (seconds) bounds the time between two batches: an idle source yields an empty one,
    so that the caller can look at its own clocks and flags.
    """

    max_events: int = 200_000
    max_bytes: int = 4 << 20
    max_wait: float = 0.05


@dataclass(frozen=True, slots=True)
class HeldEvent:
    """An event of a table that cannot be decoded now, as the log has it.

    Attributes:
        table: Full name of the table.
        reason: Why it is kept back, and what to do.
        data: All that the source needs to decode it later (`Source.decode_held`).
    """

    table: str
    reason: str
    data: bytes


def pack_held(head: Mapping[str, Any], rest: bytes) -> bytes:
    """Return the data of a held event: an 8-byte length of a JSON head, the head, and the rest."""
    encoded = json.dumps(head, ensure_ascii=False).encode()
    return len(encoded).to_bytes(8, "little") + encoded + rest


def unpack_held(data: bytes) -> tuple[Any, bytes]:
    """Return what `pack_held` was given.

    Raises:
        ValueError: It is no such data.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes in log order.

    Attributes:
        rows: Columns of `frame.CAPTURED`, or None when nothing was captured.
        end: Where a segment may end: every transaction up to here is whole in the batches so
            far. None while a transaction is open. On a batch without rows it is a position that
            the log has passed without a change for us (idle progress), or None.
        log_bytes: Bytes of log read for this batch.
        held: Events that are to be kept back, which stand before `end`, too.
    """

    rows: pa.RecordBatch | None
    end: Position | None
    log_bytes: int = 0
    held: tuple[HeldEvent, ...] = ()

    def split(self, max_events: int) -> Iterator[ChangeBatch]:
        """Yield batches of at most so many rows; only the last of them may end a segment."""
        rows = self.rows
        if rows is None or rows.num_rows <= max_events:
            yield self
            return
        for at in range(0, rows.num_rows, max_events):
            last = at + max_events >= rows.num_rows
            yield ChangeBatch(
                rows.slice(at, max_events),
                self.end if last else None,
                self.log_bytes if last else 0,
            )


class LogSection(Protocol):
    """A part of a log between two transactions, which can be decoded by itself; may be pickled."""

    @property
    def start(self) -> Position:
        """Where the transaction before it ends."""
        ...

    @property
    def end(self) -> Position:
        """Where its last transaction ends."""
        ...

    @property
    def log_bytes(self) -> int:
        """How much log it is, roughly."""
        ...


class Source(Protocol):
    """One database's log. Methods raise errors of the one tree, with no secret in them."""

    def head(self) -> Position:
        """Return the newest position now, within 2 seconds or raise `SourceUnavailable`."""
        ...

    def ensure_start(self, at: Position | None = None) -> Position:
        """Create what reading needs (slot, publication) and return the position to start at.

        Every change committed after this returns is read by `read(start)`. A second call makes
        nothing more; where the server holds nothing for us it returns a later position, so the
        caller keeps the first. Takes 5 seconds at most, unless the log has to be read for `at`.

        Args:
            at: How far another reader has come. Everything after it is read, perhaps a little of
                what is before it again: whatever it says, reading starts between transactions.

        Raises:
            PositionLost: What follows `at` cannot be read any more.
        """
        ...

    def reset(self, *, dry_run: bool) -> list[str]:
        """Drop what the server keeps for this pipeline and from which nothing can be read any more.

        `ensure_start` recreates it. What can still be read from is kept. 5 seconds at most.

        Args:
            dry_run: Drop nothing.

        Returns:
            What is (or would be) dropped, each with the reason; empty where nothing is in the way.

        Raises:
            DeltaforgeError: The server cannot be asked, or refuses.
        """
        ...

    def definitions(self, start: Position) -> dict[str, str]:
        """Return how tables looked at a start position that was just fixed, in texts of its own.

        Only what the log does not say itself: `SourceNotes.defined` hands it to readers.
        Takes 5 seconds at most; what cannot be had is left out.
        """
        ...

    def has_changes(self, after: Position) -> bool:
        """Say whether reading from `after` is worth a run; called while no run reads.

        True also when the answer takes too long, or much log has to be passed.
        """
        ...

    def maintain(self, position: Position | None) -> list[Finding]:
        """Compare what is to be captured with what the server will send; return what is missing.

        Where the source has made what decides that (a publication, triggers), it adds what is missing
        instead. Called every few seconds, also beside a reader: one connection, a few bounded queries,
        within 5 seconds.

        Args:
            position: Up to where the log was captured, to see that what follows is still there; None
                beside a reader, which finds that out by itself.

        Returns:
            Findings of the levels `error` (changes are not captured) and `warning`.

        Raises:
            DeltaforgeError: The server cannot be asked, or nothing can be read from it any more.
        """
        ...

    def preflight(
        self, position: Position | None, as_of: float | None, *, snapshot: bool = False
    ) -> list[Finding]:
        """Return what is, and is not, as capture needs it; within 30 seconds, changing nothing.

        Args:
            position: Up to where the log was captured; None before the first run.
            as_of: When the newest captured change was made, in seconds since 1970; None before.
            snapshot: Whether the tables themselves are to be read, too.

        Raises:
            DeltaforgeError: The server cannot be asked.
        """
        ...

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield everything committed after `start`, in log order, until closed.

        The generator answers the server's keepalives by itself, also while its consumer blocks.
        Unknown events and types raise `UnsupportedEvent`; nothing is skipped.
        """
        ...

    def identity(self) -> str:
        """Return which server this is, within 10 seconds.

        The text changes when positions may mean something else: another server, a promoted replica.
        """
        ...

    def relocate(self, position: Position, previous: str) -> Position:
        """Return where reading goes on, on a server that has taken the place of `previous`.

        Everything after `position` is read from there, so far as that can be told; where it cannot,
        a warning is logged.

        Args:
            position: Up to where the log was captured on the server before.
            previous: The `identity` of that server.

        Raises:
            PositionLost: What follows `position` cannot be read on this server.
        """
        ...

    def tables(self) -> list[str]:
        """Return the full name of every table that the patterns match now."""
        ...

    def database(self) -> str | None:
        """Return the database of every table, without asking; None where full names of tables begin with it."""
        ...

    def details(self, table: str) -> TableDetails:
        """Return what the catalog says of a table, by its full name, and the log does not; within 5 seconds.

        Raises:
            SourceMisconfigured: There is no such table.
            DeltaforgeError: The catalog cannot be asked.
        """
        ...

    def schema(self, table: str) -> TableSchema:
        """Return a table by its full name, with the columns and key that its rows show now.

        A column's `data_type` is as in registered versions, or empty where the source cannot say it.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        ...

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Yield what `read` would, beside a live run and without disturbing it.

        Raises:
            NotAllowed: The server forgets its log once it is confirmed.
            PositionLost: The log does not go back that far.
        """
        ...

    def decode_held(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes of held events of one table, as if they had never been held.

        Args:
            events: `HeldEvent.data` of every event, in order.
            fix: What the user has said about the table since, JSON text (`deltaforge hold`).
            position: Where the journal ends.
            registry: Where table versions are registered.

        Raises:
            UnsupportedEvent: It is still not certain what they mean.
        """
        ...

    def confirm(self, position: Position) -> None:
        """Let the server forget the log up to `position`: a committed position, never the head.

        Returns at once; the server learns of it with the reader's next status message.
        """
        ...

    def close(self) -> None:
        """End the stream and release every connection; safe to call twice, from any thread."""
        ...


@runtime_checkable
class WatchableSource(Source, Protocol):
    """A source that can say at next to no cost, several times a second, whether its log may have grown."""

    def log_ends(self, seconds: float) -> Generator[object]:
        """Yield where the log ends, each time one asks; nothing where that would not be cheap.

        A value differs from the one before if a change was committed in between, and perhaps without
        one. Reading it neither reads the log nor disturbs who writes to the database.

        Args:
            seconds: How long the asking may last, on one connection.

        Raises:
            SourceUnavailable: The server does not answer, or the time is up.
        """
        ...


@runtime_checkable
class SectionedSource(Source, Protocol):
    """A source whose log several readers may read at the same time; may be pickled."""

    def behind(self, position: Position) -> int:
        """Return how many bytes of log there are after a position, 0 if that cannot be said."""
        ...

    def warm(self) -> None:
        """Load what reading takes, which may take seconds; connects to nothing."""
        ...

    def plan_sections(
        self, start: Position, registry: SourceNotes, log_bytes: Callable[[], int]
    ) -> Generator[LogSection | None]:
        """Yield consecutive log sections of the log, each with something captured; None meanwhile.

        The first begins at `start`, which this server's log must have. The last one ends where the
        log does now, or before something that has to be read by one reader after all before it.
        Table versions are registered as they come, before a log section that has rows of them.

        Args:
            start: Where to begin.
            registry: As for `read`.
            log_bytes: Asked before each log section for its size; one transaction may be larger.

        Raises:
            DeltaforgeError: The server refused something, or the run lost its lease.
        """
        ...

    def read_section(
        self, section: LogSection, limits: ReadLimits, reader: int
    ) -> Iterator[ChangeBatch]:
        """Yield exactly what `read` yields between the ends of a log section; the last batch ends it.

        Args:
            section: One that `plan_sections` yielded, of this source in any process.
            limits: As for `read`.
            reader: A small number, different for readers at the same time.

        Raises:
            DeltaforgeError: It cannot be decoded by itself, or not now: `read` says why.
        """
        ...
