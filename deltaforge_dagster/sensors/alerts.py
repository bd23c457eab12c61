"""Alerts about failing checks and runs: one sensor for all pipelines that configure HTTP hooks.

A message has the names of the pipeline, the asset and the check, but no error texts, so it contains
no secrets and no values of rows. The state store records what each hook was sent, in the namespace
`alerts/<pipeline>`: a hook gets one message when a problem begins and one when it is over, across
restarts. A process that dies between sending and recording sends the message again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import httpx
import orjson

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG
from deltaforge_dagster.assets.reconcile import reconciled_key
from deltaforge_dagster.config.engine import AlertHook
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.catalog import reread
from deltaforge_dagster.sensors.every_tick import TickCache
from deltaforge_dagster.sensors.report import newest_evaluation
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # its log lines contain URLs
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
_ATTEMPTS = 3
_TIMEOUT_SECONDS = 5.0

_PAUSE_SECONDS = 0.5
"""Pause before the second attempt; it doubles for the third.

If that fails as well, the sensor's next tick tries again.
"""

_ICONS = {"problem": ":red_circle:", "recovered": ":large_green_circle:"}


@dataclass(frozen=True, slots=True)
class AlertProblem:
    """A check or run that fails now.

    Attributes:
        asset: The asset's path, such as `orders/sinks/redis`; the pipeline's name for a run.
        check: Name of the check; `run` for a run.
        severity: `ERROR` or `WARN`.
    """

    asset: str
    check: str
    severity: str

    @property
    def key(self) -> str:
        """Identifies the problem within its pipeline for as long as it lasts."""
        return f"{self.asset}: {self.check}"


def build_alerts_sensor(
    pipelines: Sequence[LoadedPipeline],
    tables: Mapping[str, Sequence[KnownTable]],
    cache: TickCache,
    name: str,
) -> dg.SensorDefinition:
    """Return the sensor, which is on by default.

    Args:
        pipelines: The pipelines with hooks.
        tables: The tables of each pipeline's sinks, which have a check as well.
        cache: The resources that ticks share.
        name: The name of the sensor.
    """

    @dg.sensor(
        name=name,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Notifies the hooks of engine.alerts when checks and runs fail and when they "
        "recover.",
    )
    def alerts(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        unreached = []
        with cache.lend(context) as (instance, opened):
            for pipeline in pipelines:
                try:
                    current = reread(opened.store, pipeline)
                    if isinstance(current, LoadedPipeline):
                        failing = problems(instance, current, tables.get(pipeline.name, ()))
                        unreached += [
                            f"{pipeline.name}: {hook}"
                            for hook in notify(opened.store, current, failing)
                        ]
                except DeltaforgeError as error:  # go on with the other pipelines
                    unreached.append(f"{pipeline.name}: {error}")
        return dg.SkipReason(
            "could not notify " + "; ".join(unreached) if unreached else "every hook is up to date"
        )

    return alerts


def problems(
    instance: dg.DagsterInstance, loaded: LoadedPipeline, tables: Sequence[KnownTable] = ()
) -> list[AlertProblem]:
    """Return the checks of a pipeline that fail now, and its newest live run if that failed.

    Args:
        instance: The Dagster instance.
        loaded: The pipeline.
        tables: The tables of its sinks.
    """
    failing = []
    keys = [spec.key for spec in check_specs(loaded)]
    keys += [reconciled_key(loaded.name, table) for table in tables]
    for key in keys:
        shown = newest_evaluation(instance, key)
        if shown is not None and not shown.passed:
            path = key.asset_key.to_user_string()
            failing.append(AlertProblem(path, key.name, shown.severity.value))
    live = dg.RunsFilter(tags={PIPELINE_TAG: loaded.name, RUN_TAG: "live"}, statuses=_ENDED)
    newest = instance.get_runs(live, limit=1)
    if newest and newest[0].status == dg.DagsterRunStatus.FAILURE:
        failing.append(AlertProblem(loaded.name, "run", "ERROR"))
    return failing


def notify(
    store: StateStore, loaded: LoadedPipeline, problems: Sequence[AlertProblem]
) -> list[str]:
    """Send every hook of a pipeline the messages that are due; return the unreachable hooks.

    Args:
        store: The state store, which records what was sent.
        loaded: The pipeline.
        problems: Everything that fails now.
    """
    sent = Kv(store.database, f"alerts/{loaded.name}")
    hooks = {_id(hook): hook for hook in loaded.spec.spec.engine.alerts}
    for gone in sent.items().keys() - hooks.keys():
        sent.delete(gone)
    unreached = []
    with httpx.Client(timeout=_TIMEOUT_SECONDS) as client:
        for index, (hook_id, hook) in enumerate(hooks.items()):
            reported: dict[str, Any] = orjson.loads(sent.get(hook_id) or b"{}")
            for message in _due_messages(loaded, problems, reported):
                if not _sent(client, hook, message):
                    unreached.append(f"engine.alerts[{index}] ({hook.type})")
                    break
                _remember(reported, message)
                sent.put(hook_id, orjson.dumps(reported))
    return unreached


def _due_messages(
    loaded: LoadedPipeline, problems: Sequence[AlertProblem], reported: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the messages that are due: first for new problems, then for those that are over."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    present = {problem.key: problem for problem in problems}
    common = {"pipeline": loaded.name, "tenant": loaded.spec.metadata.tenant}
    began = [
        {
            "event": "problem",
            **common,
            "asset": problem.asset,
            "check": problem.check,
            "severity": problem.severity,
            "since": now,
        }
        for key, problem in present.items()
        if key not in reported
    ]
    over = [
        {"event": "recovered", **common, **before, "until": now}
        for key, before in reported.items()
        if key not in present
    ]
    return [*began, *over]


def _remember(reported: dict[str, Any], message: Mapping[str, Any]) -> None:
    problem = AlertProblem(message["asset"], message["check"], message["severity"])
    if message["event"] == "problem":
        kept = ("asset", "check", "severity", "since")
        reported[problem.key] = {name: message[name] for name in kept}
    else:
        del reported[problem.key]


def _sent(client: httpx.Client, hook: AlertHook, message: Mapping[str, Any]) -> bool:
    body = {"text": _text(message)} if hook.type == "slack" else message
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            answer = client.post(hook.url.get_secret_value(), json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = type(error).__name__  # its text may contain the URL
        else:
            if answer.is_success:
                return True
            problem = f"status {answer.status_code}"
    fields = {"pipeline": message["pipeline"], "hook": hook.type, "reason": problem}
    logger.warning("an alert could not be sent", extra={"fields": fields})
    return False


def _text(message: Mapping[str, Any]) -> str:
    """Return a message as text for Slack."""
    check = f"`{message['check']}` of `{message['asset']}`"
    name = f"*{message['pipeline']}*"
    if message["event"] == "recovered":
        return (
            f"{_ICONS['recovered']} {name}: {check} has recovered (failed since {message['since']})"
        )
    return (
        f"{_ICONS['problem']} {name}: {check} fails ({message['severity']}); "
        f"for details: `deltaforge status {message['pipeline']}`"
    )


def _id(hook: AlertHook) -> str:
    """Return a hash that identifies a hook without revealing its URL."""
    text = f"{hook.type} {hook.url.get_secret_value()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
