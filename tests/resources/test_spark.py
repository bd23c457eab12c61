"""Tests of a run's session: remembered across runs, and replaced when it is dead."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.run_context import spark_condition
from deltaforge_dagster.resources.left_tasks import end_left_tasks, interrupt
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.spark import SESSION_SETTINGS, SparkSessions
from tests.fix_spark import SparkAddress, unix_sockets
from tests.pipeline.changes import eventually
from tests.state.make import NAME, expire, held

pytestmark = pytest.mark.spark

Make = Callable[[str | None], SparkSessions]


@pytest.fixture
def remembered() -> list[str]:
    """The session ids that were stored, oldest first."""
    return []


@pytest.fixture
def make(spark_server: SparkAddress, remembered: list[str]) -> Iterator[Make]:
    """Create providers over the shared server; their sessions are ended afterwards."""
    settings = Settings.from_env({"DELTAFORGE_SPARK_REMOTE": spark_server.remote})
    made: list[SparkSessions] = []

    def one(session_id: str | None) -> SparkSessions:
        made.append(SparkSessions(settings, session_id, remembered.append))
        return made[-1]

    yield one
    for sessions in made:
        sessions.stop()


def test_errors_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark's own log, with stack traces and quoted data, stays off after Dagster enables loggers again."""
    theirs = logging.getLogger("pyspark.sql.connect.logging")
    monkeypatch.setattr(theirs, "disabled", False)  # as `logging.config.dictConfig` leaves it

    assert not theirs.isEnabledFor(logging.CRITICAL)


def test_one_session(make: Make, remembered: list[str]) -> None:
    """A run creates one session, stores its id before using it, and sets the configuration that jobs need."""
    sessions = make(None)

    session = sessions.session()

    assert sessions.session() is session
    assert remembered == [session.session_id]
    for name, value in SESSION_SETTINGS.items():
        assert session.conf.get(name) in {value, f"{value}b", "8388608b"}


def test_the_next_run_continues_it(make: Make, remembered: list[str]) -> None:
    """A run that is given a session id uses that session."""
    first = make(None).session()
    first.range(7).createOrReplaceTempView("left_behind")

    second = make(remembered[0]).session()

    assert second is not first
    assert second.table("left_behind").count() == 7
    assert len(remembered) == 1


