"""Where transactions end in a log, without reading what is in them.

`SectionPlanner` takes a dump stream as `decoder.MysqlDecoder` does and keeps the same account of transactions and
positions, but passes over the rows: it only counts the bytes of events that have captured ones. So
it costs little beside decoding. It registers table versions as they come, as a decoder does: those
who decode the parts of the log between two of its positions find them all registered.

It goes on only as long as every such part can be decoded by itself: from nothing but its own bytes and
the tables known so far. A statement that defines something, a prepared transaction, a table that is
held, and whatever else asks for more, end it; a decoder that reads on from there deals with it.
"""

from __future__ import annotations

from typing import Any

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.mysql.decode.layout import (
    EVENT,
    EVENT_END,
    MEASURED,
    MEASURED_OPEN,
    MEASURING,
)
from deltaforge_dagster.sources.mysql.decode.non_row_events import NonRowEvents
from deltaforge_dagster.sources.mysql.decode.stops import (
    FORMAT,
    NEW_FILE,
    NEW_TABLE,
    PARTIAL,
    PAYLOAD,
    TAGGED,
)

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

    Whatever ends it is its `Decoded.error`.
    """

    _non_row_events = _Passed

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._state[MEASURING] = 1

    @property
    def measured(self) -> int:
        """Bytes of events with captured changes, in all transactions that have ended so far."""
        return int(self._state[MEASURED])
