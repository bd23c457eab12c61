"""Decode held events (`held_events`) once the definition of their table is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SchemaRegistry
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.mysql.decode.held_events import (
    HeldBatch,
    HeldRows,
    HeldStatement,
    KnownTables,
    follow,
)
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import GtidRun
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.values.types import ValueForms
from deltaforge_dagster.sources.outbox import NO_OUTBOX, MysqlOutboxTables
from deltaforge_dagster.sources.rows.arrays import with_tx_end
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules


class LogPlaces:
    """Positions of events by their place in the log alone, without a set of executed GTIDs."""

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> Position:
        """Return the place."""
        del gtids
        return self.within(file, pos)

    def within(self, file: str, pos: int) -> Position:
        """Return the place."""
        return BinlogPosition(file, pos)


class _NothingPrepared:
    """Held rows of a prepared transaction were kept when it was committed."""

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Refuse."""
        raise UnsupportedEvent(f"XA transaction {xid} among held events at {until.file}")


def decode_held(
    events: Iterator[bytes],
    tables: KnownTables,
    *,
    source_id: str,
    registry: SchemaRegistry,
    forms: ValueForms,
    outboxes: MysqlOutboxTables = NO_OUTBOX,
    rules: ColumnRules = NO_RULES,
) -> Iterator[pa.RecordBatch]:
    """Yield the changes of held events of one table, as if they had never been held.

    Args:
        events: The held items in log order, each as its `data()` returned it.
        tables: What is known of tables; follows the statements among the events.
        source_id: As of the source, since ids of events depend on it.
        registry: Where versions are registered.
        forms: How values look.
        outboxes: Tables whose changes are marked as those of outboxes.
        rules: What is hidden of columns.

    Raises:
        UnsupportedEvent: The columns of the table are still not known.
        CorruptLog: What was kept is not whole.
    """
    decoder = MysqlDecoder(
        source_id=source_id,
        progress=LogPlaces(),
        registry=registry,
        catalog=tables,
        captures=lambda _db, _table: True,
        prepared=_NothingPrepared(),
        forms=forms,
        outboxes=outboxes,
        rules=rules,
    )
    for kept, successor in follow(events):
        if isinstance(kept, HeldStatement):
            tables.statement(kept.database, kept.sql, BinlogPosition("held.0", 0))
            decoder.forget_tables()
            continue
        last = successor is None or _transaction(successor) != _transaction(kept)
        if isinstance(kept, HeldBatch):
            yield with_tx_end(kept.rows) if last else kept.rows
        else:
            yield from decoder.decode_held(kept, last=last)


def _transaction(kept: object) -> tuple[int, ...]:
    assert isinstance(kept, HeldRows | HeldBatch)
    return kept.tx
