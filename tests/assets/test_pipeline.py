"""Tests of what Dagster itself writes into the log of a run."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.assets import chunks, execution
from deltaforge_dagster.assets.names import asset_key, job_name, snapshot_job_name
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions

FILE = """
metadata: {name: two-words, tenant: acme}
spec:
  source: {type: postgres, config: {id: pg, dsn: "host=h", slot: s, publication: p, tables: [public.t]}}
  sinks:
    - {type: file, config: {id: a-b, path: /tmp/nowhere.jsonl}}
    - {type: file, config: {id: a_b, path: /tmp/nowhere-else.jsonl}}
"""


@pytest.mark.parametrize("job", [job_name("two-words"), snapshot_job_name("two-words")])
@pytest.mark.parametrize("only", [None, "a-b"])
def test_the_log_misses_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, only: str | None
) -> None:
    """Dagster reports no missing output of the op, whatever is selected."""
    (tmp_path / "pipeline.yaml").write_text(FILE)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipeline.yaml"))
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    evaluation = dg.AssetCheckEvaluation(
        asset_key=asset_key("two-words", "a-b"), check_name="delivered", passed=False
    )
    monkeypatch.setattr(execution, "execute", lambda context, *_: context.log_event(evaluation))
    monkeypatch.setattr(chunks, "execute", lambda *_: None)
    definition = build_definitions(Settings.from_env(), single_process=True).resolve_job_def(job)
    of_pipeline = job == job_name("two-words")
    with dg.DagsterInstance.ephemeral() as instance:
        ended = definition.execute_in_process(
            instance=instance,
            asset_selection=[asset_key("two-words", only)] if only and of_pipeline else None,
        )
        logged = [entry.user_message for entry in instance.all_logs(ended.run_id)]
        known = instance.event_log_storage.get_asset_check_execution_history(
            evaluation.asset_check_key, limit=1
        )

    assert ended.success
    assert not [one for one in logged if "did not yield" in one or "implicit Nothing" in one]
    assert not any(event.is_step_materialization for event in ended.all_events)
    if of_pipeline:
        assert [one.evaluation and one.evaluation.passed for one in known] == [False]
