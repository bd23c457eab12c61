"""Log sections: consecutive parts of the log that several readers decode at the same time.

`plan_sections` scans the log ahead (`SectionPlanner`) and cuts it between transactions, with
position and GTIDs at each cut. A section carries the definitions of all its tables, so its reader
needs neither catalog nor registry. A reader that meets a table without a definition fails; the
section is then read by the sequential reader (`Source.read`), which may query the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltaforge_dagster.errors import LeaseLost, SourceUnavailable, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SourceNotes
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.mysql.decode.layout import (
    EVENT,
    EVENT_END,
    FORMAT,
    MEASURED,
    MEASURED_OPEN,
    MEASURING,
    NEW_FILE,
    NEW_TABLE,
    PARTIAL,
    PAYLOAD,
    TAGGED,
)
from deltaforge_dagster.sources.mysql.decode.non_row_events import NonRowEvents
from deltaforge_dagster.sources.mysql.events.sql_text import Name
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.definitions import fit, lacks_charsets
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableContext, TableCatalog
from deltaforge_dagster.sources.mysql.stream.dump import SILENCE_SECONDS
from deltaforge_dagster.sources.stream import BUFFER_BYTES, ReadBuffer, StreamSocket
from deltaforge_dagster.tables import ColumnChanges, SchemaStamp, TableFate, TableSchema

MAX_OFFSET = (1 << 32) - 1
"""The largest start offset in a file: COM_BINLOG_DUMP has 32 bits for it."""


@dataclass(frozen=True, slots=True)
class SectionTables:
    """The known tables for a part of the log without DDL.

    It takes the place of catalog, registry and prepared log for the decoder of that part, and
    raises an error for anything that the planner did not foresee.
    """

    stamps: dict[TableSchema, SchemaStamp] = field(default_factory=dict)
    definitions: dict[Name, CatalogTable] = field(default_factory=dict)

    def copy(self) -> SectionTables:
        """Return an independent copy."""
        return SectionTables(dict(self.stamps), dict(self.definitions))

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return the stamp of a table version that the planner registered."""
        del position
        if table not in self.stamps:
            raise _Unforeseen(f"a version of {table.full_name} that was not foreseen")
        return self.stamps[table]

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable | Unknown:
        """Return the definition of a table that the planner got from the catalog."""
        del position
        definition = self.definitions.get((db, table))
        if (
            definition is None
            or not fit(definition, types)
            or (charsets and lacks_charsets(definition))
        ):
            raise _Unforeseen(f"a table {db}.{table} that was not foreseen")
        return definition

    def defaults(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        columns: Collection[str],
        position: Position,
    ) -> CatalogTable | Unknown:
        """Raise an error: the planner does not look at rows."""
        del types, columns, position
        raise _Unforeseen(f"an insert into {db}.{table} that lacks columns")

    def statement(self, db: str, sql: str, position: Position) -> Collection[Name]:
        """Raise an error: the part has no statements."""
        del db, sql, position
        raise _Unforeseen("a statement where none was foreseen")

    def existing(self, names: Iterable[Name]) -> set[Name]:
        """Raise an error: the part has no statements."""
        del names
        raise _Unforeseen("a statement where none was foreseen")

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Raise an error: the part defines no tables."""
        del definitions, position
        raise _Unforeseen("a definition where none was foreseen")

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Raise an error: the part alters no tables."""
        del table, changes, position
        raise _Unforeseen("an altered table where none was foreseen")

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Raise an error: the part has no statements."""
        del fates
        raise _Unforeseen("a statement where none was foreseen")

    def defined(self, position: Position) -> dict[str, str]:
        """Return nothing: all definitions come from `table`."""
        del position
        return {}

    def holds(self) -> Mapping[str, str]:
        """Return nothing: the part has no events of tables on hold."""
        return {}

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Raise an error: no log section contains the end of a prepared XA transaction."""
        del xid, until
        raise _Unforeseen("a prepared transaction where none was foreseen")


class _Unforeseen(UnsupportedEvent):
    """The decoder of a section met something that the planner had not seen."""


class _Mark(NamedTuple):
    """A boundary of transactions, with the bytes of log before it: all, and of captured changes."""

    place: BinlogPosition
    log_bytes: int
    measured: int


@dataclass(frozen=True, slots=True)
class BinlogSection:
    """A section of a binary log; implements `sources.base.LogSection`.

    Attributes:
        start: The end of the transaction before it.
        end: The end of its last transaction.
        log_bytes: Approximate size.
        server: Identity of the server that has it; on other servers its positions mean something
            else.
        tables: The definitions and registered versions with which its rows are decoded.
    """

    start: BinlogPosition
    end: BinlogPosition
    log_bytes: int
    server: str
    tables: SectionTables