@contextmanager
def hanging(make: Make, begun: Path) -> Iterator[list[PySparkException]]:
    """Let tasks hang in a new session during the block, then wait for their end; yield how they ended.

    The file `released` beside `begun` would let them go on, and those of the job that begin later, too.
    """
    released = begun.with_name("released")

    def hang(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun.touch()
        while not released.exists():
            time.sleep(0.05)
        yield from ()

    ended: list[PySparkException] = []

    def left() -> None:
        try:
            make(None).session().range(64).mapInArrow(hang, "id long").collect()
        except PySparkException as error:
            ended.append(error)

    thread = threading.Thread(target=left)
    thread.start()
    eventually(begun.exists)
    yield ended
    thread.join(600)


def test_tasks_of_a_run_that_is_gone_are_ended(
    make: Make, remembered: list[str], tmp_path: Path
) -> None:
    """Spark would continue such tasks forever, and they would block the next run's tasks."""
    with hanging(make, tmp_path / "begun") as ended:
        second = make(remembered[0]).session()

    assert [error.getCondition() for error in ended] == ["OPERATION_CANCELED"]
    assert second.range(64).count() == 64


def test_tasks_of_a_killed_run_are_ended_without_another_run(
    make: Make,
    remembered: list[str],
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a tick does it: once the lease has expired, and not for a run that has begun meanwhile."""
    spark_server.use(tmp_path / "home", monkeypatch)
    settings = Settings.from_env()
    with (
        Platform(settings).open() as opened,
        hanging(make, tmp_path / "begun") as ended,
    ):
        lease = held(opened.store, "cache")
        with opened.store.fenced(lease) as writer:
            writer.lease.set_session(remembered[0])
        interrupt(settings, NAME)
        expire(opened.store)
        make(remembered[0]).interrupt(unless=lambda: True)
        time.sleep(1.0)
        assert ended == []
        row = opened.store.leases.get(NAME)
        assert row is not None
        end_left_tasks(row)

    assert [error.getCondition() for error in ended] == ["OPERATION_CANCELED"]


def test_nothing_is_started_to_end_tasks(tmp_path: Path) -> None:
    """Without a server there are none."""
    settings = Settings.from_env({"DELTAFORGE_HOME": str(tmp_path)})
    SparkSessions(settings, "lost", lambda _: None).interrupt(unless=lambda: False)
    assert list(tmp_path.iterdir()) == []


def test_dead_session_is_replaced(make: Make, remembered: list[str]) -> None:
    """If the stored session was stopped, a new one is created and its id stored."""
    make(None).session().stop()

    session = make(remembered[0]).session()

    assert session.range(2).count() == 2
    assert remembered[1:] == [session.session_id]


def test_session_that_dies_in_use(make: Make, remembered: list[str]) -> None:
    """A session closed by the server is reported as lost, and the next call creates another."""
    sessions = make(None)
    session = sessions.session()
    make(remembered[0]).stop()
    other = SparkSessions.session(make(remembered[0]))
    assert other is not session

    stranger = make(remembered[0])
    stranger.session()
    session.client.release_session()
    with pytest.raises(PySparkException) as caught:
        session.range(1).collect()

    assert sessions.lost(caught.value)
    assert sessions.session().range(1).count() == 1
    assert remembered[-1] == sessions.session().session_id


def test_workers_keep_memory(make: Make) -> None:
    """Tasks reuse the memory that earlier ones freed, without new page faults; Arrow has the same allocator as numpy."""
    session = make(None).session()

    def faults(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def so_far() -> int:
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        pool = pa.array([pa.default_memory_pool().backend_name])
        for _turn in range(10):
            before = so_far()
            arrays = [np.ones(24 << 20, np.uint8) for _ in range(6)]
            between = so_far()
            pools = [pa.nulls(4 << 20, pa.uint8()) for _ in arrays]
            del arrays, pools
            counts = [pa.array([between - before]), pa.array([so_far() - between])]
            yield pa.record_batch([*counts, pool], ["numpy", "arrow", "pool"])

    columns = "numpy bigint, arrow bigint, pool string"
    first, *later = session.range(0, 1, 1, 1).mapInArrow(faults, columns).collect()

    assert later[0]["numpy"] < 40, "144 MB in pages of at most 2 MB are 72"
    assert (
        sum(one["arrow"] for one in later) < first["arrow"] * len(later) / 2
    )  # malloc wastes some
    assert {one["pool"] for one in later} == {"system"}


def test_workers_have_no_archives_on_their_path(make: Make) -> None:
    """A worker reads no directory of an archive before a task; for Spark's jar that takes 70 ms."""
    session = make(None).session()

    def archives(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        places = {*sys.path, *sys.path_importer_cache}
        yield pa.record_batch(
            [pa.array(sorted(filter(zipfile.is_zipfile, places)), pa.string())], ["path"]
        )

    rows = session.range(0, 1, 1, 1).mapInArrow(archives, "path string").collect()

    assert [row["path"] for row in rows] == []


def test_workers_get_tasks_over_unix_sockets(make: Make) -> None:
    """Over TCP each task would wait 40 ms for a delayed acknowledgement."""
    assert unix_sockets(make(None).session())


def workers_parent(sessions: SparkSessions) -> int:
    """Return the process that a session's Python workers are forked from."""

    def parent(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([os.getppid()])], ["parent"])

    (row,) = sessions.session().range(0, 1, 1, 1).mapInArrow(parent, "parent bigint").collect()
    return int(row["parent"])


def test_sessions_share_workers(
    make: Make, spark_server: SparkAddress, remembered: list[str]
) -> None:
    """Pipelines have the same Python workers, except those with processors, even if they had none before."""
    parents = {workers_parent(make(None)) for _ in range(2)}
    settings = Settings.from_env({"DELTAFORGE_SPARK_REMOTE": spark_server.remote})
    shared = remembered[-1]
    own = SparkSessions(settings, shared, remembered.append, own_workers=True)
    try:
        with_processors = workers_parent(own)
        continued = SparkSessions(settings, remembered[-1], remembered.append, own_workers=True)
        assert workers_parent(continued) == with_processors
        continued.close()
    finally:
        own.stop()

    assert len(parents) == 1
    assert with_processors not in parents
    assert len(remembered) == 3
    assert remembered[-1] != shared


def test_other_errors_lose_nothing(make: Make) -> None:
    """A failing query does not drop its session."""
    sessions = make(None)
    session = sessions.session()
    with pytest.raises(PySparkException) as caught:
        session.read.parquet("/no/such/file").collect()

    assert not sessions.lost(caught.value)
    assert not sessions.lost(ValueError("SESSION is a word"))
    assert sessions.session() is session


_LEAVES_A_CALL_OPEN = """
import sys, time
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.resources.spark import SparkSessions

def first_then_hang(batches, released=sys.argv[1]):
    import pathlib, time
    for batch in batches:
        while batch.column(0)[0].as_py() and not pathlib.Path(released).exists():
            time.sleep(0.05)
        yield batch

sessions = SparkSessions(Settings.from_env(), None, lambda _session_id: None)
session = sessions.session()
frame = session.range(0, 2, 1, 2).mapInArrow(first_then_hang, "id long")
rows = session.client.to_table_as_iterator(frame._plan.to_proto(session.client), {})
next(rows), next(rows)  # the schema and the first task's row
sessions.close()
"""


def test_a_process_ends_although_a_call_is_open(spark_server: SparkAddress, tmp_path: Path) -> None:
    """A closed provider has cancelled its calls; otherwise the interpreter waits for gRPC's thread, which has ended."""
    released = tmp_path / "released"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _LEAVES_A_CALL_OPEN, str(released)],
            env={**os.environ, "DELTAFORGE_SPARK_REMOTE": spark_server.remote},
            timeout=120,
            check=False,
        )
    finally:
        released.touch()
    assert ended.returncode == 0


