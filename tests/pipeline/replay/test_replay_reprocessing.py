"""Changed processors over ranges that are delivered: shown by a preview, delivered by a replay.

The pipeline's runs are real ones in this process; commands and a Materialize are what people use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.assets.names import RUN_TAG, asset_key, job_name, partition_key
from deltaforge_dagster.assets.publish import add_partition
from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.resources.instance import local_instance
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed
from tests.pipeline.process.test_processing import MASK, RUN, with_processors

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

TRIED = """
processors:
  - {type: filter, id: cheap, fields: [{path: id, op: ne, value: 1}]}
  - type: javascript
    id: alarm
    limits: {cpu_ms: 5000, timeout_ms: 30000}
    inline: |
      (e) => { e.after.secret = "s3cret"; return [e, {source: e.source, op: "c", ts_ms: e.ts_ms, after: {n: 1}}]; }
"""


@pytest.fixture
def fed(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Feed]:
    """One range of three rows, of which the chain has dropped the second; nobody works on it."""
    path = tmp_path / "feed.yaml"
    for name, value in (
        ("COLUMNS", "200"),
        ("DELTAFORGE_HOME", f"{tmp_path}/home"),
        ("DELTAFORGE_PIPELINES", str(path)),
    ):
        monkeypatch.setenv(name, value)
    text = with_processors(shop.pipeline("feed", run=RUN), MASK)
    with opened_feed(shop, path, text, spark_server) as feed:
        shop.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'hidden'), (3, 'c')")
        feed.catch_up()
        yield feed


def command(*arguments: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, arguments)


def names(entries: list[dict[str, str]]) -> list[tuple[int, str]]:
    """Return ids and names of the customers in a stream's entries."""
    images = [json.loads(one["df-event"])["after"] for one in entries]
    return [(one["id"], one["name"]) for one in images]


def observed(number: int) -> dict[str, Any]:
    """Return the newest observation of the range's `changes`."""
    with local_instance(Settings.from_env()) as instance:
        records = instance.fetch_observations(
            dg.AssetRecordsFilter(
                asset_key=asset_key("feed", "changes"), asset_partitions=[partition_key(number)]
            ),
            limit=1,
        ).records
        assert records[0].asset_observation is not None
        return {name: one.value for name, one in records[0].asset_observation.metadata.items()}


def test_what_changed_processors_would_make(fed: Feed, tmp_path: Path) -> None:
    """A preview tells what differs, by table, field and event; values only on request.

    Nothing is delivered or written but the observation. Then the same processors in the pipeline's file: a
    replay with them delivers what the preview showed, marked; what is recorded stays.
    """
    store, number = fed.store, fed.store.ranges.read("feed")[-1].range
    before = (
        fed.delivered("customers"),
        store.segments.read("feed"),
        store.checkpoints.read("feed"),
    )
    assert names(before[0]) == [(1, "a!"), (3, "c!")]
    tried = tmp_path / "tried.yml"
    tried.write_text(TRIED)
    asked = ("preview", "feed", "--range", str(number), "--processors", str(tried))

    text = command(*asked, "--record")
    parsed = command(*asked, "--json", "--show-values", "--sample", "1")

    assert (text.exit_code, parsed.exit_code) == (0, 0), text.output + parsed.output
    lines = text.stdout.splitlines()
    assert lines[0] == (
        f"Range {number}: 3 events in, 4 out; unlike what sinks get: 1 changed, 3 added, 1 dropped."
    )
    rows = [line.split() for line in lines]
    assert ["public.customers", "0", "1", "3", "1", "0"] in rows
    assert ["public.customers", "after.secret", "1"] in rows
    assert next(row[:3] for row in rows if row[:1] == ["cheap"]) == ["cheap", "3", "2"]
    assert "s3cret" not in text.stdout
    found = json.loads(parsed.stdout)
    assert found["processors"]["cheap"]["filter_dropped"] == 1
    assert found["tables"] == {"public.customers": {"changed": 1, "added": 3, "dropped": 1}}
    assert {one["kind"]: one["fields"] for one in found["sample"]} == {
        "changed": ["after.name", "after.secret", "tags"],
        "dropped": [],
        "added": [],
    }
    assert [one["made"]["after"] for one in found["sample"] if one["made"]] == [
        '{"id":3,"name":"c","secret":"s3cret"}',
        '{"id":2,"name":"hidden","secret":"s3cret"}',
    ]
    seen = observed(number)
    assert (seen["preview/added"], seen["preview/processor/cheap/filter_dropped"]) == (3, 1)
    assert "| public.customers | after.secret | 1 |" in seen["preview"]
    assert "s3cret" not in str(seen)

    fed.path.write_text(fed.path.read_text().replace("}!`", "}?`"))
    again = command("replay", "feed", "--range", str(number), "--sink", "redis", "--reprocess")

    assert again.exit_code == 0, again.output
    assert "2 messages sent to redis again, with the current processors" in again.stdout
    delivered = fed.delivered("customers")
    assert delivered[:2] == before[0]
    assert names(delivered[2:]) == [(1, "a?"), (3, "c?")]
    assert all(one["df-replay"] for one in delivered[2:])
    assert before[1:] == (store.segments.read("feed"), store.checkpoints.read("feed"))
    known = {path for row in store.segments.read("feed") for path in row.paths}
    assert {file.name for file in (tmp_path / "home/journal").rglob("*.parquet")} == {
        Path(path).name for path in known
    }


