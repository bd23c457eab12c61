"""`/metrics` for Prometheus, in its text format or as OpenMetrics, and metrics of requests.

The metrics of an installation are gathered from the state store for each scrape (`collect`).
Counters of pipelines are stored as the pipelines work (`state.metrics`); gauges of the current
state are computed here. Every family of `state.metric_families` is always present, with zeros for
what has not happened yet.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import orjson
from fastapi import APIRouter, Request, Response
from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaforge_dagster import __version__
from deltaforge_dagster.api.context import Context
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.processors import OutboxProcessor
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.pipeline.committed import lacking_bytes, segments_behind, sink_lag_seconds
from deltaforge_dagster.pipeline.health.health import health
from deltaforge_dagster.pipeline.sensing.views import classifications, schemas
from deltaforge_dagster.sinks.registry import MessageSinkType, sink_types
from deltaforge_dagster.state import metric_families as families
from deltaforge_dagster.state.metric_families import (
    API_ACTIONS,
    API_REQUESTS,
    API_SECONDS,
    FAMILIES,
    PREFIX,
    Family,
)
from deltaforge_dagster.state.metrics import LE, RUN_FAILURE_REASONS, SUM, Stored, Tally
from deltaforge_dagster.state.records import SourceLog
from deltaforge_dagster.state.store import StateStore

router = APIRouter(tags=["Observability"])

_ACTIONS = {
    ("POST", "/pipelines"): "create",
    ("PATCH", "/pipelines/{name}"): "patch",
    ("DELETE", "/pipelines/{name}"): "delete",
    ("POST", "/pipelines/{name}/pause"): "pause",
    ("POST", "/pipelines/{name}/resume"): "resume",
    ("POST", "/pipelines/{name}/stop"): "stop",
    ("DELETE", "/pipelines/{name}/checkpoint"): "reset",
}


class _Requests:
    """The request metrics of this process; they start at 0 with the process."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._lock = threading.Lock()

    def add(self, tally: Tally) -> None:
        """Add the tally of a request."""
        with self._lock:
            self._tally.join(tally)

    def series(self) -> list[Stored]:
        """Return the current value of every series."""
        with self._lock:
            rows, _ = self._tally.rows("")
        return [Stored("", row["name"], orjson.loads(row["labels"]), row["value"]) for row in rows]


_requests = _Requests()

_process = ProcessCollector(registry=None)
"""CPU, memory and open files of this process, under the names of all Prometheus clients."""


class RequestMetrics:
    """ASGI middleware that counts requests by route, method and status, and pipeline actions.

    Routes that act on a pipeline set `request.state.tenant` to its tenant.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500  # if the application fails before a response starts

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})
        try:
            await self._app(scope, receive, answered)
        finally:
            _requests.add(_tally_of(scope, status, time.monotonic() - began))


def _tally_of(scope: Scope, status: int, seconds: float) -> Tally:
    # Labels only have names of known routes: names that clients send are unbounded.
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if route != "none" else "any"
    tally = Tally()
    tally.add(API_REQUESTS, route=route, method=method, status=str(status))
    tally.observe(API_SECONDS, seconds, route=route, method=method)
    action = _ACTIONS.get((method, route))
    if action is not None:
        result = "success" if status < 400 else "error"
        tenant = scope["state"].get("tenant", "")
        tally.add(API_ACTIONS, action=action, result=result, tenant=tenant)
    return tally


class _Snapshot(Collector):
    """A collector with metrics that were already gathered, for the encoder."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._metrics


@router.get("/metrics", response_class=Response)
def metrics(request: Request, context: Context) -> Response:
    """Return all metrics in Prometheus text format, or as OpenMetrics if the client accepts it."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    families = list(collect(context.store, context.pipelines(), _requests.series()))
    return Response(encode(_Snapshot([*families, *_process.collect()])), media_type=content_type)


_Labels = tuple[str, ...]
_Values = dict[_Labels, float]
_STATUS = {"running": 1.0, "paused": 0.5, "stopped": 0.0, "failed": -1.0}
_ALIKE = {
    families.SENSING_CACHE_HITS: families.SCHEMA_CACHE_HITS,
    families.SENSING_CACHE_MISSES: families.SCHEMA_CACHE_MISSES,
}
"""Families that are exported under a second name, mapped to the family whose values they have."""
_TRAFFIC = {
    families.SINK_COMMITS: "commits",
    families.SINK_ABORTS: "aborts",
    families.KAFKA_RETRIES: "retries",
}
"""Families that only some sinks' clients can count, with the name of the count (`traffic`)."""


