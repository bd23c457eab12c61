"""A pipeline of a component is run, in the test's process."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from tests.e2e.test_project import CHANGES, COMPONENT, LINES, delivered, dsn, insert
from tests.fix_spark import SparkAddress
from tests.project.conftest import QUIET, Project

__all__ = ["dsn"]

pytestmark = [pytest.mark.postgres, pytest.mark.spark, *QUIET]


def test_a_component_is_loaded_and_run(
    project: Project,
    dsn: str,
    tmp_path: Path,
    spark_server: SparkAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sensor asks for a run, which delivers the row, at the keys of the translation.

    The instance has no setting of ours, and the home is the component's.
    """
    home = tmp_path / "theirs"
    monkeypatch.delenv("DELTAFORGE_HOME")
    monkeypatch.setenv("THEIR_HOME", str(home))
    monkeypatch.setenv("SHOP_DSN", dsn)
    spark_server.use(home, monkeypatch)
    lines = tmp_path / "lines.jsonl"
    component = COMPONENT.format(unique=dsn.rpartition("/")[2].lower()[-20:], lines=lines)
    project.write(
        "orders/defs.yaml", component + '  installation: {home: "{{ env.THEIR_HOME }}"}\n'
    )
    definitions = project.load()
    sensor = definitions.resolve_sensor_def("orders_work")
    tmp_path.joinpath("dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        with dg.build_sensor_context(instance) as context:
            sensor.evaluate_tick(context)  # fixes where to start
            insert(dsn, 1)
            (request,) = sensor.evaluate_tick(context).run_requests or ()

        job = definitions.resolve_job_def("orders_run")
        result = job.execute_in_process(
            instance=instance, tags={**request.tags, "deltaforge/until": "caught up"}
        )

        assert result.success
        assert delivered(lines) == [1]
        assert (home / "state.db").exists()
        for key in (CHANGES, LINES):
            assert instance.get_latest_materialization_event(key) is not None
