"""Tests of what is noted of runs that Dagster could not start, and of a retention that does not run."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.events import EngineEventData
from dagster_shared.error import SerializableErrorInfo

from deltaforge_dagster.assets.names import PIPELINE_TAG, RETENTION_JOB, asset_key, job_name
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.health.health import HealthProblem, health
from deltaforge_dagster.sensors.launches import LaunchWatch
from deltaforge_dagster.state.database.tables import kv
from deltaforge_dagster.state.since import RETENTION
from deltaforge_dagster.state.store import StateStore
from tests.fix_dagster import instance
from tests.pipeline.control.test_catalog import FILE

__all__ = ["instance"]

NAME = "filed"
REFUSED = "dagster._core.errors.DagsterLaunchFailedError: Subprocess ended with exit code 1"


@dg.op
def nothing() -> None:
    """Do nothing."""


class Dagster:
    """An installation with one pipeline, whose runs are created here."""

    def __init__(
        self, instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline
    ) -> None:
        self.instance, self.store, self.loaded = instance, store, loaded

    def run(
        self, job: str = job_name(NAME), *, refused: str | None = REFUSED, begun: bool = False
    ) -> None:
        """Create a run that fails, before or after it has begun."""
        graph = dg.GraphDefinition(name=job, node_defs=[nothing])
        of_assets = job == "__ASSET_JOB"
        run = self.instance.create_run_for_job(
            graph.to_job(name=job), tags={} if of_assets else {PIPELINE_TAG: NAME}
        )
        if of_assets:
            run = run._replace(asset_selection=frozenset({asset_key(NAME, "redis")}))
            self.instance.delete_run(run.run_id)
            self.instance.add_run(run)
        if begun:
            self.instance.report_dagster_event(
                dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, job), run.run_id
            )
        elif refused is not None:
            error = SerializableErrorInfo(f"{refused}\n", [], "DagsterLaunchFailedError")
            self.instance.report_engine_event("dequeuing", run, EngineEventData(error=error))
        self.instance.report_run_failed(run, "the process is gone")

    def problems(self) -> list[HealthProblem]:
        """Return what `health` says once a tick has looked."""
        LaunchWatch().look(self.instance, self.store, [NAME, "unknown"])
        return list(health(self.store, self.loaded).problems)


@pytest.fixture
def dagster(instance: dg.DagsterInstance, sqlite_store: StateStore, tmp_path: Path) -> Dagster:
    """One that is at work."""
    (tmp_path / "filed.yaml").write_text(FILE)
    sqlite_store.pipelines.register(NAME, "hash", ["redis"])
    made = Dagster(instance, sqlite_store, load_pipeline(tmp_path / "filed.yaml"))
    assert made.problems() == []
    return made


def test_runs_that_could_not_be_started_are_a_problem_until_one_begins(dagster: Dagster) -> None:
    """It is a warning once and then an error, with the newest cause, since the first of them."""
    dagster.run()
    (once,) = dagster.problems()
    dagster.run(refused=None)
    (twice,) = dagster.problems()
    assert (once.subject, once.severity) == ("runs", "warning")
    assert once.text == (
        "Dagster could not start the last run of filed_run: Subprocess ended with exit code 1"
    )
    assert (twice.severity, twice.since) == ("error", once.since)
    assert twice.text == (
        "Dagster could not start the last 2 runs of filed_run: the process is gone"
    )
    assert health(dagster.store, dagster.loaded).status == "failed"

    dagster.run(begun=True)

    assert dagster.problems() == []


def test_what_is_clicked_and_retention_are_warnings_of_their_own(dagster: Dagster) -> None:
    """A run that begins of one job says nothing of another job."""
    for _ in range(2):
        dagster.run("__ASSET_JOB")
        dagster.run(RETENTION_JOB)
    dagster.run(begun=True)

    texts = [(problem.severity, problem.text.partition(":")[0]) for problem in dagster.problems()]
    assert texts == [
        ("warning", "Dagster could not start the last 2 runs of __ASSET_JOB"),
        ("warning", "Dagster could not start the last 2 runs of deltaforge_retention"),
    ]


def test_a_stopped_pipeline_misses_no_runs(dagster: Dagster) -> None:
    """Nobody starts any."""
    for _ in range(2):
        dagster.run()
    dagster.problems()
    dagster.store.pipelines.set_desired_state(NAME, "stopped")
    assert health(dagster.store, dagster.loaded).problems == ()


def test_a_retention_that_does_not_run_is_missed(dagster: Dagster) -> None:
    """After three hours in which Dagster was at work, until it has run."""

    def seen_before(seconds: float, *keys: str) -> None:
        """Move the time at which these conditions were noted into the past."""
        with dagster.store.database.write() as connection:
            connection.execute(
                kv.update()
                .where(kv.c.ns == f"since/{NAME}", kv.c.key.in_(keys))
                .values(updated_at=time.time() - seconds)
            )

    seen_before(10_700, RETENTION)
    assert dagster.problems() == []
    seen_before(10_900, RETENTION)
    (missed,) = dagster.problems()
    assert (missed.subject, missed.severity) == ("retention", "warning")
    assert "has not run for three hours" in missed.text

    dagster.store.pipelines.note_since(NAME, RETENTION)
    assert dagster.problems() == []

    seen_before(10_900, RETENTION, "watched")
    assert dagster.problems() == []  # Dagster has just come back
