"""What every tick needs: the open installation, and a way to fail.

A code server evaluates every sensor and schedule, some of them every few seconds. Dagster opens the
instance of a tick (`context.instance`, which resources use as well) each time and checks the
migrations of three databases; with SQLite this took more processor time of a code server than
everything else. A newly opened state store also has to compile every statement again. So the ticks
of one process share Dagster's instance, the state store and the journal (`TickCache`), as the
webserver's threads share one instance.

A tick that finds a problem fails, so that it is visible in Dagster's list of ticks (`red`). The
reason of a skipped tick is hidden behind a click, and a skipped tick looks like an idle one. A
failed tick is red in the list, on the timeline and in *Automation*, for as long as the problem
lasts; its error ends with the message.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import dagster as dg

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.dagster_private import InstanceRef
from deltaforge_dagster.resources.platform import Opened, Platform

NOT_WELL = "NOT WELL: "
"""The beginning of the message of a tick that has found a problem."""


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


def is_outdated(settings: Settings, loaded: LoadedPipeline, current: LoadedPipeline) -> bool:
    """Return whether definitions are older than the file and only a user's request reloads them."""
    return settings.dagster_url is None and loaded.hash != current.hash


def red(skipped: dg.SkipReason) -> dg.SkipReason:
    """Return the skip reason, or fail the tick if the reason is a problem (`NOT_WELL`).

    Raises:
        dg.Failure: The tick fails, with this message.
    """
    message = str(skipped.skip_message)
    if message.startswith(NOT_WELL):
        raise dg.Failure(message, allow_retries=False)
    return skipped


def interval_seconds(loaded: LoadedPipeline) -> int:
    """Return a sensor's `minimum_interval_seconds`: one second less than the file says.

    Dagster's daemon evaluates all sensors every five seconds, and a tick gets its timestamp during
    a round. In the round five seconds later, the tick is a few milliseconds too young for an
    interval of five seconds, and the sensor is skipped until the next round. With an interval of
    five it would often run only every ten seconds.
    """
    return max(1, loaded.spec.spec.engine.dagster.sensor_interval_seconds - 1)