def collect(
    store: StateStore,
    pipelines: Sequence[LoadedPipeline | BrokenPipeline],
    counted: Iterable[Stored] = (),
) -> Iterator[Metric]:
    """Yield every family with its values.

    Args:
        store: The state store.
        pipelines: The pipelines of the installation.
        counted: The metrics that this process has counted itself.
    """
    numbers = defaultdict[str, list[Stored]](list)
    for stored in itertools.chain(store.metrics.read(), counted):
        numbers[stored.name].append(stored)
    loaded = [pipeline for pipeline in pipelines if isinstance(pipeline, LoadedPipeline)]
    gauges = _CurrentState(store, pipelines, loaded, numbers)
    for family in FAMILIES.values():
        if family.kind == "histogram":
            yield _histogram(family, numbers[family.name], numbers[family.name + SUM])
            continue
        values = _zeros(family, loaded)
        values |= _summed(family, numbers[_ALIKE.get(family, family).name])
        if family in gauges.made:
            values |= gauges.made[family]()
        yield _plain(family, values)


class _CurrentState:
    """Computes the families that describe the current state."""

    def __init__(
        self,
        store: StateStore,
        pipelines: Sequence[LoadedPipeline | BrokenPipeline],
        loaded: Sequence[LoadedPipeline],
        numbers: Mapping[str, Sequence[Stored]],
    ) -> None:
        self._store = store
        self._pipelines = pipelines
        self._loaded = loaded
        self._numbers = numbers
        self._time = store.now()
        self._rows = {row.name: row for row in store.pipelines.read()}
        self._checkpoints = {name: store.checkpoints.read(name) for name in self._rows}
        self._sensed = [
            (pipeline, str(schema["table"]))
            for pipeline in loaded
            if (sensing := pipeline.spec.spec.schema_sensing) is not None
            and sensing.enabled
            and pipeline.name in self._rows
            for schema in schemas(store, pipeline)
        ]
        self._depths = {name: store.dead_letters.depth(name) for name in self._rows}
        self._health = {pipeline.name: health(store, pipeline) for pipeline in pipelines}
        self.made: dict[Family, Callable[[], _Values]] = {
            families.PIPELINES: lambda: {(): len(pipelines)},
            families.PIPELINE_STATUS: self._status,
            families.PIPELINE_PROBLEMS: self._problems,
            families.PIPELINE_INFO: self._info,
            families.PIPELINE_RUNS: self._runs,
            families.CHANNEL_DEPTH: self._channel_depth,
            families.JOURNAL_BYTES: lambda: {
                (name,): store.segments.total_bytes(name) for name in self._rows
            },
            families.JOURNAL_LACKING: self._journal_lacking,
            families.JOURNAL_LIMIT: lambda: {
                (pipeline.name,): pipeline.spec.spec.engine.journal.max_bytes for pipeline in loaded
            },
            families.HELD_EVENTS: self._on_hold,
            families.CAPTURE_PAUSED: lambda: {
                (name,): row.capture_pause is not None for name, row in self._rows.items()
            },
            families.BUILD_INFO: _build,
            families.SOURCE_IDLE: self._idle,
            families.SOURCE_LOG_AHEAD: lambda: self._logs(lambda log: log.bytes),
            families.SOURCE_LOG_AHEAD_SECONDS: lambda: self._logs(
                lambda log: self._age(log.bytes, log.unread_since)
            ),
            families.SOURCE_LOG_UNCONFIRMED: lambda: self._logs(lambda log: log.unconfirmed),
            families.SOURCE_LOG_UNCONFIRMED_SECONDS: lambda: self._logs(
                lambda log: self._age(log.unconfirmed, log.unconfirmed_since)
            ),
            families.SOURCE_LOG_RETAINED: lambda: self._logs(lambda log: log.retained),
            families.SOURCE_LOG_LIMIT: lambda: self._logs(lambda log: log.limit),
            families.SOURCE_LOG_ROOM: lambda: self._logs(lambda log: log.room),
            families.SOURCE_LOG_SECONDS_LEFT: lambda: self._logs(lambda log: log.seconds_left),
            families.CONFIRMED_EARLY: lambda: {
                (name,): state.early is not None for name, state in self._health.items()
            },
            families.SINK_STATUS: self._sink_status,
            families.SINK_LAG: self._sink_lag,
            families.LAST_CHECKPOINT_TS: self._last_checkpoint,
            families.CHECKPOINT_LAG: self._checkpoint_lag,
            families.TABLE_VERIFIED: lambda: {
                (name, proof.sink, proof.table): proof.verified_at
                for name in self._rows
                for proof in store.reconciliations.proofs(name)
            },
            families.DLQ_ENTRIES: lambda: {
                (name,): depth.entries for name, depth in self._depths.items()
            },
            families.DLQ_SATURATION: self._saturation,
            families.SCHEMA_TABLES: lambda: {(): len(self._sensed)},
            families.SCHEMA_MAPS: self._maps,
            families.DLQ_EVICTED: lambda: {
                (name,): depth.evicted + depth.expired for name, depth in self._depths.items()
            },
            families.DLQ_REJECTED: lambda: {
                (name,): depth.rejected for name, depth in self._depths.items()
            },
        }

    def _status(self) -> _Values:
        return {(name,): _STATUS[state.status] for name, state in self._health.items()}

    def _problems(self) -> _Values:
        return {
            (name, severity): sum(problem.severity == severity for problem in state.problems)
            for name, state in self._health.items()
            for severity in ("error", "warning")
        }

    def _info(self) -> _Values:
        return {(pipeline.name, pipeline.spec.metadata.tenant): 1 for pipeline in self._loaded}

    def _runs(self) -> _Values:
        leases = {name: self._store.leases.get(name) for name in self._rows}
        return {
            (name,): lease is not None and lease.active_at(self._time)
            for name, lease in leases.items()
        }

    def _channel_depth(self) -> _Values:
        return {
            (name,): max(
                (
                    segments_behind(row, checkpoint)
                    for checkpoint in self._checkpoints[name].values()
                    if checkpoint.attached
                ),
                default=0,
            )
            for name, row in self._rows.items()
        }

    def _idle(self) -> _Values:
        return {
            (stored.pipeline, stored.labels["source"]): max(0.0, self._time - stored.value)
            for stored in self._numbers[families.SOURCE_RECEIVED.name]
        }

    def _logs(self, figure: Callable[[SourceLog], float | None]) -> _Values:
        """Return a figure of what was last seen of each pipeline's log, where it is known."""
        return {
            (pipeline.name, pipeline.spec.spec.source.config.id): value
            for pipeline in self._loaded
            if (log := self._health[pipeline.name].log) is not None
            and (value := figure(log)) is not None
        }

    def _age(self, size: int | None, since: float | None) -> float | None:
        """Return the age of a part of the log; None if it is not known how much there is."""
        if size is None:
            return None
        return 0.0 if since is None else max(0.0, self._time - since)

    def _journal_lacking(self) -> _Values:
        return {
            (name,): lacking_bytes(
                self._store, name, [row for row in checkpoints.values() if row.attached]
            )
            for name, checkpoints in self._checkpoints.items()
        }

    def _sink_status(self) -> _Values:
        status: _Values = {}
        for pipeline in self._loaded:
            checkpoints = self._checkpoints.get(pipeline.name, {})
            for sink in pipeline.spec.spec.sinks:
                row = checkpoints.get(sink.config.id)
                if row is not None:  # None before the first run
                    required = str(sink.config.required).lower()
                    well = row.attached and not row.failures
                    status[pipeline.name, sink.config.id, required] = well
        return status

    def _sink_lag(self) -> _Values:
        return {
            (name, sink): sink_lag_seconds(self._store, self._rows[name], checkpoint, self._time)
            for name, checkpoints in self._checkpoints.items()
            for sink, checkpoint in checkpoints.items()
        }

    def _on_hold(self) -> _Values:
        return {
            (name,): sum(
                hold.events for hold in self._store.holds.read(name) if hold.state != "journaled"
            )
            for name in self._rows
        }

    def _last_checkpoint(self) -> _Values:
        newest: _Values = {}
        for stored in self._numbers[families.SINK_CHECKPOINT_TS.name]:
            newest[stored.pipeline,] = max(newest.get((stored.pipeline,), 0.0), stored.value)
        return newest

    def _checkpoint_lag(self) -> _Values:
        lag: _Values = {
            (name, sink): 0
            for name, checkpoints in self._checkpoints.items()
            for sink in checkpoints
        }
        return lag | dict(self._store.metrics.lacking_rows())

    def _saturation(self) -> _Values:
        return {
            (pipeline.name,): self._depths[pipeline.name].entries
            / pipeline.spec.spec.journal.dlq.max_entries
            for pipeline in self._loaded
            if pipeline.name in self._depths
        }

    def _maps(self) -> _Values:
        paths = (
            path
            for pipeline, table in self._sensed
            for path in classifications(self._store, pipeline, table)["paths"].values()
        )
        return {(): sum(bool(path["has_dynamic_fields"]) for path in paths)}


