"""Whether a source finds nothing new, however busy its server is."""

from __future__ import annotations

import time
from typing import Protocol

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source

_PATIENCE_SECONDS = 60.0


class HasSource(Protocol):
    """A bench of any database."""

    def source(self) -> Source:
        """Return one more source over its tables."""


def is_quiet(bench: HasSource, after: Position) -> bool:
    """Say whether nothing of the captured tables changed after a position.

    An answer that comes too late, and a reader that has not quite ended, count as changes: asked
    again for a minute.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while bench.source().has_changes(after):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
