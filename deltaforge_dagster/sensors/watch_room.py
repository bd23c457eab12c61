"""Which ticks may watch their source for a while, so that a change starts a run at once.

A tick that watches occupies a thread of Dagster's daemon and one of the code server, which needs
its threads also to start runs and to answer the webserver. So at most half of the threads watch at
a time. If there are more pipelines than that, they share the time: the more pipelines, the shorter
each tick watches.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:  # definitions have the room, and watch nothing
    from deltaforge_dagster.pipeline.control.unread_log import HeadWatch
    from deltaforge_dagster.sources.base import Source

ROUND_SECONDS = 5
"""Dagster's daemon evaluates sensors every five seconds."""

WATCH_SECONDS = 4.0
"""A tick that has ended by then is over before the daemon's next round, also on a busy machine."""

_TOO_SHORT = 0.2
"""Seconds: a shorter watch is not worth the connection that it opens."""


class WatchRoom:
    """Decides which ticks of a code server watch, and until when. Thread-safe.

    Args:
        pipelines: How many of its pipelines have a sensor.
    """

    def __init__(self, pipelines: int = 0) -> None:
        self._pipelines = pipelines
        self._lock = threading.Lock()
        self._watching = 0

    def admit(self, pipelines: int) -> None:
        """Count more pipelines that have a sensor."""
        with self._lock:
            self._pipelines += pipelines

    @contextmanager
    def watch(
        self, instance: dg.DagsterInstance, build_source: Callable[[], Source], began: float
    ) -> Iterator[HeadWatch | None]:
        """Yield a watch that has begun; None if there is no room.

        Args:
            instance: Tells how many threads the daemon has for sensors.
            build_source: Creates the source.
            began: When the tick began, by the monotonic clock.
        """
        places = places_to_watch(instance)
        until = began + WATCH_SECONDS * min(1.0, places / self._pipelines)
        with self._lock:
            room = self._watching < places and until - time.monotonic() > _TOO_SHORT
            self._watching += room
        if not room:
            yield None
            return
        from deltaforge_dagster.pipeline.control.unread_log import HeadWatch  # noqa: PLC0415

        try:
            with HeadWatch(build_source, until) as watch:
                yield watch
        finally:
            with self._lock:
                self._watching -= 1


def places_to_watch(instance: dg.DagsterInstance) -> int:
    """Return how many ticks may watch at a time: half of the threads for sensors.

    The threads are those of the daemon or of the code server, whichever has fewer. 0 if the daemon
    evaluates one sensor after another.
    """
    usual = min(32, (os.cpu_count() or 1) + 4)  # default of `ThreadPoolExecutor`, which both use
    settings = instance.get_sensor_settings()
    if not settings.get("use_threads"):
        return 0
    daemon = settings.get("num_workers") or usual
    code_server = int(os.environ.get("DAGSTER_GRPC_MAX_WORKERS") or usual)
    return min(daemon, code_server) // 2
