"""The cost of a run by stage: which time counts as capture, journal, encode, send, and store.

========  =========================================================================================
capture   the capture thread: it receives the log, decodes it, and collects rows for the journal;
          also other threads that speak to the source
journal   the threads that write Parquet and hash it
encode    all of Spark (Java and Python workers), and what calls it in the run
send      the sink's deliverer, which also reads the encoded messages, and the client's own threads
store     transactions of the state store, in whichever thread
other     the rest of the run's process: its main thread, the lease, what watches the source and the
          holds; threads without a name; what threads used after they were read for the last time
========  =========================================================================================

Threads are assigned to stages by their names. What a thread does for another stage counts for its
own: the capture thread finishes a segment's file, for example. Where Spark tasks read sections of
the log (`pipeline/capture/backlog.py`), that counts as `encode`, because the same workers do both.
A state store in PostgreSQL works in its own server, which is in no stage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Self

from sqlalchemy import event
from sqlalchemy.pool import Pool

from deltaforge_lab.bench.cost.threads import ThreadUsage

STAGES = ("capture", "journal", "encode", "send", "store", "other")

_PREFIXES = {
    "capture ": "capture",
    "backlog ": "capture",
    "standby status": "capture",
    "heartbeat": "capture",
    "journal-": "journal",
    "encode ": "encode",
    "event_engine": "encode",  # gRPC, by which Spark is called
    "grpc_": "encode",
    "deliver ": "send",
    "kafka transaction": "send",
    "rdk:": "send",  # librdkafka
}


def stage_seconds(
    threads: Iterable[ThreadUsage], store: Mapping[int, float], *, run: float, spark: float
) -> dict[str, float]:
    """Return the processor seconds of each of `STAGES`; their sum is `run + spark`.

    Args:
        threads: The threads of the run's process.
        store: What each of them spent in the state store, by its id.
        run: Processor seconds of the run's process.
        spark: Processor seconds of Spark.
    """
    stages = dict.fromkeys(STAGES, 0.0)
    for thread in threads:
        stages[stage_of(thread.name)] += thread.cpu_seconds - store.get(thread.id, 0.0)
    stages["encode"] += spark
    stages["store"] = sum(store.values())
    stages["other"] = 0.0
    stages["other"] = run + spark - sum(stages.values())
    return stages


def stage_of(thread: str) -> str:
    """Return the stage of a thread of the run's process, by its name."""
    return next((stage for start, stage in _PREFIXES.items() if thread.startswith(start)), "other")


class StoreClock:
    """The processor time that each thread of this process spends in the state store.

    A context manager.

    It runs while a thread has a connection: building statements, the database's client, SQLite
    itself.

    Attributes:
        seconds: By the thread's id.
    """

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self.seconds: dict[int, float] = {}

    def __enter__(self) -> Self:
        """Start counting."""
        event.listen(Pool, "checkout", self._checked_out)
        event.listen(Pool, "checkin", self._checked_in)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        event.remove(Pool, "checkout", self._checked_out)
        event.remove(Pool, "checkin", self._checked_in)

    def _checked_out(self, *_: object) -> None:
        self._began[threading.get_native_id()] = time.thread_time()

    def _checked_in(self, *_: object) -> None:
        thread, now = threading.get_native_id(), time.thread_time()
        used = now - self._began.pop(thread, now)
        self.seconds[thread] = self.seconds.get(thread, 0.0) + used