def _build() -> _Values:
    commit, date = (
        os.environ.get(f"DELTAFORGE_{name}", "") or "unknown" for name in ("COMMIT", "BUILD_DATE")
    )
    return {(__version__, commit, date): 1}


def _zeros(family: Family, loaded: Sequence[LoadedPipeline]) -> _Values:
    """Return zeros for the labels that are known from the pipeline files.

    With them a first count shows as an increase. Counters that can never increase get no zero,
    because a series says that something is counted.
    """
    if family.kind != "counter":
        return {}
    values: _Values = {}
    match family.labels:
        case ():
            values[()] = 0
        case ("pipeline",):
            values |= {(pipeline.name,): 0 for pipeline in loaded}
        case ("pipeline", "reason"):
            values |= {
                (pipeline.name, reason): 0 for pipeline in loaded for reason in RUN_FAILURE_REASONS
            }
        case ("pipeline", "source"):
            values |= {
                (pipeline.name, pipeline.spec.spec.source.config.id): 0 for pipeline in loaded
            }
        case ("pipeline", "sink"):
            for pipeline in loaded:
                values |= {
                    (pipeline.name, sink.config.id): 0
                    for sink in pipeline.spec.spec.sinks
                    if _can_count(family, sink)
                }
        case ("pipeline", "processor"):
            for pipeline in loaded:
                values |= {
                    (pipeline.name, processor.id): 0
                    for processor in pipeline.spec.spec.processors
                    if family is not families.OUTBOX_TRANSFORMED
                    or isinstance(processor, OutboxProcessor)
                }
        case _:
            pass
    return values