def materialized(number: int, *assets: str, tag: str) -> dg.ExecuteInProcessResult:
    """Materialize a range in the way of the UI, with a tag."""
    settings = Settings.from_env()
    job = build_definitions(settings, single_process=True).resolve_job_def(job_name("feed"))
    with local_instance(settings) as instance:
        add_partition(instance, "feed", number)
        return job.execute_in_process(
            instance=instance,
            asset_selection=[asset_key("feed", one) for one in assets],
            partition_key=partition_key(number),
            tags={RUN_TAG: tag},
            raise_on_error=False,
        )


def test_the_same_from_dagsters_ui(fed: Feed) -> None:
    """A Materialize with a tag previews, or delivers; a tag that means nothing delivers nothing.

    The range's published metadata say what processors did when it was delivered.
    """
    number = fed.store.ranges.read("feed")[-1].range
    fed.path.write_text(fed.path.read_text().replace("}!`", "}?`"))

    shown = materialized(number, "changes", "redis", tag="preview")
    wrong = materialized(number, "redis", tag="previw")

    assert shown.success
    assert (observed(number)["preview/changed"], len(fed.delivered("customers"))) == (2, 2)
    assert not wrong.success

    again = materialized(number, "redis", tag="reprocess")

    assert names(fed.delivered("customers")[2:]) == [(1, "a?"), (3, "c?")]
    (event,) = [one for one in again.all_events if one.is_step_materialization]
    metadata = event.step_materialization_data.materialization.metadata
    assert metadata["reprocessed"].value == 2
    assert metadata["processor/mask/events_in"].value == 3
    assert metadata["processor/mask/events_out"].value == 2
    assert float(str(metadata["processor/mask/latency_seconds"].value)) > 0


def test_what_cannot_be_previewed(fed: Feed, tmp_path: Path) -> None:
    """A file with mistakes, a broken script, a range that is not there: one sentence each."""
    number = str(fed.store.ranges.read("feed")[-1].range)
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("processors:\n- {type: filter, opps: [create]}\n")
    broken = tmp_path / "broken.yml"
    broken.write_text("processors: [{type: javascript, id: js, inline: '(e) => e.a.b'}]")

    mistaken = command("preview", "feed", "--range", number, "--processors", str(wrong))
    threw = command("preview", "feed", "--range", number, "--processors", str(broken))
    missing = command("preview", "feed", "--range", "99")

    assert (mistaken.exit_code, threw.exit_code, missing.exit_code) == (2, 1, 2)
    assert f"{wrong}:2: processors[0].opps: is not a known field" in mistaken.stderr
    assert "processor js: JS processor threw: TypeError" in threw.stderr
    assert "feed: there is no range 99" in missing.stderr


def test_a_range_that_sinks_lack(fed: Feed, tmp_path: Path) -> None:
    """While a broken processor stops deliveries, a preview says what a fixed one would make of the rows.

    They are compared with what was captured. A replay has nothing to deliver again yet.
    """
    fixed = tmp_path / "fixed.yml"
    fixed.write_text(
        "processors: [{type: javascript, id: js, inline: '(e) => { e.after.n = 1; }'}]"
    )
    fed.path.write_text(fed.path.read_text().replace("calls += 1;", "events[0].x.y;"))
    fed.shop.execute("INSERT INTO customers VALUES (4, 'd')")
    assert "mask" in fed.catch_up().sink_errors["redis"]
    asked = ("feed", "--range", str(fed.store.ranges.read("feed")[-1].range))

    shown = command("preview", *asked, "--processors", str(fixed), "--json")
    refused = command("replay", *asked, "--sink", "redis", "--reprocess")

    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["fields"] == {"public.customers": {"after.n": 1}}
    assert refused.exit_code == 1
    assert "sink redis does not have range" in refused.stderr
