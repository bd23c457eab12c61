"""A run launcher for tests: what a launcher of containers does, with processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

from deltaforge_dagster.dagster_private import LaunchRunContext, run_arguments
from deltaforge_dagster.kernels.compiler import cache_folder

FOLDER = "DELTAFORGE_TEST_RUN_FOLDERS"
"""Names the folder in which each run gets a folder of its own."""

_SHARED = ("AWS_", "DAGSTER_POSTGRES_URL", "GRPC_", "JAVA_HOME", "LANG", "PATH", "PYTHON")
_SETTINGS = ("PIPELINES", "STATE_URL", "JOURNAL_URL", "SPARK_REMOTE")
"""Settings of the installation that a container would get; its home is its own."""


class LoneRunLauncher(dg.DefaultRunLauncher):
    """Starts each run as a process that has settings only: another home, working and temporary folder.

    It shares the files of pipelines and the compiled kernels, which containers have from a ConfigMap and the image.
    """

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start a run's process and note its number in `pid`."""
        origin = context.job_code_origin
        assert origin is not None
        run_id = context.dagster_run.run_id
        folder = Path(os.environ[FOLDER]) / run_id
        for name in ("home", "tmp", "dagster", "user"):
            (folder / name).mkdir(parents=True)
        instance = Path(os.environ["DAGSTER_HOME"]) / "dagster.yaml"
        (folder / "dagster" / "dagster.yaml").write_text(instance.read_text())
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(_SHARED)
        }
        environment |= {
            variable: os.environ[variable]
            for variable in (f"DELTAFORGE_{name}" for name in _SETTINGS)
        }
        environment |= {
            "DAGSTER_HOME": str(folder / "dagster"),
            "DELTAFORGE_HOME": str(folder / "home"),
            "HOME": str(folder / "user"),
            "TMPDIR": str(folder / "tmp"),
            "NUMBA_CACHE_DIR": str(cache_folder().parent),
        }
        arguments = run_arguments(origin, run_id, self._instance.get_ref())
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "dagster", "api", "execute_run", arguments],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        (folder / "pid").write_text(str(process.pid))
