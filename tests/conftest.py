"""What every test gets: servers as fixtures (one plugin per service) and strict endings.

Nothing is skipped silently: a test that needs a server and cannot have one fails, with one line
that says how to get it.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

pytest_plugins = [
    "tests.chance",  # first: it has Hypothesis's profiles
    "tests.fix_clickhouse",
    "tests.fix_dagster",
    "tests.fix_http",
    "tests.fix_kafka",
    "tests.fix_mysql",
    "tests.fix_nats",
    "tests.fix_objects",
    "tests.fix_postgres",
    "tests.fix_redis",
    "tests.fix_schema_registry",
    "tests.fix_spark",
    "tests.fix_store",
    "tests.times",
    "tests.soak",
]

PACKAGE = "deltaforge_dagster"
SERVICE_MARKS = {
    "postgres",
    "redis",
    "mysql",
    "kafka",
    "nats",
    "s3",
    "clickhouse",
    "spark",
    "e2e",
}


def pytest_configure() -> None:
    """Hear Ctrl-C also where a script's `&` has switched it off.

    Else Dagster would have this process ignore SIGTERM as well, and so all servers that it starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped service test into a failed one."""
    report = yield
    marks = {mark.name for mark in item.iter_markers()}
    if report.skipped and not hasattr(report, "wasxfail") and marks & SERVICE_MARKS:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a test of a real server must run: {reason}"
    return report


SOURCES = f"{PACKAGE}.sources"
LIMITS = {
    f"{SOURCES}.mysql.connection.server": ("_CONNECT_SECONDS",),
    f"{SOURCES}.mysql.stream.log_scan": ("_HEAD_SECONDS", "_PEEK_SECONDS"),
    f"{SOURCES}.mysql.source": ("_HEAD_SECONDS", "_START_SECONDS"),
    f"{SOURCES}.postgres.connection.server": ("_CONNECT_SECONDS",),
    f"{SOURCES}.postgres.source": ("_HEAD_SECONDS", "_START_SECONDS", "_PEEK_SECONDS"),
    f"{SOURCES}.postgres.stream.slot_reader": ("_HANDSHAKE_SECONDS",),
    f"{SOURCES}.postgres.snapshot.reader": ("_OPEN_SECONDS",),
    f"{SOURCES}.turso.source": ("_HEAD_SECONDS", "_START_SECONDS", "_OPEN_SECONDS"),
}  # fmt: skip
"""Limits of what a sensor waits for, by module: the shortest that there are."""

PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def patience() -> Iterator[pytest.MonkeyPatch]:
    """Let database servers answer late, as they do on a busy machine.

    A test about the limits themselves calls `undo()`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, limits in LIMITS.items():
            if name in sys.modules:  # else nobody here asks such a server
                for limit in limits:
                    patch.setattr(sys.modules[name], limit, PATIENCE_SECONDS)
        yield patch


@pytest.fixture(autouse=True, scope="module")
def own_garbage() -> Iterator[None]:
    """Have what a module left open fail that module, not whoever runs when Python finds it.

    What is still in use then, above all what was imported, is looked through once, not after each module again:
    that took a quarter of the tests' time.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Let what a test makes of logging end with it, as it would with its process."""
    before = {one: (one.level, [*one.handlers]) for one in _loggers()}
    yield
    for one in _loggers():
        one.level, one.handlers = before.get(one, (logging.NOTSET, []))
    logging.root.manager._clear_cache()  # type: ignore[attr-defined] # what levels decided is kept


def _loggers() -> list[logging.Logger]:
    names = [name for name in logging.root.manager.loggerDict if name.startswith("deltaforge_")]
    return [logging.getLogger(name) for name in names]


@pytest.fixture(autouse=True)
def own_path() -> Iterator[None]:
    """Take away what a test has put where Python looks; PySpark adds what it sends to its server."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test settings of its own: no state or journal outside its temporary directory."""
    for name in (
        "PIPELINES",
        "STATE_URL",
        "JOURNAL_URL",
        "SPARK_REMOTE",
        "LAKE_JARS",
        "SINK_FAULTS",
    ):
        monkeypatch.delenv(f"DELTAFORGE_{name}", raising=False)
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
