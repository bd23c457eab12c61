"""A project whose environment lacks the engine's packages."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.project.conftest import QUIET
from tests.project.test_definitions import SPEC

pytestmark = QUIET

ROOT = Path(__file__).parents[2]
LACKING = ("numba", "pyarrow", "pyspark")
PROGRAM = """
import sys

sys.path[:0] = {paths}
import dagster as dg

from deltaforge_dagster import pipeline_definitions

definitions = pipeline_definitions({spec})
print(*sorted(key.to_user_string() for key in definitions.resolve_all_asset_keys()))
with dg.DagsterInstance.ephemeral() as instance:
    job = definitions.resolve_job_def("orders_run")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    print(failure.step_failure_data.user_failure_data.description)
    try:
        definitions.resolve_sensor_def("orders_work").evaluate_tick(dg.build_sensor_context(instance))
    except dg.Failure as error:
        print(error.description)
"""


def test_definitions_load_and_runs_say_what_to_install(tmp_path: Path) -> None:
    """The work fails with one error that names the packages, and a command that installs them."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(LACKING):
            packages.joinpath(path.name).symlink_to(path)
    program = PROGRAM.format(paths=[str(ROOT), str(packages)], spec=SPEC)

    # Without `site`, the environment's own packages are not on the path.
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SHOP_DSN": "postgres://u:p@localhost:1/shop"},
    )

    assert done.returncode == 0, done.stderr[-5000:]
    loaded, failed, ticked = done.stdout.splitlines()
    assert "orders/changes" in loaded.split()
    assert "lacks numba, pyarrow, pyspark; to install what is missing: pip install 'numba" in failed
    assert "'pyspark[connect]==4.1.1'" in failed
    assert ticked == f"NOT WELL: {failed}"
