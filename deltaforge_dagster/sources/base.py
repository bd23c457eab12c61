"""The interface between the run and a database: what every source promises.

A source knows its log and nothing else: not the journal, not the state store, not Spark. The run
asks for the head, reads change batches from a position on, and tells the source up to which
position it may discard its log. `read` is one long-lived stream per run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.tables import (
    ColumnChanges,
    LoggedTable,
    SchemaStamp,
    TableDetails,
    TableFate,
    TableSchema,
)

if TYPE_CHECKING:
    import pyarrow as pa


class SchemaRegistry(Protocol):
    """Where a source registers each table version, with the position from which it applies."""

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return the stamp of `table`.

        It is that of an earlier version with the same form and columns, or a new one. The version
        is durable when this returns.

        Raises:
            LeaseLost: The run that reads no longer holds the pipeline's lease.
        """
        ...


class DetachedRegistry:
    """The registry of a decoder without a state store: every table version gets the same stamp."""

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return the fixed stamp; register nothing."""
        del table, position
        return SchemaStamp("sha256:", 1, 1)


class SourceNotes(SchemaRegistry, Protocol):
    """What a source may store between runs besides its position: table definitions, by position."""

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Store how tables look from `position` on, where the log itself does not say it.

        The definitions are durable when this returns.

        Args:
            definitions: Definitions by table, in the source's own format; None for a dropped table.
            position: Where they begin to apply.

        Raises:
            LeaseLost: The run that reads no longer holds the pipeline's lease.
        """
        ...

    def defined(self, position: Position) -> dict[str, str]:
        """Return the stored definitions that apply at `position`, by table."""
        ...

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Record what a statement does to a table's columns, for a log with columns by name only.

        The record is durable when this returns, and applies to the version of the table that is
        registered next. Earlier records for later positions are deleted.

        Args:
            table: The table; only its name matters. Nothing is recorded for a table without a
                version.
            changes: What the statement does.
            position: Position of the statement.

        Raises:
            LeaseLost: The run that reads no longer holds the pipeline's lease.
        """
        ...

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what a statement does to tables, such as dropping them, in order.

        A table that is created after one of the same name was dropped is another table. The log
        contains the changes of both, but no event that ends the rows of the former one.

        Args:
            fates: Full name of each table (`DATABASE.*` for all tables of a database), and what the
                statement does to it.
        """
        ...

    def holds(self) -> Mapping[str, str]:
        """Return the full names of tables that have a hold, each with the reason.

        All later events of these tables are parked as well (`ParkedEvent`), even those that can be
        decoded, because no change may overtake a parked one.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How large one change batch may get, and how long the reader may wait for it.

    `max_wait` (seconds) bounds the time between two batches: an idle source yields an empty batch,
    so that the caller can check its own deadlines and flags.
    """

    max_events: int = 200_000
    max_bytes: int = 4 << 20
    max_wait: float = 0.05


@dataclass(frozen=True, slots=True)
class ParkedEvent:
    """An undecoded log event that is kept back until the hold on its table is released.

    Attributes:
        table: Full name of the table.
        reason: Why it is parked, and what to do about it.
        data: Everything that `Source.decode_parked` needs to decode it later.
    """

    table: str
    reason: str
    data: bytes


def pack_parked(head: Mapping[str, Any], rest: bytes) -> bytes:
    """Return `ParkedEvent.data`: the length of a JSON head, the head, and `rest`.

    The length has 8 bytes and is little-endian.
    """
    encoded = json.dumps(head, ensure_ascii=False).encode()
    return len(encoded).to_bytes(8, "little") + encoded + rest


