"""Log sections of the log: consecutive parts that readers beside each other decode.

`plan_sections` looks through the log ahead (`SectionPlanner`) and says where one may be cut: between two
transactions, with the position and the GTIDs there. Each log section carries what its reader has to know of
the tables in it, so that it needs neither catalog nor registry, and asks nobody: a reader that meets
a table it was not told of fails, and its log section is read by the one reader who may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
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
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable, Unknown
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import Name
from deltaforge_dagster.sources.mysql.schema.definitions import fit, lacks_charsets
from deltaforge_dagster.sources.mysql.schema.versions import TableCatalog
from deltaforge_dagster.sources.mysql.stream.dump import SILENCE_SECONDS
from deltaforge_dagster.sources.stream.read_buffer import BUFFER_BYTES, ReadBuffer
from deltaforge_dagster.sources.stream.socket import StreamSocket
from deltaforge_dagster.tables import SchemaStamp, TableSchema

MAX_OFFSET = (1 << 32) - 1
"""The command that reads from a place has 32 bits for the offset."""


@dataclass(frozen=True, slots=True)
class SectionTables:
    """What is known of the tables in a part of the log that defines none.

    It is catalog and registry of those who decode the part: they ask for nothing else.
    """

    stamps: dict[TableSchema, SchemaStamp] = field(default_factory=dict)
    definitions: dict[Name, CatalogTable] = field(default_factory=dict)

    def copy(self) -> SectionTables:
        """Return what is known now."""
        return SectionTables(dict(self.stamps), dict(self.definitions))

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return the stamp of a version that is registered already."""
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
        """Return a table that the catalog was asked for before."""
        del position
        known = self.definitions.get((db, table))
        if known is None or not fit(known, types) or (charsets and lacks_charsets(known)):
            raise _Unforeseen(f"a table {db}.{table} that was not foreseen")
        return known

    def statement(self, db: str, sql: str, position: Position) -> None:
        """Refuse: a part without statements was asked for."""
        del db, sql, position
        raise _Unforeseen("a statement where none was foreseen")

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Refuse: nothing is to be noted."""
        del definitions, position
        raise _Unforeseen("a definition where none was foreseen")

    def defined(self, position: Position) -> dict[str, str]:
        """Return nothing: `table` has it all."""
        del position
        return {}

    def held(self) -> Mapping[str, str]:
        """Hold nothing: there is no event of a held table in the part."""
        return {}

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Raise an error: no log section contains the end of a prepared XA transaction."""
        del xid, until
        raise _Unforeseen("a prepared transaction where none was foreseen")


class _Unforeseen(UnsupportedEvent):
    """Something that the planner of this part of the log had not."""


class _Mark(NamedTuple):
    """A place between two transactions, and what the planner had seen before it."""

    place: BinlogPosition
    log_bytes: int
    measured: int


@dataclass(frozen=True, slots=True)
class BinlogSection:
    """A part of the log between two transactions; `sources.base.LogSection`.

    Attributes:
        start: Behind the transaction before it.
        end: Behind its last one.
        log_bytes: Its size, roughly.
        server: Which server has it (`identity`); elsewhere the same place is another one.
        tables: What its rows are decoded with.
    """

    start: BinlogPosition
    end: BinlogPosition
    log_bytes: int
    server: str
    tables: SectionTables


class Remembering:
    """Catalog and registry of a section planner: asks those of the source, and keeps what they say."""

    def __init__(self, catalog: TableCatalog, registry: SourceNotes, tables: SectionTables) -> None:
        self._catalog = catalog
        self._registry = registry
        self._tables = tables

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register a version."""
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
        """Ask for a table."""
        found = self._catalog.table(db, table, types, position, charsets=charsets)
        if isinstance(found, CatalogTable):
            self._tables.definitions[db, table] = found
        return found

    def statement(self, db: str, sql: str, position: Position) -> None:
        """Follow no statement: the planner ends before the first."""


def plan_sections(
    stream: StreamSocket,
    planner: SectionPlanner,
    tables: SectionTables,
    start: BinlogPosition,
    *,
    log_bytes: Callable[[], int],
    server: str,
) -> Generator[BinlogSection | None]:
    """Yield consecutive log sections from `start` on, each with something captured; None meanwhile.

    They end where the log does now, or before what no section may contain.

    Args:
        stream: A dump that begins at `start` and ends at the log's end; it is closed here.
        planner: Has seen nothing yet.
        tables: What the planner's catalog and registry write into.
        start: Where to begin.
        log_bytes: Asked before each log section how large it may get; a transaction may be larger.
        server: Which one it is.

    Raises:
        SourceUnavailable: The connection broke.
        LeaseLost: The run that reads no longer holds the pipeline.
    """
    begin, whole, most = _Mark(start, 0, 0), None, log_bytes()
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
                if whole is not None and mark.log_bytes - begin.log_bytes > most:
                    yield section(whole)
                    begin, whole, most = whole, None, log_bytes()
                if mark.measured > begin.measured:
                    whole = mark
            yield None
        if isinstance(decoded.error, LeaseLost):
            raise decoded.error
        if whole is not None:
            yield section(whole)


_AS_A_DECODER = (FORMAT, NEW_FILE, NEW_TABLE, TAGGED)


class _Passed(NonRowEvents):
    """Acts on what says where transactions and tables are; passes over rows, and ends at the rest."""

    def act(self, stop: int, source: Bytes) -> None:
        """Do what `scan` stopped for; it goes on after the event when this returns.

        Raises:
            UnsupportedEvent: What follows cannot be decoded by itself.
        """
        state = self._state
        if stop in _AS_A_DECODER:
            super().act(stop, source)
        elif stop == PAYLOAD:  # the rest of a transaction, its end too; perhaps nothing is captured
            state[MEASURED_OPEN] += state[EVENT_END] - state[EVENT]
            self._found.commit()
        elif stop == PARTIAL:
            state[MEASURED_OPEN] += state[EVENT_END] - state[EVENT]
        else:
            raise UnsupportedEvent(f"what follows cannot be decoded by itself, {self._where()}")


class SectionPlanner(MysqlDecoder):
    """Yields positions between transactions, in batches without rows; takes what `MysqlDecoder` takes.

    It keeps the same account of transactions and positions as a decoder, but passes over the rows: it
    only counts the bytes of events that have captured ones. So it costs little beside decoding. It
    registers table versions as they come: those who decode the parts of the log between two of its
    positions find them all registered.

    It goes on only as long as every such part can be decoded from nothing but its own bytes and the
    tables known so far. A statement that defines something, a prepared transaction, a table that is
    held, and whatever else asks for more, end it, as its `DecodedBinlog.error`; a decoder that reads
    on from there deals with it.
    """

    _non_row_events = _Passed

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._state[MEASURING] = 1

    @property
    def measured(self) -> int:
        """Bytes of events with captured changes, in all transactions that have ended so far."""
        return int(self._state[MEASURED])