class Remembering:
    """Catalog and registry of a section planner.

    Passes requests on to the source's, and records the answers.
    """

    def __init__(self, catalog: TableCatalog, registry: SourceNotes, tables: SectionTables) -> None:
        self._catalog = catalog
        self._registry = registry
        self._tables = tables

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register a table version, and record its stamp."""
        stamp = self._registry.register(table, position)
        self._tables.stamps[table] = stamp
        return stamp

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable | Unknown:
        """Ask the catalog for a table, and record its definition."""
        answer = self._catalog.table(db, table, types, position, charsets=charsets)
        if isinstance(answer, CatalogTable):
            self._tables.definitions[db, table] = answer
        return answer

    def defaults(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        columns: Collection[str],
        position: Position,
    ) -> CatalogTable | Unknown:
        """Ask the catalog; the planner does not, because it does not look at rows."""
        return self._catalog.defaults(db, table, types, columns, position)

    def statement(self, db: str, sql: str, position: Position) -> Collection[Name]:
        """Do nothing: the planner stops before the first statement that defines a table."""
        del db, sql, position
        return ()

    def existing(self, names: Iterable[Name]) -> set[Name]:
        """Ask the catalog."""
        return self._catalog.existing(names)


def plan_sections(
    stream: StreamSocket,
    planner: SectionPlanner,
    tables: SectionTables,
    start: BinlogPosition,
    *,
    log_bytes: Callable[[], int],
    server: str,
) -> Generator[BinlogSection | None]:
    """Yield consecutive log sections from `start` on, each with captured changes.

    Yields None while searching. The last section ends at the log's current end, or before an event
    that no section may contain.

    Args:
        stream: A dump that begins at `start` and ends at the log's end; it is closed here.
        planner: A new planner.
        tables: Where the planner's `Remembering` records tables.
        start: Where to begin.
        log_bytes: Called before each section; returns how large it should be. A single transaction
            may be larger.
        server: Identity of the server.

    Raises:
        SourceUnavailable: The connection broke.
        LeaseLost: The run that reads no longer holds the pipeline's lease.
    """
    begin, candidate, limit = _Mark(start, 0, 0), None, log_bytes()
    read = 0
    buffer = ReadBuffer(BUFFER_BYTES)

    def section(end: _Mark) -> BinlogSection:
        size = end.log_bytes - begin.log_bytes
        return BinlogSection(begin.place, end.place, size, server, tables.copy())

    with closing(stream):
        over = False
        while not over:
            if not buffer.fill(stream.receive, 1.0):
                if stream.silence > SILENCE_SECONDS:
                    raise SourceUnavailable(
                        "the server says nothing while sections of its log are planned"
                    )
                yield None
                continue
            decoded = planner.feed(buffer.data, buffer.length)
            buffer.drop(decoded.consumed)
            read += decoded.consumed
            ends = [batch.end for batch in decoded.batches if batch.end is not None]
            over = bool(decoded.error or decoded.foreign)
            if ends:
                assert isinstance(ends[-1], BinlogPosition)
                mark = _Mark(ends[-1], read, planner.measured)
                over = over or mark.place.pos > MAX_OFFSET
                if candidate is not None and mark.log_bytes - begin.log_bytes > limit:
                    # `mark` is too far away: end the section at an earlier boundary.
                    yield section(candidate)
                    begin, candidate, limit = candidate, None, log_bytes()
                if mark.measured > begin.measured:
                    candidate = mark
            yield None
        if isinstance(decoded.error, LeaseLost):
            raise decoded.error
        if candidate is not None:
            yield section(candidate)


_HANDLED_STOPS = (FORMAT, NEW_FILE, NEW_TABLE, TAGGED)


class _PlannerEvents(NonRowEvents):
    """Handles non-row events of files, tables and transactions for the planner; others end it."""

    def act(self, stop: int, source: Bytes) -> None:
        """Handle the event at which `scan` stopped; the scan then continues after it.

        Raises:
            UnsupportedEvent: The log from here on cannot be decoded as a separate section.
        """
        state = self._state
        if stop in _HANDLED_STOPS:
            super().act(stop, source)
        elif stop == PAYLOAD:  # the rest of a transaction, which counts as captured
            state[MEASURED_OPEN] += state[EVENT_END] - state[EVENT]
            self._assembler.commit()
        elif stop == PARTIAL:
            state[MEASURED_OPEN] += state[EVENT_END] - state[EVENT]
        else:
            raise UnsupportedEvent(f"what follows cannot be decoded by itself, {self._where()}")


class SectionPlanner(MysqlDecoder):
    """A decoder that yields only positions between transactions, in batches without rows.

    It takes the arguments of `MysqlDecoder` and tracks transactions and positions as that does, but
    skips the rows: it only counts the bytes of events with captured rows. So it is much cheaper
    than decoding. It registers table versions as they occur, so all versions in a section are
    registered before the section is decoded.

    It continues only while each section can be decoded from its own bytes and the tables known so
    far. A DDL statement, a prepared transaction, a table on hold, or anything else that needs more
    ends it, as `DecodedBinlog.error`. The sequential reader continues from there.
    """

    _non_row_events = _PlannerEvents

    def __init__(self, context: MysqlTableContext, **arguments: Any) -> None:
        super().__init__(context, **arguments)
        self._state[MEASURING] = 1

    @property
    def measured(self) -> int:
        """Bytes of events with captured changes, in all transactions that have ended."""
        return int(self._state[MEASURED])
