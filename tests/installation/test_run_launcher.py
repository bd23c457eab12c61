"""Runs whose processes are forked: they end as Dagster says, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.launcher import LaunchRunContext
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin

from deltaforge_dagster.assets.names import PIPELINE_TAG
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.installation.run_launcher import (
    DEFINITIONS,
    PROCESS_TAG,
    ForkedRunLauncher,
    _is_ours,
)
from deltaforge_dagster.resources.instance import dagster_home
from tests.e2e.deployment import eventually
from tests.installation.jobs import FOLDER_TAG, waiting


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """An instance with the settings of `deltaforge dev`."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    home = dagster_home(Settings.from_env({"DELTAFORGE_HOME": str(tmp_path / "home")}))
    with dg.DagsterInstance.from_config(str(home)) as made:
        yield made
        for thread in threading.enumerate():
            if thread.name == "run's end":  # asks the instance once the run's process has ended
                thread.join(60)


class Launched:
    """A run that has begun, in a process of its own."""

    def __init__(self, instance: dg.DagsterInstance, folder: Path) -> None:
        self._instance = instance
        self._folder = folder
        recon = dg.reconstructable(waiting)
        run = instance.create_run_for_job(
            recon.get_definition(),
            tags={PIPELINE_TAG: "shop", FOLDER_TAG: str(folder)},
            job_code_origin=recon.get_python_origin(),
        )
        self.run_id = run.run_id
        instance.run_launcher.launch_run(LaunchRunContext(run, workspace=None))
        told = eventually(lambda: (folder / "began").exists() and (folder / "began").read_text())
        pid, self.has_spark = told.split()
        self.pid = int(pid)

    @property
    def run(self) -> dg.DagsterRun:
        """The run as it is now."""
        found = self._instance.get_run_by_id(self.run_id)
        assert found is not None
        return found

    def go_on(self) -> None:
        """Let the job end."""
        (self._folder / "go").touch()

    def ends_as(self, status: dg.DagsterRunStatus) -> bool:
        """Wait for the end of the run."""
        eventually(lambda: self.run.is_finished, what="the end")
        assert self.run.status == status
        return True


@pytest.fixture
def launched(instance: dg.DagsterInstance, tmp_path: Path) -> Launched:
    """A run that waits."""
    return Launched(instance, tmp_path)


def test_a_run_is_forked_from_a_process_with_everything(launched: Launched) -> None:
    """It is executed in another process, which had Spark's client at once, and succeeds."""
    assert (launched.pid != os.getpid(), launched.has_spark) == (True, "True")
    launched.go_on()
    assert launched.ends_as(dg.DagsterRunStatus.SUCCESS)


LAUNCHES = """
import sys
from pathlib import Path
import dagster as dg
from tests.installation.test_run_launcher import Launched

with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
    launched = Launched(instance, Path(sys.argv[2]))
    launched.go_on()
    assert launched.ends_as(dg.DagsterRunStatus.SUCCESS)
"""


def test_the_folder_of_temporary_files_may_have_a_long_path(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """A socket's address cannot be as long; runs are forked all the same."""
    folder = tmp_path / ("long " * 20)
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", LAUNCHES, instance.root_directory, tmp_path],
        env={**os.environ, "TMPDIR": str(folder)},
        check=True,
    )


@pytest.mark.parametrize(
    ("module", "tags", "ours"),
    [
        (DEFINITIONS, {}, True),
        ("somebodys.definitions", {PIPELINE_TAG: "shop"}, True),
        ("somebodys.definitions", {}, False),
    ],
)
def test_our_runs_are_forked_and_no_others(module: str, tags: dict[str, str], ours: bool) -> None:
    """All of our definitions, such as a *Materialize*, and a pipeline's wherever it is defined."""
    pointer = ModuleCodePointer(module, "defs", None)
    origin = JobPythonOrigin("job", RepositoryPythonOrigin(sys.executable, pointer))
    assert _is_ours(dg.DagsterRun(job_name="job", tags=tags), origin) == ours


def test_a_killed_process_is_a_failed_run(instance: dg.DagsterInstance, launched: Launched) -> None:
    """Dagster is told how the process ended."""
    os.kill(launched.pid, signal.SIGKILL)
    assert launched.ends_as(dg.DagsterRunStatus.FAILURE)
    assert any("SIGKILL" in str(entry.message) for entry in instance.all_logs(launched.run_id))


def test_a_run_outlives_what_it_was_forked_from(
    instance: dg.DagsterInstance, launched: Launched, tmp_path: Path
) -> None:
    """Its end is that of its own process, also if nobody tells how it ended; later runs are forked from a new one."""
    stat = Path(f"/proc/{launched.pid}/stat").read_text()
    fork_server = int(stat.rpartition(")")[2].split()[1])
    os.kill(fork_server, signal.SIGKILL)
    folder = tmp_path / "second"
    folder.mkdir()
    second = Launched(instance, folder)
    os.kill(second.pid, signal.SIGKILL)
    assert second.ends_as(dg.DagsterRunStatus.FAILURE)

    assert not launched.run.is_finished
    launched.go_on()
    assert launched.ends_as(dg.DagsterRunStatus.SUCCESS)


def test_a_run_is_terminated_by_any_process(
    instance: dg.DagsterInstance, launched: Launched
) -> None:
    """A launcher that did not start it interrupts it, once; it is canceled. A finished run is left alone."""
    other = ForkedRunLauncher()
    other.register_instance(instance)
    assert other.terminate(launched.run_id)
    assert launched.ends_as(dg.DagsterRunStatus.CANCELED)
    assert not other.terminate(launched.run_id)


def test_a_number_that_another_process_has_now(
    instance: dg.DagsterInstance, launched: Launched
) -> None:
    """The process of a run is only known by its number and its start: nobody else is interrupted."""
    tag = f"{os.getpid()} 1"
    instance.add_run_tags(launched.run_id, {PROCESS_TAG: tag})
    assert not instance.run_launcher.terminate(launched.run_id)
    launched.go_on()
    eventually(lambda: launched.run.is_finished)


def test_a_process_that_ended_before_its_start_was_noted(
    instance: dg.DagsterInstance, launched: Launched
) -> None:
    """It has a number alone, and is not taken for alive: nobody is interrupted, and the run is reported as failed."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    instance.add_run_tags(launched.run_id, {PROCESS_TAG: str(ended.pid)})
    assert not instance.run_launcher.terminate(launched.run_id)
    os.kill(launched.pid, signal.SIGKILL)
    assert launched.ends_as(dg.DagsterRunStatus.FAILURE)