def test_a_closed_provider_cancels_what_others_wait_for(make: Make, tmp_path: Path) -> None:
    """The calls of other threads end at once, and nobody gets a session any more."""
    sessions = make(None)
    sessions.session()
    with hanging(lambda _: sessions, tmp_path / "begun") as ended:
        sessions.close()
        eventually(lambda: bool(ended))
        (tmp_path / "released").touch()

    assert [spark_condition(error) for error in ended] == ["CANCELLED"]
    with pytest.raises(SparkUnavailable, match="the run is ending"):
        sessions.session()


def test_no_server() -> None:
    """An unreachable server is one short, retryable error."""
    settings = Settings.from_env({"DELTAFORGE_SPARK_REMOTE": "sc://localhost:1"})

    with pytest.raises(SparkUnavailable, match="does not respond"):
        SparkSessions(settings, None, lambda _: None).session()


@pytest.mark.soak("faults")
def test_server_that_dies_in_use(tmp_path: Path) -> None:
    """Without a configured server the installation's own is used; when it is gone, the next call starts another."""
    settings = Settings.from_env({"DELTAFORGE_HOME": str(tmp_path)})
    remembered: list[str] = []
    sessions = SparkSessions(settings, None, remembered.append)
    session = sessions.session()
    try:
        SparkServer.ensure(tmp_path).stop()
        with pytest.raises(PySparkException) as caught:
            session.range(1).collect()

        assert sessions.lost(caught.value)
        assert sessions.session().range(3).count() == 3
    finally:
        sessions.stop()
        SparkServer.ensure(tmp_path).stop()


@pytest.mark.soak("faults")
def test_a_killed_parent_of_workers_leaves_no_socket() -> None:
    """The next parent removes the file of the one that was killed, once it is a minute old."""
    home = Path(tempfile.mkdtemp(dir="/tmp"))  # where paths of sockets are short enough
    settings = Settings.from_env({"DELTAFORGE_HOME": str(home)})
    sessions = SparkSessions(settings, None, lambda _: None)

    def parent(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        folder = os.environ["PYTHON_WORKER_FACTORY_SOCK_DIR"]
        columns = [pa.array([os.getppid()]), pa.array([folder])]
        yield pa.record_batch(columns, ["parent", "folder"])

    schema = "parent long, folder string"
    try:
        frame = sessions.session().range(0, 1, 1, 1).mapInArrow(parent, schema)
        (first,) = frame.collect()
        sockets = Path(first["folder"])
        (left,) = sockets.glob(".*.sock")
        os.kill(first["parent"], signal.SIGKILL)
        os.utime(left, (0, 0))

        (second,) = frame.collect()

        assert second["parent"] != first["parent"]
        (used,) = sockets.glob(".*.sock")
        assert used != left
    finally:
        sessions.stop()
        SparkServer.ensure(home).stop()
        shutil.rmtree(home)
