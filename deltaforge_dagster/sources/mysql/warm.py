"""Compile the decoder's kernels in advance, by decoding a small sample of a binary log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from deltaforge_dagster.errors import PositionLost, UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import DetachedRegistry, SchemaRegistry
from deltaforge_dagster.sources.mysql.decode.decoder import LogPlaces, MysqlDecoder
from deltaforge_dagster.sources.mysql.events.sql_text import Name
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.events.table_map import CatalogTable
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableContext

SAMPLE = bytes.fromhex("""
2d000001008532576904010000002c000000000000002000040000000000000062696e6c6f672e303030303031755d26
c17a00000100853257690f01000000790000007d00000000000400382e302e3135000000000000000000000000000000
000000000000000000000000000000000000000000000000000000000000000000130000000000000000000000000000
00000000000000000000000000000000000000000000000000000132274b1150000001008532576921010000004f0000
00cc000000000000000102030405060708090a0b0c0d0e0f010000000000000002000000000000000001000000000000
0000000000000000fc2c01000000000a431ddb5a00000100853257690201000000590000002501000000000800000000
0000000400000500000000000073686f7000435245415445205441424c45206f72646572732028696420626967696e74
205052494d415259204b455929c86edaf150000001008532576921010000004f00000074010000000000000102030405
060708090a0b0c0d0e0f0200000000000000020000000000000000010000000000000040eb9dc65e4706fc2c01000000
004e498b6b340000010085325769020100000033000000a7010000000008000000000000000400000500000000000073
686f7000424547494ec4a7822a7c000001008532576913010000007b0000002202000000006c00000000000100047368
6f7000066f72646572730006080ff60f12fc0890010a02500006023e0101000309fcff00fcff00fcff00042a02696408
637573746f6d657206616d6f756e74067374617475730a637265617465645f6174046e6f7465080100cef86191c10000
0100853257691e01000000c0000000e202000000006c000000000001000200063f0000000000000000000e0063757374
6f6d65722d30303030308000000000036e657799b942000000000022006f7264657220303a206c656176652061742074
686520646f6f722c20706c656173650001000000000000000e00637573746f6d65722d30373931398000000101047061
696499b944000100000122006f7264657220313a206c656176652061742074686520646f6f722c20706c656173652143
d75220000001008532576910010000001f00000001030000000009000000000000007c4308ec
""")
"""Part of a dump: a statement, and a transaction with two inserts of six columns."""

_UNREGISTERED = DetachedRegistry()


def warm() -> None:
    """Compile every kernel, or load it from the cache, by decoding the sample."""
    detached_decoder().feed(SAMPLE, len(SAMPLE))


def detached_decoder(registry: SchemaRegistry = _UNREGISTERED) -> MysqlDecoder:
    """Return a decoder without server and catalog; without `registry`, it registers nothing."""
    return MysqlDecoder(
        MysqlTableContext(registry, _NoTables(), captures=lambda _database, _table: True),
        source_id="sample",
        progress=LogPlaces(),
        prepared=_NoLog(),
    )


class _NoLog:
    """A log without prepared XA transactions."""

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Raise `PositionLost`: the sample has no XA transaction."""
        raise PositionLost(f"no XA transaction {xid} before {until.file}:{until.pos}")


class _NoTables:
    """A catalog without tables."""

    def table(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        position: Position,
        *,
        charsets: bool = False,
    ) -> CatalogTable:
        """Raise `UnsupportedEvent`: the sample's own metadata describe its tables."""
        del types, position, charsets
        raise UnsupportedEvent(f"table {db}.{table} is not described")

    def defaults(
        self,
        db: str,
        table: str,
        types: tuple[str, ...],
        columns: Collection[str],
        position: Position,
    ) -> CatalogTable:
        """Raise `UnsupportedEvent`: the sample's images have all columns."""
        del columns
        return self.table(db, table, types, position)

    def statement(self, db: str, sql: str, position: Position) -> Collection[Name]:
        """Ignore the statement."""
        del db, sql, position
        return ()

    def existing(self, names: Iterable[Name]) -> set[Name]:
        """Return nothing: the sample names no table in a statement."""
        del names
        return set()
