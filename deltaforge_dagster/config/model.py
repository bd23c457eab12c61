"""The pipeline file as frozen values: every field that this version reads, with its default.

The models mirror the file: `PipelineSpec` is the document, `PipelineSpec.spec.source.config.slot` is
`spec.source.config.slot`. They hold what one block can check by itself; `load` checks what spans
blocks, derives missing ids, and turns unknown fields into warnings. Fields of our own live under
`spec.engine`. Numbers named `seconds` or `secs` are seconds, `ms` milliseconds, `bytes` bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.cron import cron_problem
from deltaforge_dagster.config.dsn import mysql_dsn, postgres_dsn
from deltaforge_dagster.config.env import unresolved
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.templates import compile_template, unknown_variable
from deltaforge_dagster.errors import CorruptLog, SpecError
from deltaforge_dagster.positions import parse_lsn

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of pipelines and sinks: they become asset keys, file names and keys in sinks."""

# `schema.table` or `table`; the first dot divides, and only a part's end may be a wildcard.
_TABLE_PATTERN = re.compile(r"(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^*%]+[*%]?|[*%]) )?", re.VERBOSE)


# Properties of librdkafka whose values are secrets ("CONFIGURATION.md" of its sources), and those of
# Java clients that people copy.
_SECRET_PROPERTY = re.compile(
    r"password|passphrase|secret|token|key\.pem|jaas|oauthbearer\.config", re.IGNORECASE
)

_BROKER = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@,\[\]]+)(?::(?P<port>\d{1,9}))?"
)


def _resolved(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return _environment_filled(text)


def _environment_filled(text: str) -> str:
    name = unresolved(text)
    if name is None:
        return text
    if "." in name:
        raise ValueError(f"holds ${{{name}}}, but this field is not a template (write it out)")
    raise ValueError(
        f"needs the environment variable {name}, which is not set (set it for every process that "
        "loads this file)"
    )


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(
            "must be 1 to 100 letters, digits, `-`, `_` or `.`, and start with a letter or digit "
            "(it becomes part of asset keys and file names)"
        )
    return text


def _slot(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,63}", text):
        raise ValueError(
            "must be 1 to 63 lower-case letters, digits or `_` (PostgreSQL allows no other "
            "names for replication slots)"
        )
    return text


def _publication(text: str) -> str:
    if len(text.encode()) > 63:
        raise ValueError("is longer than 63 bytes, the longest name that PostgreSQL has")
    return text


def _table_pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write schema.table, where a part may end in `*` or `%` for "
            "any rest, and has no other wildcard)"
        )
    return text


def _template(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    try:
        unknown = unknown_variable(compile_template(text))
    except SpecError as error:
        raise ValueError(str(error)) from error
    if unknown is not None:
        raise ValueError(
            f"names ${{{unknown}}}, which is neither a field of events nor an environment variable "
            "that is set"
        )
    return text


def _brokers(text: str) -> str:
    for broker in text.split(","):
        match = _BROKER.fullmatch(broker.strip())
        if match is None or int(match["port"] or 1) not in range(1, 65_536):
            raise ValueError(
                "is not a list of Kafka brokers (write host:port,host:port; TLS and users stand "
                "under client_conf)"
            )
    return text


def _topic(text: str) -> str:
    for part in compile_template(text).parts:
        if isinstance(part, str) and not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            raise ValueError(
                "is not the name of a Kafka topic (only letters, digits, `.`, `_` and `-` are "
                "allowed)"
            )
    return text


def _client_value(value: object) -> object:
    """Accept numbers and flags for the text that the client library wants."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return _environment_filled(value) if isinstance(value, str) else value


def _bare_type(value: object) -> object:
    """Accept `envelope: native` for `envelope: {type: native}`."""
    return {"type": value} if isinstance(value, str) else value


def _start_position(value: object) -> object:
    if value in ("earliest", "latest") or isinstance(value, StartLsn):
        return value
    try:
        if isinstance(value, dict) and set(value) == {"lsn"} and isinstance(value["lsn"], str):
            parse_lsn(value["lsn"])
            return value
    except CorruptLog:
        pass
    raise ValueError('must be earliest, latest or {lsn: "X/Y"} with hexadecimal X and Y')


Text = Annotated[str, AfterValidator(_resolved)]
Name = Annotated[str, AfterValidator(_resolved), AfterValidator(_name)]
TemplateText = Annotated[str, AfterValidator(_template)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


class _Block(BaseModel):
    """One block of the file. Unknown fields are errors here; `load` makes them warnings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, validate_default=False
    )


class Metadata(_Block):
    """Who a pipeline is."""

    name: Name
    tenant: Text
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


class StartLsn(_Block):
    """A start position given as an LSN."""

    lsn: str


