"""The resources that the ticks of one process share, opened once.

These are Dagster's instance, the state store and the journal.

A code server evaluates every sensor and schedule, some of them every few seconds. Dagster opens the
instance of a tick (`context.instance`, which resources use as well) each time and checks the
migrations of three databases; with SQLite this took more processor time of a code server than
everything else. A newly opened state store also has to compile every statement again. The
webserver's threads share one instance in the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import dagster as dg

from deltaforge_dagster.dagster_private import InstanceRef
from deltaforge_dagster.resources.platform import Opened, Platform


class TickCache:
    """Provides ticks with the open installation. Thread-safe."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._closing = ExitStack()
        self._instance: tuple[InstanceRef, dg.DagsterInstance] | None = None
        weakref.finalize(self, self._closing.close)

    @contextmanager
    def lend(
        self, context: dg.SensorEvaluationContext | dg.ScheduleEvaluationContext
    ) -> Iterator[tuple[dg.DagsterInstance, Opened]]:
        """Yield Dagster's instance and the open state store and journal to a tick.

        After an error they are closed and opened again for the next tick, because a connection may
        be dead, or a file or database may have been replaced.

        Raises:
            DeltaforgeError: They cannot be opened (`Platform.open`); the next tick tries again.
        """
        instance = self._instance_of(context)
        with self._lock:
            if self._opened is None:
                self._opened = self._closing.enter_context(self._platform.open())
            opened = self._opened
        try:
            yield instance, opened
        except Exception:
            with self._lock:
                if self._opened is opened:
                    self._opened = self._instance = None
                    self._closing.close()
            raise

    def _instance_of(
        self, context: dg.SensorEvaluationContext | dg.ScheduleEvaluationContext
    ) -> dg.DagsterInstance:
        ref = context.instance_ref
        if ref is None:  # evaluated directly with another instance, as in tests
            return context.instance
        with self._lock:
            if self._instance is None or self._instance[0] != ref:
                self._instance = ref, dg.DagsterInstance.from_ref(ref)
            return self._instance[1]
