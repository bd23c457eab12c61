"""Definitions of all metrics: name, type, labels and help text.

A family is `stored` if it is counted while pipelines run and kept in the state store (`metrics`);
otherwise it is computed from the store on request (`api.metrics`). Names here lack the prefix
`deltaforge_`. docs/metrics.md is the same list for users; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "deltaforge_"

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# 200,000 is the default limit of a segment; only a larger transaction exceeds it.
EVENTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 200_000, 1_000_000)
BYTES = tuple(float(1 << exponent) for exponent in range(10, 31, 2))


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: Name without the prefix. Not all counters end with `_total`: established names are
            kept.
        kind: Type of the metric.
        labels: Names of its labels, in order; `pipeline` comes first if present.
        help: Help text of one sentence.
        stored: Whether it is kept in the state store.
        buckets: Upper bounds of a histogram, without infinity.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    stored: bool = True
    buckets: tuple[float, ...] = ()


FAMILIES: dict[str, Family] = {}
"""All families by name."""


def _family(kind: Kind, name: str, labels: str, text: str, **options: object) -> Family:
    family = Family(name, kind, tuple(labels.split()), text, **options)  # type: ignore[arg-type]
    FAMILIES[name] = family
    return family


def _counter(name: str, labels: str, text: str, *, stored: bool = True) -> Family:
    return _family("counter", name, labels, text, stored=stored)


def _gauge(name: str, labels: str, text: str, *, stored: bool = False) -> Family:
    return _family("gauge", name, labels, text, stored=stored)


def _seconds(name: str, labels: str, text: str, *, stored: bool = True) -> Family:
    return _family("histogram", name, labels, text, stored=stored, buckets=SECONDS)


# Pipelines

PIPELINES = _gauge("pipelines_total", "", "Pipelines of this installation.")
PIPELINE_STATUS = _gauge(
    "pipeline_status", "pipeline", "1 running, 0.5 paused, 0 stopped, -1 failed."
)
PIPELINE_PROBLEMS = _gauge(
    "pipeline_problems",
    "pipeline severity",
    "What is wrong with it now, as in `deltaforge status`.",
)
PIPELINE_INFO = _gauge("pipeline_info", "pipeline tenant", "Always 1; says whose a pipeline is.")
PIPELINE_PAUSES = _counter("pipeline_pauses_total", "pipeline", "Times somebody paused it.")
PIPELINE_RESUMES = _counter(
    "pipeline_resumes_total", "pipeline", "Times it went on after a pause or a stop."
)
PIPELINE_RUNS = _gauge("pipeline_run_active", "pipeline", "1 while a run works on it.")
RUN_FAILURES = _counter(
    "run_failures_total",
    "pipeline reason",
    "Live runs that failed, or were lost: killed or cut off.",
)
CHANNEL_DEPTH = _gauge(
    "pipeline_channel_depth",
    "pipeline",
    "Segments captured that an attached sink does not have yet; of the sink furthest behind.",
)
JOURNAL_BYTES = _gauge("journal_bytes", "pipeline", "Size of the journal's segment files.")
JOURNAL_LACKING = _gauge(
    "journal_lacking_bytes", "pipeline", "Size of those that an attached sink lacks."
)
JOURNAL_LIMIT = _gauge(
    "journal_limit_bytes", "pipeline", "`engine.journal.max_bytes`: then capture pauses."
)
HELD_EVENTS = _gauge("held_events", "pipeline", "Changes that holds keep out of the journal.")
CAPTURE_PAUSED = _gauge(
    "capture_paused", "pipeline", "1 while a full journal keeps capture from reading."
)
BUILD_INFO = _gauge("build_info", "version commit build_date", "Always 1; what is installed.")
PANICS = _counter("panics_total", "", "Defects of the program that ended a thread's work.")

# Sources

SOURCE_EVENTS = _counter(
    "source_events_total", "pipeline source table op", "Changes captured, when durable."
)
SOURCE_BYTES = _counter(
    "source_bytes_total", "pipeline source", "Size of the changes captured, as rows in memory."
)
SOURCE_RECONNECTS = _counter(
    "source_reconnects_total", "pipeline source", "Connections made again inside a run."
)
SOURCE_ERRORS = _counter(
    "source_errors_total", "pipeline source kind", "Failures to read, by kind."
)
SOURCE_LAG = _gauge(
    "source_lag_seconds",
    "pipeline source",
    "Age of the newest segment's last change when it was captured; stands still while idle.",
    stored=True,
)
SOURCE_TABLE_LAG = _gauge(
    "source_table_lag_seconds",
    "pipeline table",
    "The same for each table's last change.",
    stored=True,
)
SOURCE_RECEIVED = _gauge(
    "source_last_event_ts",
    "pipeline source",
    "When the newest segment was captured, seconds since 1970.",
    stored=True,
)
SOURCE_IDLE = _gauge("source_idle_seconds", "pipeline source", "Time since something was captured.")
SOURCE_LOG_AHEAD = _gauge(
    "source_log_ahead_bytes",
    "pipeline source",
    "Log of the source after the captured position, of whatever tables, when last measured.",
)
SOURCE_LOG_AHEAD_SECONDS = _gauge(
    "source_log_ahead_seconds",
    "pipeline source",
    "Since when, at the earliest, there has been log after the captured position; "
    "0 if there is none.",
)
SOURCE_LOG_UNCONFIRMED = _gauge(
    "source_log_unconfirmed_bytes",
    "pipeline source",
    "Log of the source after the confirmed position.",
)
SOURCE_LOG_UNCONFIRMED_SECONDS = _gauge(
    "source_log_unconfirmed_seconds", "pipeline source", "Since when there has been some."
)
SOURCE_LOG_RETAINED = _gauge(
    "source_log_retained_bytes",
    "pipeline source",
    "Log that the server retains for the pipeline; absent where it retains none for pipelines.",
)
SOURCE_LOG_LIMIT = _gauge(
    "source_log_limit_bytes",
    "pipeline source",
    "How much it retains for it at most; absent if any amount.",
)
SOURCE_LOG_ROOM = _gauge(
    "source_log_room_bytes",
    "pipeline source",
    "Log before the captured position that a server which removes log by age still has.",
)
SOURCE_LOG_SECONDS_LEFT = _gauge(
    "source_log_seconds_left",
    "pipeline source",
    "When the server discards log that is needed, at the present rate; absent if it does not.",
)
CONFIRMED_EARLY = _gauge(
    "confirmed_early",
    "pipeline",
    "1 while the source's log is confirmed up to what the journal has, before it is delivered.",
)
SOURCE_SCHEMA_HITS = _counter(
    "source_schema_cache_hits_total",
    "pipeline source",
    "Tables of segments in a form that the run had met before.",
)
SOURCE_SCHEMA_MISSES = _counter(
    "source_schema_cache_misses_total",
    "pipeline source",
    "Tables of segments in a form that the run met first.",
)
SNAPSHOT_ROWS = _counter(
    "snapshot_rows_total", "pipeline table", "Rows that snapshots put into the journal."
)

# Segments, and the whole way

BATCH_EVENTS = _family(
    "histogram", "batch_events", "pipeline", "Changes in a segment.", buckets=EVENTS
)
BATCH_BYTES = _family(
    "histogram", "batch_bytes", "pipeline", "Size of a segment's rows in memory.", buckets=BYTES
)
BYTES_TOTAL = _counter("bytes_total", "pipeline", "Size of the segment files written.")
E2E_LATENCY = _seconds(
    "e2e_latency_seconds",
    "pipeline",
    "From a segment's first change arriving here until a sink has acknowledged the segment.",
)
STAGE_LATENCY = _seconds(
    "stage_latency_seconds",
    "pipeline stage trigger",
    "Time of a stage (process, schema_sensing, sink, commit) for a segment, by why that ended.",
)

# Processors

PROCESSOR_LATENCY = _seconds(
    "processor_latency_seconds", "pipeline processor", "A processor's time for a segment."
)
PROCESSOR_ERRORS = _counter(
    "processor_errors_total", "pipeline processor", "Segments that a processor broke on."
)
PROCESSOR_IN = _counter("processor_events_in_total", "pipeline processor", "Events it was given.")
PROCESSOR_OUT = _counter("processor_events_out_total", "pipeline processor", "Events it left.")
OUTBOX_TRANSFORMED = _counter(
    "outbox_transformed_total", "pipeline processor", "Events of outboxes sent on."
)
OUTBOX_DROPPED = _counter(
    "outbox_dropped_total", "pipeline processor reason", "Events of outboxes dropped."
)
FILTER_DROPPED = _counter("filter_dropped_total", "processor", "Events that filters dropped.")

# Sinks

SINK_EVENTS = _counter(
    "sink_events_total", "pipeline sink", "Messages acknowledged, counted with the checkpoint."
)
SINK_BATCHES = _counter("sink_batch_total", "pipeline sink", "Batches acknowledged.")
SINK_BYTES = _counter("sink_bytes_total", "pipeline sink", "Size of the values acknowledged.")
SINK_LATENCY = _seconds("sink_latency_seconds", "pipeline sink", "Time of a batch's delivery.")
SINK_ERRORS = _counter("sink_errors_total", "pipeline sink", "Deliveries that failed.")
SINK_FAILURES = _counter("sink_failures_total", "pipeline sink kind", "The same, by kind.")
SINK_ROUTING_ERRORS = _counter(
    "sink_routing_errors_total",
    "pipeline sink kind",
    "Changes that could not become a message at a destination.",
)
SINK_RECONNECTS = _counter(
    "sink_reconnects_total", "pipeline sink", "Times it was opened again inside a run."
)
SINK_COMMITS = _counter("sink_txn_commits_total", "pipeline sink", "Kafka transactions committed.")
SINK_ABORTS = _counter(
    "sink_txn_aborts_total", "pipeline sink", "Kafka transactions that were not committed."
)
KAFKA_RETRIES = _counter(
    "kafka_produce_retries_total", "pipeline sink", "Requests that a producer sent again by itself."
)
KAFKA_QUEUE = _gauge(
    "kafka_producer_queue_messages",
    "pipeline sink",
    "Messages in a producer's queue, when it last said so.",
    stored=True,
)
KAFKA_QUEUE_BYTES = _gauge(
    "kafka_producer_queue_bytes", "pipeline sink", "Size of these messages.", stored=True
)
SINK_TIMEOUTS = _counter(
    "coordinator_sink_timeout_total", "pipeline sink", "Batches that missed their deadline."
)
SINK_STATUS = _gauge(
    "sink_checkpoint_status",
    "pipeline sink required",
    "1 while its last delivery succeeded and it is attached, else 0.",
)
SINK_LAG = _gauge(
    "sink_lag_seconds",
    "pipeline sink",
    "Age of the oldest change in the journal that the sink lacks; 0 when it has everything.",
)
SINK_CHECKPOINT_TS = _gauge(
    "sink_last_checkpoint_ts",
    "pipeline sink",
    "When its checkpoint last moved, seconds since 1970.",
    stored=True,
)
LAST_CHECKPOINT_TS = _gauge(
    "last_checkpoint_ts", "pipeline", "When the checkpoint of any sink last moved."
)
CHECKPOINTS = _counter("checkpoints_total", "pipeline", "Checkpoints written.")
CHECKPOINT_SUCCESS = _counter("checkpoint_success_total", "pipeline", "Checkpoints written.")
CHECKPOINT_FAILURE = _counter(
    "checkpoint_failure_total", "pipeline", "Attempts to write one that failed."
)
CHECKPOINT_LAG = _gauge(
    "checkpoint_lag_events", "pipeline sink", "Changes in the journal that a sink lacks."
)
TABLE_VERIFIED = _gauge(
    "table_verified_ts",
    "pipeline sink table",
    "When a table of a sink was last found equal to the source's, seconds since 1970.",
)

# Dead letters

DLQ_EVENTS = _counter(
    "dlq_events_total", "pipeline sink error_kind", "Changes put aside as dead letters."
)
DLQ_ENTRIES = _gauge("dlq_entries", "pipeline", "Entries in the queue now.")
DLQ_SATURATION = _gauge(
    "dlq_saturation_ratio", "pipeline", "How full the queue is, of `max_entries`."
)
DLQ_EVICTED = _counter(
    "dlq_evicted_total", "pipeline", "Entries dropped for newer ones or for age.", stored=False
)
DLQ_REJECTED = _counter(
    "dlq_rejected_total", "pipeline", "Changes lost because the queue was full.", stored=False
)
DLQ_WRITE_FAILURES = _counter(
    "dlq_write_failures_total", "pipeline", "Attempts to put changes aside that failed."
)

# Sensed schemas

SCHEMA_EVENTS = _counter("schema_events_total", "table", "Events looked at for their structure.")
SCHEMA_EVOLUTIONS = _counter(
    "schema_evolutions_total", "table", "Times a sensed structure got something new."
)
SCHEMA_CACHE_HITS = _counter(
    "schema_cache_hits_total", "table", "Events whose structure was known."
)
SCHEMA_CACHE_MISSES = _counter(
    "schema_cache_misses_total", "table", "Events whose structure had to be taken apart."
)
SENSING_CACHE_HITS = _counter(
    "schema_sensing_cache_hits_total", "table", "As schema_cache_hits_total.", stored=False
)
SENSING_CACHE_MISSES = _counter(
    "schema_sensing_cache_misses_total", "table", "As schema_cache_misses_total.", stored=False
)
SCHEMA_TABLES = _gauge("schema_tables_total", "", "Tables with a sensed structure.")
SCHEMA_MAPS = _gauge(
    "schema_dynamic_maps_total", "", "Paths of JSON whose keys were found to be data."
)
SENSING_SECONDS = _seconds(
    "schema_sensing_seconds", "table", "Time of a job of sensing for a table."
)
PIPELINE_EVOLUTIONS = _counter(
    "pipeline_evolutions_total", "pipeline", "Times that sensed structures got something new."
)
DRIFT_DETECTED = _counter(
    "schema_drift_detected", "pipeline", "Rows looked at whose values differ from their table."
)

# The API, since its process began

API_REQUESTS = _counter(
    "api_requests_total", "route method status", "Requests to the REST API.", stored=False
)
API_SECONDS = _seconds(
    "api_request_duration_seconds", "route method", "Time of a request.", stored=False
)
API_ACTIONS = _counter(
    "api_pipeline_actions_total",
    "action result tenant",
    "What the REST API was asked to do with pipelines, and whether it did.",
    stored=False,
)