def _can_count(family: Family, sink: SinkBlock) -> bool:
    """Return whether a counter of sinks can ever be more than 0 for a sink."""
    kind = sink_types()[sink.type]
    if family in _TRAFFIC:
        return _TRAFFIC[family] in kind.traffic(sink.config)
    return family is not families.SINK_BYTES or isinstance(kind, MessageSinkType)


def _labels(family: Family, stored: Stored) -> _Labels:
    labels = {**stored.labels, "pipeline": stored.pipeline}
    return tuple(labels[name] for name in family.labels)


def _summed(family: Family, numbers: Iterable[Stored]) -> _Values:
    """Return stored values by the family's labels, summed over labels that it does not have."""
    values = defaultdict[_Labels, float](float)
    for stored in numbers:
        values[_labels(family, stored)] += stored.value
    return dict(values)


def _plain(family: Family, values: _Values) -> Metric:
    # In OpenMetrics the name of a counter must end with `_total`.
    conforms = family.kind == "gauge" or family.name.endswith("_total")
    name = PREFIX + family.name
    kind = family.kind if conforms else "unknown"
    metric = Metric(name.removesuffix("_total") if kind == "counter" else name, family.help, kind)
    for labels, value in sorted(values.items()):
        metric.add_sample(name, dict(zip(family.labels, labels, strict=True)), float(value))
    return metric


def _histogram(family: Family, buckets: Iterable[Stored], sums: Iterable[Stored]) -> Metric:
    """Return a histogram with cumulative buckets."""
    name = PREFIX + family.name
    metric = Metric(name, family.help, "histogram")
    by_labels = defaultdict[_Labels, dict[float, float]](lambda: defaultdict(float))
    for bucket in buckets:
        by_labels[_labels(family, bucket)][float(bucket.labels[LE])] += bucket.value
    total = _summed(family, sums)
    for labels, counts in sorted(by_labels.items()):
        label_values = dict(zip(family.labels, labels, strict=True))
        count = 0.0
        for bound in (*family.buckets, float("inf")):
            count += counts.get(float(f"{bound:g}"), 0.0)
            text = "+Inf" if bound == float("inf") else str(float(bound))
            metric.add_sample(f"{name}_bucket", {**label_values, LE: text}, count)
        metric.add_sample(f"{name}_count", label_values, count)
        metric.add_sample(f"{name}_sum", label_values, total.get(labels, 0.0))
    return metric
