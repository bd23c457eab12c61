"""A decoder for synthetic streams (`events`): to compile the kernels, and to measure them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltaforge_dagster.errors import PositionLost, UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import GtidRun
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.synthetic.events import orders
from deltaforge_dagster.tables import SchemaStamp, TableSchema


def warm() -> None:
    """Compile every kernel, or load it from the cache, by decoding a small synthetic stream."""
    stream = orders(2)
    synthetic_decoder().feed(stream, len(stream))


def synthetic_decoder() -> MysqlDecoder:
    """Return a decoder for synthetic streams (`events`): no registry, no catalog."""
    return MysqlDecoder(
        source_id="made-up",
        progress=_NoProgress(),
        registry=_NoRegistry(),
        catalog=_NoTables(),
        captures=lambda _database, _table: True,
        prepared=_NoLog(),
    )


@dataclass(frozen=True, slots=True)
class _NoPosition:
    """A position of a stream that means nothing."""

    pos: int

    def to_json(self) -> str:
        """Return a synthetic text."""
        return str(self.pos)

    def __lt__(self, other: _NoPosition) -> bool:
        return self.pos < other.pos

    def __le__(self, other: _NoPosition) -> bool:
        return self.pos <= other.pos


class _NoProgress:
    """Knows nothing but the place in the file."""

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> Position:
        """Return a synthetic position."""
        del gtids, file
        return _NoPosition(pos)

    def within(self, file: str, pos: int) -> Position:
        """Return a synthetic position."""
        del file
        return _NoPosition(pos)


class _NoRegistry:
    """A registry that keeps nothing, for a stream that means nothing."""

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return a synthetic stamp."""
        del table, position
        return SchemaStamp("sha256:", 1, 1)


class _NoLog:
    """A log that holds no prepared transaction."""

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Find nothing."""
        raise PositionLost(f"no XA transaction {xid} before {until.file}:{until.pos}")


class _NoTables:
    """A catalog that knows no table."""

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable:
        """Know no table."""
        del types, position, charsets
        raise UnsupportedEvent(f"table {db}.{table} is not described")

    def statement(self, db: str, sql: str, position: Position) -> None:
        """Follow no statement."""
