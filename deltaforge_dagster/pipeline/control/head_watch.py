"""Watch the head of an idle pipeline's source, so that a change need not wait for the next tick.

A tick that finds nothing to do watches for the rest of its time: it asks five times a second where
the log ends, which costs the server next to nothing, and looks for changes only when the log has
grown. No slot is held and no log is read meanwhile. The log of a server whose other tables are busy
grows all the time, so looks that find nothing are a second apart at least, and take at most a tenth
of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Self

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source, WatchableSource

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.2
_PAUSE_SECONDS = 1.0  # at least, after a look that found no change
_PAUSE_FACTOR = 9.0  # times the duration of that look, so that looks take a tenth of the time
_PATIENCE = 2.0
"""How much longer than the watch its connection may last.

This covers connecting, and a server that does not answer.
"""


class HeadWatch:
    """Watches one source; a context manager, which connects on entry and disconnects on exit.

    Enter it before the tick looks for changes: then nothing is missed between that look and the
    watch. An error of the source only ends the watch: the next tick meets it, too, and reports it.

    Attributes:
        until: When to stop watching, by the monotonic clock.

    Args:
        build_source: Creates the source.
        until: As above.
    """

    def __init__(self, build_source: Callable[[], Source], until: float) -> None:
        self._build_source = build_source
        self.until = until
        self._source: Source | None = None
        self._ends: Generator[object] | None = None
        self._seen: object = None

    def __enter__(self) -> Self:
        seconds = self.until - time.monotonic()
        try:
            self._source = self._build_source()
            if isinstance(self._source, WatchableSource) and seconds > 0:
                ends = self._source.log_ends(seconds + _PATIENCE)
                self._seen = next(ends)
                self._ends = ends
        except (DeltaforgeError, StopIteration) as error:
            logger.debug("not watched: %s", error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ends is not None:
            self._ends.close()
        if self._source is not None:
            self._source.close()

    def sees_changes(self, after: Position) -> bool:
        """Return True once the source has changes after a position, False once the time is up."""
        if self._ends is None or self._source is None:
            return False
        look_at = 0.0
        try:
            for end in self._ends:
                began = time.monotonic()
                if end != self._seen and began >= look_at:
                    if self._source.has_changes(after):
                        return True
                    self._seen = end
                    now = time.monotonic()
                    look_at = now + max(_PAUSE_SECONDS, _PAUSE_FACTOR * (now - began))
                if time.monotonic() + _ASK_SECONDS >= self.until:
                    break
                time.sleep(_ASK_SECONDS)
        except DeltaforgeError as error:
            logger.debug("watched no longer: %s", error)
        return False
