"""A real deployment for tests: Dagster's daemon and code server, on real servers, in own folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG, asset_key, partition_key
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.sensors.report import newest_evaluation
from deltaforge_dagster.state.store import StateStore
from tests.e2e.command import Command
from tests.fix_spark import SparkAddress

DAGSTER_YAML = Path(__file__).parents[2] / "dagster.yaml"
"""The settings that the product recommends for one machine."""


def eventually(
    happened: Callable[[], Any], *, seconds: float = 300.0, what: str = "it", every: float = 0.1
) -> Any:
    """Return the first true value of `happened`, or fail after `seconds`: a busy machine's, not ours.

    Looking takes a tenth of a processor at most: what is waited for needs the rest.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := happened():
            return value
        now = time.monotonic()
        assert now < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(max(every, 9 * (now - began)))


@dataclass
class Deployment:
    """Dagster on a folder: pipelines, state, journal, and its own `DAGSTER_HOME`.

    Attributes:
        folder: Holds everything.
        spark: The Spark server of the runs.
        environment: Variables of every process started, beside the inherited ones.
        dagster_yaml: Dagster's instance settings.
    """

    folder: Path
    spark: SparkAddress
    environment: dict[str, str] = field(default_factory=dict)
    dagster_yaml: str = field(default_factory=DAGSTER_YAML.read_text)
    state_url: str | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pipelines = self.folder / "pipelines"
        self.dagster_home = self.folder / "dagster"
        self.pipelines.mkdir(parents=True)
        self.dagster_home.mkdir()
        (self.dagster_home / "dagster.yaml").write_text(self.dagster_yaml)

    @property
    def variables(self) -> dict[str, str]:
        """Environment of the deployment's processes."""
        own = {
            "DAGSTER_HOME": str(self.dagster_home),
            # A run whose process takes longer to start counts as failed: a busy machine's fault.
            "DAGSTER_GRPC_TIMEOUT_SECONDS": "600",
            "DELTAFORGE_HOME": str(self.folder / "home"),
            "DELTAFORGE_PIPELINES": str(self.pipelines),
            **self.spark.settings(self.folder / "home"),
            "PYTHONWARNINGS": "ignore",
        }
        if self.state_url is not None:
            own["DELTAFORGE_STATE_URL"] = self.state_url
        return {**os.environ, **own, **self.environment}

    @property
    def settings(self) -> Settings:
        """The installation's settings."""
        return Settings.from_env(self.variables)

    def store(self) -> StateStore:
        """Open the state store."""
        return StateStore.open(self.settings.state_url)

    @cached_property
    def instance(self) -> dg.DagsterInstance:
        """The Dagster instance, opened once: that takes longer than most of what it is asked.

        Its settings name variables of the deployment.
        """
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                if name.startswith("DAGSTER_"):
                    patch.setenv(name, value)
            return dg.DagsterInstance.from_config(str(self.dagster_home))

    def add(self, name: str, text: str) -> Path:
        """Write a pipeline file."""
        path = self.pipelines / f"{name}.yaml"
        path.write_text(text)
        return path

    def start(self) -> None:
        """Start the daemon, which starts the code server and the runs."""
        self.spawn("-m", "dagster._daemon", "run", "-m", "deltaforge_dagster.definitions")

    def spawn(
        self,
        *arguments: str,
        more: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> subprocess.Popen[bytes]:
        """Start a Python process of the deployment in a process group of its own."""
        log = (self.folder / f"process-{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [python, *arguments],
            cwd=self.folder,
            env={**self.variables, **(more or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def command(self, *arguments: str) -> Command:
        """Start a `deltaforge` command of the deployment."""
        log = self.folder / f"command-{len(self.commands)}.log"
        self.commands.append(Command.start(arguments, self.variables, self.folder, log))
        return self.commands[-1]

    def output(self, process: subprocess.Popen[bytes]) -> str:
        """Return what a process printed."""
        number = self.processes.index(process)
        return (self.folder / f"process-{number}.log").read_text()

    def members(self) -> list[int]:
        """Return the living processes that work for this deployment."""
        marker = f"DELTAFORGE_HOME={self.folder / 'home'}\0".encode()
        return [pid for pid in _process_ids() if marker in _environment(pid)]

    def told(self, name: str, value: str) -> int:
        """Return how many living processes have an environment variable with that value."""
        wanted = f"{name}={value}\0".encode()
        return sum(wanted in _environment(pid) for pid in self.members())

    def close(self) -> None:
        """End everything at once, and forget what was opened; a test about the ending calls `stop`."""
        if os.environ.get("COVERAGE_PROCESS_CONFIG"):
            self.stop()  # a process that is killed does not say what it has executed
        self.kill()
        if "instance" in vars(self):
            self.instance.dispose()

    def kill(self) -> None:
        """Kill everything at once, as a crash of the host does."""
        while members := self.members():  # one may have started another meanwhile
            for pid in members:
                _send(pid, signal.SIGKILL)
            time.sleep(0.01)
        for command in self.commands:
            command.kill()
        for process in self.processes:
            process.wait()

    def stop(self) -> None:
        """End everything in order and wait for it; runs close their ranges, however long they may idle."""
        for pid in self.members():
            _send(pid, signal.SIGTERM)
        deadline = time.monotonic() + 120
        while self.members() and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.1)
        self.kill()

    def _reap(self) -> None:
        for process in self.processes:
            try:
                process.wait(timeout=0.01)
            except subprocess.TimeoutExpired:
                continue

    def live_runs(self, pipeline: str) -> list[dg.RunRecord]:
        """Return the live runs of a pipeline, oldest first."""
        return list(
            self.instance.get_run_records(
                dg.RunsFilter(tags={PIPELINE_TAG: pipeline, RUN_TAG: "live"}), ascending=True
            )
        )

    def run_pid(self, pipeline: str) -> int | None:
        """Return the process that holds the pipeline's lease, None when nobody does."""
        store = self.store()
        try:
            lease = store.leases.get(pipeline)
            now = store.now()
        finally:
            store.close()
        if lease is None or lease.run_id is None or lease.expires_at < now:
            return None
        for entry in self.instance.all_logs(lease.run_id):
            event = entry.dagster_event
            if event is not None and event.is_engine_event:
                pid = event.engine_event_data.metadata.get("pid")
                if pid is not None:
                    return int(str(pid.value))
        return None

    def materializations(self, pipeline: str, asset: str, number: int) -> list[dict[str, Any]]:
        """Return the metadata of every materialization of a range, newest first."""
        found = self.instance.fetch_materializations(
            dg.AssetRecordsFilter(
                asset_key=asset_key(pipeline, asset), asset_partitions=[partition_key(number)]
            ),
            limit=100,
        )
        return [
            {name: one.value for name, one in record.asset_materialization.metadata.items()}
            for record in found.records
            if record.asset_materialization is not None
        ]

    def check(self, pipeline: str, asset: str, name: str) -> dg.AssetCheckEvaluation | None:
        """Return the newest evaluation of a check."""
        return newest_evaluation(self.instance, dg.AssetCheckKey(asset_key(pipeline, asset), name))

    def logs(self) -> str:
        """Return what the processes printed."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("process-*.log"))
        )


def _process_ids() -> Iterable[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