def unpack_parked(data: bytes) -> tuple[Any, bytes]:
    """Return the head and the rest that `pack_parked` packed.

    Raises:
        ValueError: `pack_parked` did not write this data.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes in log order.

    Attributes:
        rows: The changes, with the columns of `frame.CAPTURED`; None if nothing was captured.
        end: A position at which a segment may end: this batch and those before it contain every
            transaction up to it completely. None while a transaction is open. In a batch without
            rows, a position up to which the log has no change for us (idle progress), or None.
        log_bytes: Bytes of log read for this batch.
        parked: Events of tables on hold. They, too, are before `end` in the log.
    """

    rows: pa.RecordBatch | None
    end: Position | None
    log_bytes: int = 0
    parked: tuple[ParkedEvent, ...] = ()

    def split(self, max_events: int) -> Iterator[ChangeBatch]:
        """Yield the changes in batches of at most `max_events` rows.

        A segment may end only after the last batch.
        """
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
    """A part of the log that consists of whole transactions and can be decoded by itself.

    Picklable.
    """

    @property
    def start(self) -> Position:
        """The end of the last transaction before the section."""
        ...

    @property
    def end(self) -> Position:
        """The end of the section's last transaction."""
        ...

    @property
    def log_bytes(self) -> int:
        """Approximate size in bytes of log."""
        ...


@runtime_checkable
class AwaitableStart(Protocol):
    """A source whose start may wait for others on its server, such as for open transactions."""

    def await_start(self, at: Position | None = None, *, waits: Callable[[str], None]) -> Position:
        """Do what `Source.ensure_start` does, however long it takes.

        Args:
            at: As in `Source.ensure_start`.
            waits: Called about twice a second with a sentence that says what the start waits for;
                may raise an error, which ends the wait.

        Raises:
            StartDelayed: It took too long.
        """
        ...


