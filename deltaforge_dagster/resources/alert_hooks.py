"""Telling people by HTTP, and remembering what they were told.

A message names the pipeline, the asset and the check, and nothing that came from elsewhere: no error's
text, so no secret and no value of a row. What each hook was told is kept in the state store, in the namespace
`alerts/<pipeline>`: it hears of a problem once, and once that it is over, whatever restarts meanwhile. A
process that dies between sending and remembering sends again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import orjson

from deltaforge_dagster.config.alerts import AlertHook
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.state.primitives import Kv
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines quote URLs

_ATTEMPTS = 3
_TIMEOUT_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
"""Before the second attempt; doubles. What still failed is tried again at the sensor's next tick."""

_ICONS = {"problem": ":red_circle:", "recovered": ":large_green_circle:"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that fails now.

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
        """What tells it from other problems of its pipeline; it is the same while it lasts."""
        return f"{self.asset}: {self.check}"


def tell(store: StateStore, loaded: LoadedPipeline, problems: Sequence[Problem]) -> list[str]:
    """Tell every hook of a pipeline what it has not heard yet; return which could not be told.

    Args:
        store: Remembers what was told.
        loaded: The pipeline.
        problems: Everything that fails now.
    """
    told = Kv(store.database, f"alerts/{loaded.name}")
    hooks = {_id(hook): hook for hook in loaded.spec.spec.engine.alerts}
    for gone in told.items().keys() - hooks.keys():
        told.delete(gone)
    deaf = []
    with httpx.Client(timeout=_TIMEOUT_SECONDS) as client:
        for place, (hook_id, hook) in enumerate(hooks.items()):
            known: dict[str, Any] = orjson.loads(told.get(hook_id) or b"{}")
            for message in _news(loaded, problems, known):
                if not _sent(client, hook, message):
                    deaf.append(f"engine.alerts[{place}] ({hook.type})")
                    break
                _remember(known, message)
                told.put(hook_id, orjson.dumps(known))
    return deaf


def _news(
    loaded: LoadedPipeline, problems: Sequence[Problem], known: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the messages that are due: problems that are new, then those that are over."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    present = {one.key: one for one in problems}
    common = {"pipeline": loaded.name, "tenant": loaded.spec.metadata.tenant}
    began = [
        {
            "event": "problem",
            **common,
            "asset": one.asset,
            "check": one.check,
            "severity": one.severity,
            "since": now,
        }
        for key, one in present.items()
        if key not in known
    ]
    over = [
        {"event": "recovered", **common, **before, "until": now}
        for key, before in known.items()
        if key not in present
    ]
    return [*began, *over]


def _remember(known: dict[str, Any], message: Mapping[str, Any]) -> None:
    problem = Problem(message["asset"], message["check"], message["severity"])
    if message["event"] == "problem":
        kept = ("asset", "check", "severity", "since")
        known[problem.key] = {name: message[name] for name in kept}
    else:
        del known[problem.key]


def _sent(client: httpx.Client, hook: AlertHook, message: Mapping[str, Any]) -> bool:
    body = {"text": _text(message)} if hook.type == "slack" else message
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            answer = client.post(hook.url.get_secret_value(), json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = type(error).__name__  # its text may quote the URL
        else:
            if answer.is_success:
                return True
            problem = f"status {answer.status_code}"
    fields = {"pipeline": message["pipeline"], "hook": hook.type, "reason": problem}
    logger.warning("an alert could not be sent", extra={"fields": fields})
    return False


def _text(message: Mapping[str, Any]) -> str:
    """Return a message as Slack shows it."""
    what = f"`{message['check']}` of `{message['asset']}`"
    name = f"*{message['pipeline']}*"
    if message["event"] == "recovered":
        return f"{_ICONS['recovered']} {name}: {what} is well again (since {message['since']})"
    return (
        f"{_ICONS['problem']} {name}: {what} fails ({message['severity']}); "
        f"`deltaforge status {message['pipeline']}` says why"
    )


def _id(hook: AlertHook) -> str:
    """Return what tells hooks apart, without their secrets."""
    text = f"{hook.type} {hook.url.get_secret_value()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
