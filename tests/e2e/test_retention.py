"""The retention job: what is old and delivered goes, in the journal, the store and Dagster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    RUN_TAG,
    UNTIL_TAG,
    job_name,
    partition_key,
    partitions_name,
)
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.sensors.report import newest_evaluation
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress

__all__ = ["shop"]

pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.spark]


class Installation:
    """Pipelines that keep nothing for longer than they must; their jobs run in this process."""

    def __init__(self, folder: Path, text: str, spark: SparkAddress) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir()
        environment = {
            "DELTAFORGE_PIPELINES": str(folder / "pipelines"),
            "DELTAFORGE_HOME": str(folder / "home"),
            **spark.settings(folder / "home"),
        }
        self.settings = Settings.from_env(environment)
        self.settings.pipelines.mkdir()
        self.add("tidy", text)
        self.journal = folder / "home" / "journal"
        self.store = StateStore.open(self.settings.state_url)
        self.instance = dg.DagsterInstance.local_temp(str(folder))

    def add(self, name: str, text: str) -> None:
        """Write a pipeline file."""
        file = self.settings.pipelines / f"{name}.yaml"
        file.write_text(text + "    journal: {retention_hours: 0}\n")

    def execute(self, job: str, tags: dict[str, str] | None = None) -> dg.ExecuteInProcessResult:
        """Execute a job."""
        definition = build_definitions(self.settings).resolve_job_def(job)
        return definition.execute_in_process(
            instance=self.instance, tags=tags, raise_on_error=False
        )

    def catch_up(self, name: str = "tidy") -> str:
        """Execute a live run until everything is captured and delivered; return its id."""
        result = self.execute(job_name(name), {RUN_TAG: "live", UNTIL_TAG: "caught up"})
        assert result.success
        return result.run_id

    def forget(self) -> None:
        """Execute the retention job."""
        assert self.execute("deltaforge_retention").success

    def kept(self, name: str = "tidy") -> tuple[list[int], set[str], set[str]]:
        """Return what there is: ranges, partitions and live runs."""
        runs = self.instance.get_runs(dg.RunsFilter(tags={PIPELINE_TAG: name, RUN_TAG: "live"}))
        return (
            [row.range for row in self.store.ranges.read(name)],
            set(self.instance.get_dynamic_partitions(partitions_name(name))),
            {run.run_id for run in runs},
        )

    def files(self) -> set[str]:
        """Return the journal's files, as segments name them."""
        found = self.journal.rglob("*.parquet")
        return {str(path.relative_to(self.journal)) for path in found}


@pytest.fixture
def tidy(
    shop: Shop, tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    """An installation with a sink that can be told to fail."""
    more = f"    - {{type: file, config: {{id: lines, path: {tmp_path}/lines.jsonl}}}}\n"
    made = Installation(tmp_path, shop.pipeline("tidy", more_sinks=more), spark_server)
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(made.faults))
    yield made
    made.store.close()
    made.instance.dispose()


def test_what_is_delivered_goes_and_nothing_else(
    shop: Shop, tidy: Installation, tmp_path: Path
) -> None:
    """Segments that a sink lacks stay, with their range, its partition, and the runs since then.

    Once that sink has them they go, too; numbers go on, and the checks pass.
    """
    tidy.catch_up()
    tidy.instance.add_dynamic_partitions(partitions_name("tidy"), ["a crash left it"])
    for number in (1, 2):
        shop.execute(f"INSERT INTO customers VALUES ({number}, 'x')")
        tidy.catch_up()
    (tidy.faults / "lines").write_text("fail_before")
    shop.execute("INSERT INTO customers VALUES (3, 'x')")
    third = tidy.catch_up()
    assert [row.range for row in tidy.store.ranges.read("tidy")] == [1, 2, 3]

    tidy.forget()

    assert tidy.kept() == ([3], {partition_key(3)}, {third})
    (segment,) = tidy.store.segments.read("tidy")
    assert segment.range == 3
    assert tidy.files() == {segment.path}

    (tidy.faults / "lines").unlink()
    tidy.catch_up()
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 3
    tidy.forget()

    assert tidy.kept() == ([], set(), set())
    assert tidy.store.segments.read("tidy") == []
    assert tidy.files() == set()

    shop.execute("INSERT INTO customers VALUES (4, 'x')")
    last = tidy.catch_up()
    assert tidy.kept() == ([4], {partition_key(4)}, {last})
    specs = check_specs(load_pipeline(tidy.settings.pipelines / "tidy.yaml"))
    assert len(specs) == 10
    for spec in specs:
        evaluation = newest_evaluation(tidy.instance, spec.key)
        assert evaluation is not None
        assert evaluation.passed


def test_one_pipelines_problem_is_not_the_others(shop: Shop, tidy: Installation) -> None:
    """A file that cannot be removed fails the job in one sentence, after everybody's turn."""
    tidy.add("zebra", shop.pipeline("zebra"))
    for name in ("tidy", "zebra"):
        tidy.catch_up(name)
    shop.execute("INSERT INTO customers VALUES (1, 'x')")
    for name in ("tidy", "zebra"):
        tidy.catch_up(name)
    (segment,) = tidy.store.segments.read("tidy")
    file = tidy.journal / segment.path
    file.unlink()
    file.mkdir()

    result = tidy.execute("deltaforge_retention")

    (failed,) = [event for event in result.all_events if event.is_step_failure]
    described = failed.step_failure_data.user_failure_data
    assert described is not None
    assert str(described.description).startswith("tidy: ")
    assert segment.path in str(described.description)
    assert "\n" not in str(described.description)
    assert tidy.kept("zebra") == ([], set(), set())