class PostgresConfig(_Block):
    """How to read a PostgreSQL database."""

    id: Text
    dsn: SecretStr
    slot: Annotated[Text, AfterValidator(_slot)]
    publication: Annotated[Text, AfterValidator(_publication)]
    tables: tuple[Annotated[Text, AfterValidator(_table_pattern)], ...]
    start_position: Annotated[
        Literal["earliest", "latest"] | StartLsn, BeforeValidator(_start_position)
    ] = "earliest"
    on_schema_drift: Literal["adapt", "halt"] = "adapt"

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: SecretStr) -> SecretStr:
        text = _resolved(dsn.get_secret_value())
        try:
            return SecretStr(postgres_dsn(text)[0])
        except SpecError as error:
            raise ValueError(str(error)) from None

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())


class PostgresSource(_Block):
    """A PostgreSQL source: logical replication through pgoutput."""

    type: Literal["postgres"]
    config: PostgresConfig


class MysqlConfig(_Block):
    """How to read a MySQL server."""

    id: Text
    dsn: SecretStr
    tables: tuple[Annotated[Text, AfterValidator(_table_pattern)], ...] = ()
    on_schema_drift: Literal["adapt", "halt"] = "adapt"

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: SecretStr) -> SecretStr:
        try:
            mysql_dsn(_resolved(dsn.get_secret_value()))
        except SpecError as error:
            raise ValueError(str(error)) from None
        return dsn

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())


class MysqlSource(_Block):
    """A MySQL source: the binary log, read as a replica reads it."""

    type: Literal["mysql"]
    config: MysqlConfig


class Envelope(_Block):
    """The shape of a message; `native` is the event itself."""

    type: Literal["native"] = "native"


class Encoding(_Block):
    """How a message becomes bytes."""

    type: Literal["json"] = "json"


class SinkConfig(_Block):
    """What every sink has."""

    id: Name
    required: bool = True
    key: TemplateText | None = None
    envelope: Annotated[Envelope, BeforeValidator(_bare_type)] = Envelope()
    encoding: Annotated[Encoding, BeforeValidator(_bare_type)] = Encoding()


class RedisConfig(SinkConfig):
    """How to write to Redis streams."""

    uri: SecretStr
    stream: TemplateText
    send_timeout_secs: Seconds = 5.0
    batch_timeout_secs: Seconds = 30.0
    connect_timeout_secs: Seconds = 10.0
    exactly_once: bool = False

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: SecretStr) -> SecretStr:
        text = _resolved(uri.get_secret_value())
        try:
            parts = urlsplit(text)
            valid = parts.scheme in {"unix", "redis+sentinel", "rediss+sentinel"} or (
                parts.scheme in {"redis", "rediss"} and bool(parts.hostname) and parts.port != 0
            )
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(
                "is not a Redis address (write redis://user:password@host:port/database, or "
                "rediss:// for TLS, unix:// or redis+sentinel://, with special characters of the "
                "password percent-encoded)"
            )
        return uri

    @field_serializer("uri")
    def _mask_uri(self, uri: SecretStr) -> str:
        return mask(uri.get_secret_value())


class RedisSink(_Block):
    """A Redis sink: each message is an entry of a stream."""

    type: Literal["redis"]
    config: RedisConfig


class KafkaConfig(SinkConfig):
    """How to write to Kafka topics."""

    brokers: Annotated[Text, AfterValidator(_brokers)]
    topic: Annotated[TemplateText, AfterValidator(_topic)]
    exactly_once: bool = False
    send_timeout_secs: Seconds = 30.0
    client_conf: Mapping[str, Annotated[SecretStr, BeforeValidator(_client_value)]] = {}

    @field_serializer("client_conf")
    def _mask_client_conf(self, conf: Mapping[str, SecretStr]) -> dict[str, str]:
        return {
            name: "***" if _SECRET_PROPERTY.search(name) else mask(value.get_secret_value())
            for name, value in conf.items()
        }


class KafkaSink(_Block):
    """A Kafka sink: each message is a record of a topic."""

    type: Literal["kafka"]
    config: KafkaConfig


class FileConfig(SinkConfig):
    """How to write to files: one message per line."""

    path: TemplateText


class FileSink(_Block):
    """A file sink, for local use: JSON lines."""

    type: Literal["file"]
    config: FileConfig


Source = Annotated[PostgresSource | MysqlSource, Field(discriminator="type")]
Sink = Annotated[RedisSink | KafkaSink | FileSink, Field(discriminator="type")]


class Batch(_Block):
    """Upper limits of one acknowledgement inside a segment; each only when the file gives it."""

    max_events: Count | None = None
    max_bytes: Count | None = None
    max_ms: Count | None = None
    respect_source_tx: bool = True
    max_inflight: Count | None = None


