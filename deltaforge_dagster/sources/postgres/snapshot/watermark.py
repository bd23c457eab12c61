"""The watermark of a snapshot: what each of its reads has to see."""

from __future__ import annotations

import json
from dataclasses import dataclass

import psycopg

from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.position import parse_lsn


@dataclass(frozen=True, slots=True)
class Watermark:
    """Where the log stood at some moment, and which transactions were running a little later.

    A read that sees all of these sees everything that was committed up to `lsn`: also what stood in the
    log by then, and could not be seen. A snapshot does not say which are running: it names none that began
    after the last one that has ended. Their locks do.

    Attributes:
        lsn: Where the log ended.
        running: Numbers of transactions, and of subtransactions, as the log has them.
    """

    lsn: int
    running: tuple[str, ...]

    def to_json(self) -> str:
        """Return the text that `parse` reads back."""
        return json.dumps({"lsn": format_lsn(self.lsn), "running": self.running})

    @classmethod
    def parse(cls, text: str) -> Watermark:
        """Return what `to_json` wrote."""
        fields = json.loads(text)
        return cls(parse_lsn(fields["lsn"]), tuple(fields["running"]))

    @classmethod
    def now(cls, connection: psycopg.Connection) -> Watermark:
        """Return the current watermark."""
        lsn = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        running = connection.execute(
            "SELECT transactionid::text FROM pg_locks"
            " WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        ).fetchall()
        assert lsn is not None
        return cls(parse_lsn(lsn[0]), tuple(row[0] for row in running))
