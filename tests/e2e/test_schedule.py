"""A schedule in the sensor's place: when it is due, it looks for work as the sensor would."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.assets.names import job_name
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress

__all__ = ["shop"]

pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.spark]

TABLES = "[public.customers]"


@pytest.fixture
def definitions(shop: Shop, tmp_path: Path, spark_server: SparkAddress) -> dg.Definitions:
    """Return the definitions of one pipeline with a schedule."""
    file = tmp_path / "nightly.yaml"
    file.write_text(shop.pipeline("nightly", tables=TABLES, dagster='{schedule: "30 2 * * *"}'))
    environment = {
        "DELTAFORGE_PIPELINES": str(file),
        "DELTAFORGE_HOME": str(tmp_path / "home"),
        **spark_server.settings(tmp_path / "home"),
    }
    return build_definitions(Settings.from_env(environment))


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Lend an instance of the test's own."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as made:
        yield made


def evaluate(definitions: dg.Definitions, instance: dg.DagsterInstance) -> dict[str, str] | str:
    """Evaluate the schedule: the tags of the run it asks for, or why it asks for none."""
    repository = definitions.get_repository_def()
    with dg.build_schedule_context(
        instance=instance,
        scheduled_execution_time=datetime(2026, 1, 1, 2, 30, tzinfo=UTC),
        repository_def=repository,
    ) as context:
        result = repository.get_schedule_def("nightly_schedule").evaluate_tick(context)
    if result.run_requests:
        (request,) = result.run_requests
        return dict(request.tags)
    return str(result.skip_message)


def test_a_schedule_starts_a_run_only_when_there_is_work(
    shop: Shop, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    """The first evaluation fixes where to start; later ones ask for a run when there are changes.

    After that run there is no work again.
    """
    assert evaluate(definitions, instance) == "start position fixed"
    assert "no changes in the source" in str(evaluate(definitions, instance))
    shop.execute("INSERT INTO visits (page) VALUES ('not captured')")
    assert "no changes in the source" in str(evaluate(definitions, instance))

    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    tags = evaluate(definitions, instance)

    assert isinstance(tags, dict)
    assert tags["deltaforge/run"] == "live"
    assert tags["deltaforge/reason"] == "changes"
    job = definitions.resolve_job_def(job_name("nightly"))
    result = job.execute_in_process(
        instance=instance, tags={**tags, "deltaforge/until": "caught up"}
    )
    assert result.success
    assert len(shop.entries("nightly.customers")) == 1
    assert "no changes in the source" in str(evaluate(definitions, instance))