class CommitPolicy(_Block):
    """Which sinks the source must wait for before it may forget."""

    mode: Literal["required", "all", "quorum"] = "required"
    quorum: Count | None = None

    @model_validator(mode="after")
    def _check_quorum(self) -> CommitPolicy:
        if self.mode == "quorum" and self.quorum is None:
            raise ValueError("mode quorum needs `quorum`, the number of sinks that must have it")
        return self


class RunLimits(_Block):
    """How long a run lives, and how it holds its lease."""

    max_seconds: Seconds = 900.0
    idle_seconds: Seconds = 30.0
    lease_seconds: Seconds = 30.0
    renew_seconds: Seconds = 5.0

    @model_validator(mode="after")
    def _check_renewal(self) -> RunLimits:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise ValueError(
                "renew_seconds must be at most half of lease_seconds (one late renewal would "
                "lose the lease)"
            )
        return self


class RangeLimits(_Block):
    """Where a range closes: at the first limit it reaches."""

    max_seconds: Seconds = 60.0
    max_events: Count = 2_000_000
    max_bytes: Count = GIB


class SegmentLimits(_Block):
    """Where a segment ends: between `min_ms` and `max_ms`, earlier when it is large."""

    min_ms: Annotated[int, Field(ge=0)] = 50
    max_events: Count = 200_000
    max_bytes: Count = 64 * MIB
    max_ms: Count = 1000

    @model_validator(mode="after")
    def _check_times(self) -> SegmentLimits:
        if self.min_ms > self.max_ms:
            raise ValueError("min_ms must not be above max_ms")
        return self


class DeliverLimits(_Block):
    """How a deliverer catches up, and how it waits after a failure."""

    max_bytes: Count = 32 * MIB
    backoff_initial_seconds: Seconds = 1.0
    backoff_max_seconds: Seconds = 60.0

    @model_validator(mode="after")
    def _check_backoff(self) -> DeliverLimits:
        if self.backoff_initial_seconds > self.backoff_max_seconds:
            raise ValueError("backoff_initial_seconds must not be above backoff_max_seconds")
        return self


class JournalLimits(_Block):
    """How large the journal may get, how long it is kept, and when the source may forget."""

    max_bytes: Count = 10 * GIB
    confirm: Literal["delivered", "captured"] = "delivered"
    retention_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 24.0


class DagsterOptions(_Block):
    """How the pipeline shows and starts in Dagster."""

    schedule: str | None = None
    sensor_interval_seconds: Annotated[int, Field(gt=0)] = 5
    group: str | None = None

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, schedule: str | None) -> str | None:
        problem = cron_problem(schedule) if schedule is not None else None
        if problem:
            raise ValueError(problem)
        return schedule

    @field_validator("group")
    @classmethod
    def _check_group(cls, group: str | None) -> str | None:
        if group is not None and not re.fullmatch(r"[A-Za-z0-9_]+", group):
            raise ValueError("must be letters, digits and `_` (Dagster allows no other groups)")
        return group


class ValueOptions(_Block):
    """How values look in events, where there is a choice (docs/types.md)."""

    toast: Literal["unchanged", "omit", "reselect"] = "unchanged"
    mysql_enum: Literal["label", "index"] = "label"
    mysql_set: Literal["labels", "bits"] = "labels"
    mysql_timestamp: Literal["iso", "micros"] = "iso"
    mysql_binary: Literal["base64", "text"] = "base64"


class PostgresOptions(_Block):
    """How a PostgreSQL server is used, where there is a choice."""

    failover_slot: bool = False
    heartbeat_seconds: Seconds | None = None


class Engine(_Block):
    """Fields of our own: everything that the original does not have."""

    run: RunLimits = RunLimits()
    range: RangeLimits = RangeLimits()
    segment: SegmentLimits = SegmentLimits()
    deliver: DeliverLimits = DeliverLimits()
    journal: JournalLimits = JournalLimits()
    dagster: DagsterOptions = DagsterOptions()
    values: ValueOptions = ValueOptions()
    postgres: PostgresOptions = PostgresOptions()


class Spec(_Block):
    """What a pipeline does: one source, its sinks, and the rules between them."""

    source: Source
    sinks: Annotated[tuple[Sink, ...], Field(min_length=1)]
    batch: Batch | None = None
    commit_policy: CommitPolicy = CommitPolicy()
    engine: Engine = Engine()


class PipelineSpec(_Block):
    """A pipeline file."""

    metadata: Metadata
    spec: Spec

    def masked(self) -> dict[str, Any]:
        """Return the effective spec, defaults included, as plain JSON values without passwords."""
        return self.model_dump(mode="json")