class Source(Protocol):
    """One database's log.

    Methods raise only errors of the package's `errors`, which contain no secrets.
    """

    def head(self) -> Position:
        """Return the newest position of the log.

        Raises:
            SourceUnavailable: This takes over 2 seconds.
        """
        ...

    def ensure_start(self, at: Position | None = None) -> Position:
        """Create what reading needs (slot, publication) and return the position to start at.

        `read` from that position yields every change that is committed after this call returns. A
        second call creates nothing more. Where the server keeps no slot for us, a second call
        returns a later position, so the caller must keep the first. Each question to the server
        takes at most 5 seconds, unless the log has to be read to find `at`.

        Args:
            at: Start here instead: a position that another reader has reached. Reading always
                starts between transactions, so a few changes before `at` may be read again; none
                after it is skipped.

        Raises:
            PositionLost: The log after `at` is no longer available.
        """
        ...

    def reset(self, *, dry_run: bool) -> list[str]:
        """Drop what the server keeps for this pipeline but can no longer be read from.

        An example is a lost slot. `ensure_start` recreates what is dropped. Whatever is still
        usable is kept. Takes at most 5 seconds.

        Args:
            dry_run: Drop nothing, only report.

        Returns:
            Each object that is (or would be) dropped, with the reason; empty if there is none.

        Raises:
            DeltaforgeError: The server cannot be reached, or refuses.
        """
        ...

    def definitions(self, start: Position) -> dict[str, str]:
        """Return the definitions of tables at a start position that `ensure_start` just returned.

        They are in the source's own format and contain only what the log does not say; readers get
        them back from `SourceNotes.defined`. Takes at most 5 seconds; tables that cannot be read
        are left out.
        """
        ...

    def has_changes(self, after: Position) -> bool:
        """Return whether it is worth starting a run that reads from `after`.

        Called while no run reads. Also true if finding out takes too long, or if the run would have
        to skip much log.
        """
        ...

    def maintain(self, position: Position | None) -> list[Finding]:
        """Check that the server sends the changes of every table that the pipeline captures.

        Tables missing from a publication or triggers that the source itself created are added;
        anything else that is missing is returned. Called every few seconds, even while a reader is
        connected: one connection, a few bounded queries, at most 5 seconds.

        Args:
            position: The captured position, to check that the log after it is still available; None
                while a reader is connected, which notices that itself.

        Returns:
            Findings with the levels `error` (changes are not captured) and `warning`.

        Raises:
            DeltaforgeError: The server cannot be reached, or its log can no longer be read.
        """
        ...

    def preflight(
        self, position: Position | None, as_of: float | None, *, snapshot: bool = False
    ) -> list[Finding]:
        """Check the server's settings and permissions for capture, without changing anything.

        Each of its steps takes at most 30 seconds.

        Args:
            position: The captured position; None before the first run.
            as_of: When the newest captured change was made, in seconds since 1970; None before the
                first.
            snapshot: Whether snapshots of the tables will be read, too.

        Raises:
            DeltaforgeError: The server cannot be reached.
        """
        ...

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield everything committed after `start`, in log order, until the generator is closed.

        The source answers the server's keepalives even while the consumer is busy.
        Unknown events and types raise `UnsupportedEvent`; nothing is skipped.
        """
        ...

    def identity(self) -> str:
        """Return a text that identifies the server; takes at most 10 seconds.

        It changes whenever positions may mean something else: on another server, or a promoted
        replica.
        """
        ...

    def relocate(self, position: Position, previous: str) -> Position:
        """Return where reading continues on this server after a failover from `previous`.

        Reading from there yields every change after `position`. If the source cannot verify that,
        it logs a warning.

        Args:
            position: The captured position, on the previous server.
            previous: The `identity` of the previous server.

        Raises:
            PositionLost: The log after `position` is not available on this server.
        """
        ...

    def tables(self) -> list[str]:
        """Return the full names of all existing tables that the pipeline's patterns match."""
        ...

    def database(self) -> str | None:
        """Return the one database that contains every table; None if full names include it.

        Does not connect.
        """
        ...

    def details(self, table: str) -> TableDetails:
        """Return the properties of a table that are only in the catalog, not in the log.

        Takes at most 5 seconds.

        Args:
            table: Full name of the table.

        Raises:
            SourceMisconfigured: There is no such table.
            DeltaforgeError: The catalog cannot be read.
        """
        ...

    def schema(self, table: str) -> TableSchema:
        """Return the current columns and key of a table, as captured rows have them.

        A column's `data_type` is spelled as in registered table versions, or empty if the source
        does not know it.

        Args:
            table: Full name of the table.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        ...

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Yield what `read` yields, without disturbing a run that reads at the same time.

        Raises:
            NotAllowed: The server discards its log once it is confirmed, so it cannot be read
                again.
            PositionLost: The log does not go back that far.
        """
        ...

    def decode_parked(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Decode the parked events of one table; yield the changes that `read` would have yielded.

        Args:
            events: `ParkedEvent.data` of each event, in log order.
            fix: What the user has since declared about the table with `deltaforge hold`, as JSON
                text.
            position: The captured position.
            registry: Where table versions are registered.

        Raises:
            UnsupportedEvent: The events still cannot be decoded.
        """
        ...

    def confirm(self, position: Position) -> None:
        """Allow the server to discard its log up to `position`, which is the committed position.

        Returns at once; the reader's next status message tells the server. Also before `read`.
        """
        ...

    def close(self) -> None:
        """End the stream and release all connections. Safe to call twice, and from any thread."""
        ...


@runtime_checkable
class IdentifyingSource(Source, Protocol):
    """A source that can list the tables in its log, and tell tables of the same name apart."""

    def logged_tables(self) -> Mapping[str, LoggedTable]:
        """Return the captured tables whose changes are in the log from now on, by full name.

        One query, at most 5 seconds.

        Raises:
            SourceUnavailable: The server cannot be reached; try again.
        """
        ...


@runtime_checkable
class WatchableSource(Source, Protocol):
    """A source that can say at next to no cost whether its log may have grown.

    It can be asked several times a second.
    """

    def log_ends(self, seconds: float) -> Generator[object]:
        """Yield the current end of the log each time the generator is advanced.

        Yields nothing if that would not be cheap. A value differs from the previous one if a change
        was committed in between; it may also differ without a change. Asking for it neither reads
        the log nor disturbs other sessions that write to the database.

        Args:
            seconds: How long the generator may be used; all its queries share one connection.

        Raises:
            SourceUnavailable: The server does not answer, or the time is up.
        """
        ...


@dataclass(frozen=True, slots=True)
class RetainedLog:
    """How much log a server has, relative to a pipeline's positions; the log of all tables counts.

    Attributes:
        end: Where the log ends.
        bytes: Bytes after the captured position.
        unconfirmed: Bytes after the confirmed position; None if there is no such position yet.
        retained: Bytes that the server keeps because of this pipeline; None if it keeps none for
            pipelines.
        limit: The most bytes that it keeps because of this pipeline; None if any amount.
        room: For a server that discards its log whether or not it was read: bytes of log that it
            still has before the captured position. None for other servers.
        kept_seconds: For how long such a server keeps its log; None if age does not matter.
        limited_by: The server's setting for `limit` or `kept_seconds`; None without either.
    """

    end: Position
    bytes: int
    unconfirmed: int | None = None
    retained: int | None = None
    limit: int | None = None
    room: int | None = None
    kept_seconds: float | None = None
    limited_by: str | None = None


@runtime_checkable
class MeasuredSource(Source, Protocol):
    """A source that can say how much log there is after a position."""

    def retained_log(self, captured: Position, confirmed: Position | None) -> RetainedLog | None:
        """Return how much log there is after these positions; takes at most 2 seconds.

        None if the database has no log that can be measured.

        Raises:
            DeltaforgeError: The server cannot be reached, or has no such position.
        """
        ...


@runtime_checkable
class RemovableSource(Source, Protocol):
    """A source for which the server keeps something, such as log, that grows while nobody reads."""

    def remove(self, *, spared: Collection[str], dry_run: bool) -> list[str]:
        """Drop all that the server keeps for this pipeline, which cannot continue afterwards.

        Objects that somebody else created are kept. Takes at most 5 seconds.

        Args:
            spared: Names (`SourceType.names`) of what other pipelines use on this server, which is
                kept as well.
            dry_run: Drop nothing, only report.

        Returns:
            Each object that is (or would be) dropped; empty if there is none.

        Raises:
            DeltaforgeError: The server cannot be reached, or refuses.
        """
        ...


@runtime_checkable
class SectionedSource(Source, Protocol):
    """A source whose log several readers can read at the same time, in sections; picklable."""

    def behind(self, position: Position) -> int:
        """Return how many bytes of log there are after a position; 0 if unknown."""
        ...

    def warm(self) -> None:
        """Compile the kernels, or load them from the cache, so that the first read is fast.

        May take seconds; does not connect to the server.
        """
        ...

    def plan_sections(
        self, start: Position, registry: SourceNotes, log_bytes: Callable[[], int]
    ) -> Generator[LogSection | None]:
        """Yield consecutive sections of the log, each with captured changes.

        The last section ends at the log's current end, or before an event that must be read in
        sequence, by `read`. Each table version is registered before a section with rows of it is
        yielded.

        Args:
            start: Where the first section begins; the server's log must still contain it.
            registry: As for `read`.
            log_bytes: Called before each section; returns the size that it should have. A section
                with one large transaction may be larger.

        Yields:
            A section; or None while the search for the next one takes time, so that the caller gets
            control.

        Raises:
            DeltaforgeError: The server refused a request, or the run lost its lease.
        """
        ...

    def read_section(
        self, section: LogSection, limits: ReadLimits, reader: int
    ) -> Iterator[ChangeBatch]:
        """Yield exactly the changes that `read` yields for the section.

        The last batch has the section's end.

        Args:
            section: A section that `plan_sections` yielded, in this or another process.
            limits: As for `read`.
            reader: A small number that no other reader uses at the same time.

        Raises:
            DeltaforgeError: The section cannot be decoded by itself, or not now. Use `read`, which
                raises the specific error.
        """
        ...
