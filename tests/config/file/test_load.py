from pathlib import Path
from typing import Any

import pytest
import yaml

from deltaforge_dagster.config.file.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_pipeline,
    load_pipelines,
    load_processors,
)
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sinks.file.sink_type import FileSinkConfig
from deltaforge_dagster.sinks.kafka.sink_type import KafkaSinkConfig
from deltaforge_dagster.sinks.nats.sink_type import NatsSinkConfig
from deltaforge_dagster.sinks.redis.sink_type import RedisSinkConfig
from deltaforge_dagster.sinks.registry import SinkContext, sink_types
from deltaforge_dagster.sources.mysql.source_type import MysqlSourceConfig
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from tests.config.conftest import Write

SOURCE = "spec.source.config"
SINK = "spec.sinks.0.config"


def problems(path: Path) -> list[str]:
    """Return the problems of a file, without the file's name."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(path)
    assert "geheim" not in str(caught.value)
    assert caught.value.__context__ is None
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def warnings(path: Path) -> list[str]:
    """Return the warnings of a good file, without the file's name."""
    return [warning.removeprefix(f"{path}:") for warning in load_pipeline(path).warnings]


def test_a_good_file_is_its_fields(write: Write) -> None:
    """Everything in the file ends up in the models, and everything else has its default."""
    loaded = load_pipeline(write())

    spec = loaded.spec.spec
    assert loaded.name == "orders"
    assert loaded.warnings == ()
    assert isinstance(spec.source.config, PostgresSourceConfig)
    assert spec.source.config.dsn.get_secret_value() == "postgres://u:geheim@localhost/app"
    assert spec.source.config.start_position == "earliest"
    redis, file = spec.sinks
    assert (redis.type, file.type) == ("redis", "file")
    assert isinstance(redis.config, RedisSinkConfig)
    assert (redis.config.required, redis.config.send_timeout_secs) == (True, 5.0)
    assert isinstance(file.config, FileSinkConfig)
    assert file.config.envelope.type == "native"
    assert spec.batch is None
    assert spec.engine.segment.max_events == 200_000


def test_a_mysql_source_is_its_fields(write: Write) -> None:
    """`tables` may be omitted, and snapshots may be disabled explicitly."""
    config = {"id": "db", "dsn": "mysql://u:geheim@h/d", "snapshot": {"mode": "never"}}
    source = load_pipeline(
        write({"spec.source": {"type": "mysql", "config": config}})
    ).spec.spec.source

    assert isinstance(source.config, MysqlSourceConfig)
    assert source.config.tables == ()
    assert source.config.model_dump()["dsn"] == "mysql://u:***@h/d"


KAFKA = {"id": "k", "brokers": "a:9092, b", "topic": "cdc.${source.table}"}


def test_a_kafka_sink_is_its_fields(write: Write) -> None:
    """Client properties become text, whatever their YAML type; secrets are never shown."""
    client_conf = {"sasl.password": "geheim", "ssl.key.pem": "geheim", "linger.ms": 1, "x": True}
    loaded = load_pipeline(
        write({"spec.sinks.0": {"type": "kafka", "config": {**KAFKA, "client_conf": client_conf}}})
    )

    kafka = loaded.spec.spec.sinks[0]
    assert isinstance(kafka.config, KafkaSinkConfig)
    assert (kafka.config.send_timeout_secs, kafka.config.exactly_once) == (30.0, False)
    assert kafka.config.client_conf["x"].get_secret_value() == "true"
    assert kafka.config.model_dump()["client_conf"] == {
        "sasl.password": "***",
        "ssl.key.pem": "***",
        "linger.ms": "1",
        "x": "true",
    }
    assert "geheim" not in repr(loaded) + str(loaded.spec.masked())


@pytest.mark.parametrize(
    "client_conf",
    [
        {"acks": "All"},
        {"acks": -1, "max.in.flight": 5, "retries": 1},
        {"acks": 1, "max.in.flight": 9, "retries": 0, "enable.idempotence": False},
    ],
)
def test_what_a_producer_may_be(write: Write, client_conf: dict[str, Any]) -> None:
    """The library accepts what the file's check accepts."""
    config = {**KAFKA, "client_conf": client_conf}
    loaded = load_pipeline(write({"spec.sinks.0": {"type": "kafka", "config": config}}))

    kafka = loaded.spec.spec.sinks[0].config
    assert sink_types()["kafka"].problems(kafka, SinkContext("p")) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"brokers": "a:99999"}, "spec.sinks[0].config.brokers: is not a list of Kafka brokers (write host:port,host:port; TLS and users stand under client_conf)"),
        ({"brokers": "u:geheim@a:1"}, "spec.sinks[0].config.brokers: is not a list of Kafka brokers (write host:port,host:port; TLS and users stand under client_conf)"),
        ({"topic": "cdc:${source.table}"}, "spec.sinks[0].config.topic: is not the name of a Kafka topic (only letters, digits, `.`, `_` and `-` are allowed)"),
        ({"client_conf": {"sasl.password": "${NOT_SET}"}}, "spec.sinks[0].config.client_conf.sasl.password: needs the environment variable NOT_SET, which is not set (set it for every process that loads this file)"),
        ({"client_conf": {"acks": "1"}}, "spec.sinks[0].config: client_conf.acks: must be all (leave it out; or set `enable.idempotence: false` beside it, if brokers may lose or reorder messages)"),
        ({"client_conf": {"request.required.acks": 0}, "exactly_once": True}, "spec.sinks[0].config: client_conf.request.required.acks: must be all (leave it out; the order of messages needs it)"),
        ({"client_conf": {"max.in.flight": 6}}, "spec.sinks[0].config: client_conf.max.in.flight: must be at most 5 (leave it out; or set `enable.idempotence: false` beside it, if brokers may lose or reorder messages)"),
        ({"client_conf": {"retries": 0, "enable.idempotence": "TRUE"}}, "spec.sinks[0].config: client_conf.retries: must be more than 0 (leave it out; or set `enable.idempotence: false` beside it, if brokers may lose or reorder messages)"),
        ({"client_conf": {"enable.idempotence": False}, "exactly_once": True}, "spec.sinks[0].config: client_conf.enable.idempotence: must be true with `exactly_once` (leave it out)"),
        ({"client_conf": {"acks": {}}}, "spec.sinks[0].config.client_conf.acks: must be text (put it in quotes if it looks like a number)"),
    ],
)  # fmt: skip
def test_what_kafka_cannot_be(write: Write, config: dict[str, Any], expected: str) -> None:
    """Mistakes in brokers, topic or client properties are found before anything runs."""
    path = write({"spec.sinks.0": {"type": "kafka", "config": {**KAFKA, **config}}})

    (problem,) = problems(path)
    assert problem.partition(": ")[2] == expected


NATS = {"id": "n", "url": "nats://a:4222, tls://b", "subject": "cdc.${source.table}"}


def test_a_nats_sink_is_its_fields(write: Write) -> None:
    """There is no login unless the file has one; secrets, even those in a URL, are never shown."""
    secret = {"username": "u", "password": "geheim", "token": "geheim", "stream": "CDC"}
    urls = {"url": "nats://geheim@a, tls://u:geheim@b:5222"}
    loaded = load_pipeline(write({"spec.sinks.0": {"type": "nats", "config": {**NATS, **secret}}}))
    other = load_pipeline(write({"spec.sinks.0": {"type": "nats", "config": {**NATS, **urls}}}))

    nats = loaded.spec.spec.sinks[0]
    assert isinstance(nats.config, NatsSinkConfig)
    assert (nats.config.send_timeout_secs, nats.config.batch_timeout_secs) == (5.0, 30.0)
    assert (nats.config.connect_timeout_secs, nats.config.exactly_once) == (10.0, False)
    assert nats.config.stream == "CDC"
    assert other.spec.spec.sinks[0].config.model_dump()["url"] == "nats://***@a, tls://u:***@b:5222"
    for one in (loaded, other):
        assert "geheim" not in repr(one) + str(one.spec.masked())


_NO_NATS = "is not a list of NATS addresses (write nats://host:port,nats://host:port, or tls:// for TLS, with special characters of a password percent-encoded)"
_NO_SUBJECT = "is not a NATS subject (words with dots between them, without blanks, `*` and `>`)"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"url": "http://u:geheim@a"}, f"spec.sinks[0].config.url: {_NO_NATS}"),
        ({"url": "nats://a,"}, f"spec.sinks[0].config.url: {_NO_NATS}"),
        ({"url": "nats://a/path"}, f"spec.sinks[0].config.url: {_NO_NATS}"),
        ({"url": "nats://a:x"}, f"spec.sinks[0].config.url: {_NO_NATS}"),
        ({"subject": "cdc.*"}, f"spec.sinks[0].config.subject: {_NO_SUBJECT}"),
        ({"subject": "cdc..x"}, f"spec.sinks[0].config.subject: {_NO_SUBJECT}"),
        ({"subject": "cdc x"}, f"spec.sinks[0].config.subject: {_NO_SUBJECT}"),
        ({"stream": "a.b"}, "spec.sinks[0].config.stream: is not the name of a NATS stream (no blanks, `.`, `*`, `>`, `/` or `\\`)"),
        ({"username": "u"}, "spec.sinks[0].config: needs both `username` and `password`, or neither"),
        ({"exactly_once": True}, "spec.sinks[0].config: exactly_once needs `stream`: core NATS stores nothing that could be read back"),
        ({"token": "${NOT_SET}"}, "spec.sinks[0].config.token: needs the environment variable NOT_SET, which is not set (set it for every process that loads this file)"),
    ],
)  # fmt: skip
def test_what_nats_cannot_be(write: Write, config: dict[str, Any], expected: str) -> None:
    """Invalid addresses, subjects, streams and users are found before anything runs."""
    path = write({"spec.sinks.0": {"type": "nats", "config": {**NATS, **config}}})

    (problem,) = problems(path)
    assert problem.partition(": ")[2] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dsn": "postgres://u:geheim@h/d"}, "is not a MySQL connection string"),
        ({"tables": ["a*b.c"]}, "is not a table pattern"),
        ({"outbox": {}}, "spec.source.config.outbox.tables: is required"),
        ({"outbox": {"tables": []}}, "must have at least one entry"),
        ({"outbox": {"tables": ["shop."]}}, "is not a table pattern"),
    ],
)
def test_a_mysql_source_has_its_problems(
    write: Write, config: dict[str, Any], expected: str
) -> None:
    """As with every source, each mistake has one message with its path."""
    block = {"id": "db", "dsn": "mysql://u@h/d", **config}
    (problem,) = problems(write({"spec.source": {"type": "mysql", "config": block}}))

    assert f"spec.source.config.{next(iter(config))}" in problem
    assert expected in problem
    assert "geheim" not in problem


@pytest.mark.parametrize(
    ("tables", "outboxes", "stray"),
    [
        (["shop.orders", "shop.outbox"], ["shop.outbox", "*.outbox", "outbox", "shop.%box"], None),
        (["shop.*"], ["shop.*_outbox", "shop.outbox_%", "sh*.a*b*c"], None),
        ([], ["shop.outbox"], None),
        (["shop.orders"], ["shop.outbox"], "shop.outbox"),
        (["shop.order%"], ["shop.orders", "shop.*_outbox", "shop.out%"], "shop.out%"),
        (["shop.*"], ["ship.*"], "ship.*"),
        (["shop.a_b"], ["shop.a_b", "shop.axb"], "shop.axb"),
    ],
)
def test_outboxes_are_captured(
    write: Write, tables: list[str], outboxes: list[str], stray: str | None
) -> None:
    """An outbox pattern that matches no captured table is a problem; `_` is an ordinary character."""
    config = {"id": "db", "dsn": "mysql://u@h/d", "tables": tables, "outbox": {"tables": outboxes}}
    path = write({"spec.source": {"type": "mysql", "config": config}})

    if stray is None:
        source: Any = load_pipeline(path).spec.spec.source
        assert source.config.outbox.tables == tuple(outboxes)
    else:
        (problem,) = problems(path)
        assert f"spec.source.config: outbox.tables: {stray} matches no table" in problem


def test_no_secret_is_shown(write: Write) -> None:
    """Neither the repr nor the masked form of a pipeline contains a password."""
    loaded = load_pipeline(write())

    assert "geheim" not in repr(loaded)
    assert "geheim" not in str(loaded.spec.masked())
    assert "u:***@localhost/app" in str(loaded.spec.masked())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metadata.name": None}, "1: metadata.name: is required"),
        ({"metadata.tenant": 5}, "3: metadata.tenant: must be text (put it in quotes if it looks like a number)"),
        ({"metadata.tenant": " "}, "3: metadata.tenant: is empty"),
        ({"metadata.labels": "x"}, "4: metadata.labels: must be a mapping of names to values"),
        ({"spec.source": None}, "4: spec.source: is required"),
        ({"spec.source.type": "oracle"}, "5: spec.source: has an unknown type; it must be 'postgres' or 'mysql' or 'turso'"),
        ({"spec.source.type": None}, "5: spec.source: needs a `type`"),
        ({f"{SOURCE}.slot": "Orders"}, "10: spec.source.config.slot: must be 1 to 63 lower-case letters, digits or `_` (PostgreSQL allows no other names for replication slots)"),
        ({f"{SOURCE}.publication": "ü" * 32}, "11: spec.source.config.publication: is longer than 63 bytes, the longest name that PostgreSQL has"),
        ({f"{SOURCE}.tables": None}, "7: spec.source.config.tables: is required"),
        ({f"{SOURCE}.tables": "public.orders"}, "12: spec.source.config.tables: must be a list"),
        ({f"{SOURCE}.tables": ["a", ""]}, "14: spec.source.config.tables[1]: is empty"),
        ({f"{SOURCE}.tables": ["public.a*b"]}, "13: spec.source.config.tables[0]: is not a table pattern (write schema.table, where a part may end in `*` or `%` for any rest, and has no other wildcard)"),
        ({f"{SOURCE}.tables": [".orders"]}, "13: spec.source.config.tables[0]: is not a table pattern (write schema.table, where a part may end in `*` or `%` for any rest, and has no other wildcard)"),
        ({f"{SOURCE}.dsn": "mysql://u:geheim@h/d"}, "9: spec.source.config.dsn: is not a PostgreSQL connection string (write postgres://user:password@host:port/database, with special characters of the password percent-encoded, or host=... user=... password=...)"),
        ({f"{SOURCE}.dsn": "${NOT_SET_DSN}"}, "9: spec.source.config.dsn: needs the environment variable NOT_SET_DSN, which is not set (set it for every process that loads this file)"),
        ({f"{SOURCE}.slot": "a_${source.table}"}, "10: spec.source.config.slot: holds ${source.table}, but this field is not a template (write it out)"),
        ({f"{SOURCE}.start_position": "newest"}, '14: spec.source.config.start_position: must be earliest, latest or {lsn: "X/Y"} with hexadecimal X and Y'),
        ({f"{SOURCE}.start_position": {"lsn": "zz"}}, '14: spec.source.config.start_position: must be earliest, latest or {lsn: "X/Y"} with hexadecimal X and Y'),
        ({"spec.sinks": []}, "14: spec.sinks: must have at least one entry"),
        ({"spec.sinks": None}, "4: spec.sinks: is required"),
        ({"spec.sinks.0.type": "pulsar"}, "15: spec.sinks[0]: has an unknown type; it must be 'redis' or 'kafka' or 'nats' or 'http' or 'file' or 'delta' or 'iceberg' or 'postgres' or 's3' or 'clickhouse'"),
        ({"spec.sinks.0.type": None}, "15: spec.sinks[0]: needs a `type`"),
        ({"spec.sinks.0": "redis"}, "15: spec.sinks[0]: must be a block of fields"),
        ({f"{SINK}.uri": None}, "16: spec.sinks[0].config.uri: is required"),
        ({f"{SINK}.uri": "http://u:geheim@h"}, "18: spec.sinks[0].config.uri: is not a Redis address (write redis://user:password@host:port/database, or rediss:// for TLS, unix://, redis+sentinel:// or redis+cluster://, with special characters of the password percent-encoded)"),
        ({f"{SINK}.uri": "redis://:geheim@h:port"}, "18: spec.sinks[0].config.uri: is not a Redis address (write redis://user:password@host:port/database, or rediss:// for TLS, unix://, redis+sentinel:// or redis+cluster://, with special characters of the password percent-encoded)"),
        ({f"{SINK}.stream": "a${}"}, "19: spec.sinks[0].config.stream: empty variable '${}' at position 1 in template: a${}"),
        ({f"{SINK}.stream": "${source.tabel}"}, "19: spec.sinks[0].config.stream: names ${source.tabel}, which is neither a field of events nor an environment variable that is set"),
        ({f"{SINK}.key": "${NOT_SET}"}, "20: spec.sinks[0].config.key: names ${NOT_SET}, which is neither a field of events nor an environment variable that is set"),
        ({f"{SINK}.key": ""}, "20: spec.sinks[0].config.key: is empty"),
        ({f"{SINK}.id": "a/b"}, "17: spec.sinks[0].config.id: must be 1 to 100 letters, digits, `-`, `_` or `.`, and start with a letter or digit (it becomes part of asset keys and file names)"),
        ({f"{SINK}.required": "yes"}, "20: spec.sinks[0].config.required: must be true or false"),
        ({f"{SINK}.send_timeout_secs": 0}, "20: spec.sinks[0].config.send_timeout_secs: must be more than 0"),
        ({f"{SINK}.send_timeout_secs": float("inf")}, "20: spec.sinks[0].config.send_timeout_secs: must be a finite number"),
        ({f"{SINK}.send_timeout_secs": "x"}, "20: spec.sinks[0].config.send_timeout_secs: must be a number"),
        ({f"{SINK}.envelope": "flat"}, "20: spec.sinks[0].config.envelope: has an unknown type; it must be 'native' or 'debezium' or 'cloudevents'"),
        ({f"{SINK}.envelope": "cloudevents"}, "20: spec.sinks[0].config.envelope.type_prefix: is required"),
        ({f"{SINK}.envelope": {"type": "cloudevents", "type_prefix": ""}}, "22: spec.sinks[0].config.envelope.type_prefix: is empty"),
        ({f"{SINK}.skipped_operations": ["c", "x"]}, "20: spec.sinks[0].config.skipped_operations: knows c, u, d, r and t, or create, update, delete, read and truncate (`none` for no operation)"),
        ({f"{SINK}.key_updates": "split"}, "20: spec.sinks[0].config.key_updates: must be 'update' or 'delete_insert'"),
        ({f"{SINK}.id": "lines"}, "22: spec.sinks[1].config.id: lines is also the id of spec.sinks[0] (ids must be unique)"),
        ({"spec.processors": [{"type": "filter", "id": "a"}, {"type": "flatten", "id": "a"}]}, "28: spec.processors[1].id: a is also the id of spec.processors[0] (ids must be unique)"),
        ({"spec.processors": [{"type": "regexp"}]}, "25: spec.processors[0].type: is regexp, which no installed package provides; known are javascript, flatten, outbox, filter, sql, python"),
        ({"spec.processors": [{"type": "outbox"}]}, "25: spec.processors[0]: nothing is captured from an outbox (set spec.source.config.outbox: `tables` of MySQL, `prefixes` of PostgreSQL)"),
        ({"spec.processors": [{"type": "filter", "fields": [{"path": "a", "op": "regex", "value": "("}]}]}, "27: spec.processors[0].fields[0]: is not a regular expression: missing ), unterminated subpattern at position 0"),
        ({"spec.commit_policy": {"mode": "most"}}, "25: spec.commit_policy.mode: must be 'required', 'all' or 'quorum'"),
        ({"spec.commit_policy": {"mode": "quorum"}}, "24: spec.commit_policy: mode quorum needs `quorum`, the number of sinks that must have it"),
        ({"spec.engine": {"dlq": {"hold_key": True}}}, "4: spec: engine.dlq.hold_key holds changes back behind dead letters, so it needs journal.enabled: true"),
        ({"spec.journal": {"enabled": True, "dlq": {"overflow_policy": "drop"}}}, "27: spec.journal.dlq.overflow_policy: must be 'drop_oldest', 'reject' or 'block'"),
        ({"spec.commit_policy": {"mode": "quorum", "quorum": 3}}, "26: spec.commit_policy.quorum: is 3, but there are only 2 sinks"),
        ({"spec.commit_policy": {"mode": "quorum", "quorum": 0}}, "26: spec.commit_policy.quorum: must be more than 0"),
        ({"spec.sink_batch_deadline_secs": 0}, "24: spec.sink_batch_deadline_secs: must be more than 0"),
        ({f"{SINK}.start": "begin"}, "20: spec.sinks[0].config.start: must be 'tail', 'journal' or 'snapshot'"),
        ({"spec.engine.checkpoint": {"store": "mongo"}}, "26: spec.engine.checkpoint.store: must be state: a checkpoint is written in the transaction that compares the run's lease, so it is where the lease is, in the state store, which DELTAFORGE_STATE_URL names (a SQLite file, PostgreSQL or memory)"),
        ({"spec.engine.checkpoint": {"after": 0}}, "26: spec.engine.checkpoint.after: must be more than 0"),
        ({"spec.engine.checkpoint": {"instance_id": "a b"}}, "26: spec.engine.checkpoint.instance_id: must be 1 to 100 letters, digits, `-`, `_` or `.`, and start with a letter or digit (it becomes part of asset keys and file names)"),
        ({"spec.engine.checkpoint": {"seed": "accelerator"}}, "26: spec.engine.checkpoint.seed.type: must be 'none', 'chaser' or 'position'"),
        ({"spec.engine.checkpoint": {"seed": "chaser"}}, "26: spec.engine.checkpoint.seed: type chaser needs `path`, a copy of a file of 8 bytes, and nothing else"),
        ({"spec.engine.checkpoint": {"seed": {"type": "position", "path": "a", "position": {"lsn": "0/1"}}}}, "26: spec.engine.checkpoint.seed: type position needs `position`, or `path`, a file that holds one"),
        ({"spec.engine.checkpoint": {"seed": {"path": "a"}}}, "26: spec.engine.checkpoint.seed: type none reads nothing: leave path and position out"),
        ({"spec.engine.checkpoint": {"seed": {"type": "position", "position": {"lsn": 5}}}}, '28: spec.engine.checkpoint.seed.position: is not a position (write {lsn: "0/16B6C50"}, or {file: mysql-bin.000003, pos: 4}, perhaps with gtid_set)'),
        ({"spec.engine.checkpoint": {"seed": {"type": "position", "position": {"file": "b.1", "pos": 4}}}}, "4: spec: engine.checkpoint.seed.position: is the position of another kind of source"),
        ({"spec.batch": {"max_events": 1.5}}, "25: spec.batch.max_events: must be a whole number"),
        ({"spec.engine.run.renew_seconds": 20}, "25: spec.engine.run: renew_seconds must be at most half of lease_seconds (one late renewal would lose the lease)"),
        ({"spec.engine.run.max_seconds": 86401}, "26: spec.engine.run.max_seconds: must be at most 86400"),
        ({"spec.engine.segment.min_ms": 2000}, "25: spec.engine.segment: min_ms must not be above max_ms"),
        ({"spec.engine.segment.min_ms": -1}, "26: spec.engine.segment.min_ms: must be at least 0"),
        ({"spec.engine.deliver.backoff_initial_seconds": 61}, "25: spec.engine.deliver: backoff_initial_seconds must not be above backoff_max_seconds"),
        ({"spec.engine.dagster.schedule": "* *"}, "26: spec.engine.dagster.schedule: has 2 fields, a schedule has five (minute hour day month weekday)"),
        ({"spec.engine.dagster.group": "a-b"}, "26: spec.engine.dagster.group: must be letters, digits and `_` (Dagster allows no other groups)"),
    ],
)  # fmt: skip
def test_each_problem_has_its_sentence(
    write: Write, changes: dict[str, Any], expected: str
) -> None:
    """One mistake gives one problem: line, path, what is wrong, and what to do."""
    assert problems(write(changes)) == [expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spec.schema_sensing": {"enabled": True, "output": {"emit_events": True}}}, "27: spec.schema_sensing.output.emit_events: events of changed schemas are not supported yet (set emit_events: false)"),
    ],
)  # fmt: skip
def test_what_this_version_lacks_is_a_problem(
    write: Write, changes: dict[str, Any], expected: str
) -> None:
    """A feature of the original that would change what is delivered is never ignored silently."""
    assert problems(write(changes)) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"apiVersion": "deltaforge/v1", "kind": "Pipeline"},
        {"spec.sharding": {"mode": "hash"}, "spec.connection_policy": {}},
        {"spec.processors": []},
        {"spec.processors": [{"type": "flatten"}, {"type": "filter", "ops": ["create"]}]},
        {
            f"{SOURCE}.outbox": {"prefixes": ["outbox", "orders_%"]},
            "spec.processors": [{"type": "outbox", "topic": "${of.the.row}"}],
        },
        {"spec.schema_sensing": {"enabled": False, "tables": {"include": ["a"]}}},
        {"spec.schema_sensing": {"enabled": True, "tables": {"exclude": ["a%"]}}},
        {"spec.journal": {"max_event_bytes": 5}},
        {
            "spec.journal": {"enabled": True, "dlq": {"overflow_policy": "reject"}},
            "spec.engine.dlq": {"hold_key": True},
        },
        {f"{SOURCE}.snapshot": {"mode": "never"}, f"{SOURCE}.on_schema_drift": "adapt"},
        {f"{SOURCE}.snapshot": {"mode": "always", "chunk_size": 5, "intra_table_parallel": True}},
        {f"{SINK}.envelope": {"type": "native"}, f"{SINK}.encoding": {"type": "json"}},
        {f"{SINK}.envelope": "native", f"{SINK}.encoding": "json", f"{SINK}.filter": {}},
        {f"{SINK}.envelope": "debezium"},
        {f"{SINK}.filter": {"exclude_synthetic": True}, f"{SINK}.key": "${key.id}"},
        {f"{SINK}.skipped_operations": "u, delete"},
        {f"{SINK}.skipped_operations": "none"},
        {f"{SINK}.key_updates": "delete_insert"},
        {f"{SINK}.envelope": {"type": "cloudevents", "type_prefix": "com.example.shop"}},
        {f"{SOURCE}.start_position": {"lsn": "0/16B6C50"}},
        {f"{SOURCE}.start_position": "latest", f"{SOURCE}.tables": []},
        {"spec.commit_policy": {"mode": "quorum", "quorum": 2}},
        {f"{SINK}.uri": "unix:///tmp/redis.sock"},
        {f"{SINK}.uri": "redis+sentinel://u:geheim@one:26379,two/main/0"},
        {f"{SOURCE}.tables": ["public.orders", "shop.*", "shop.order_%", "*.orders", "a", "*"]},
        {"spec.engine.dagster": {"schedule": "*/5 * * * *", "group": "cdc"}},
    ],
)
def test_accepted_variants_give_no_warning(write: Write, changes: dict[str, Any]) -> None:
    """Settings without consequences, and settings that only ask for what happens anyway, cause no warning."""
    assert warnings(write(changes)) == []


def test_unknown_fields_warn_by_name(write: Write) -> None:
    """An unknown field is ignored with a warning, which suggests a similar field."""
    path = write(
        {
            f"{SOURCE}.start_positon": "latest",
            "spec.sinks.1.config.colour": "red",
            "spec.engine.ranges": {"max_seconds": 5},
        }
    )

    assert warnings(path) == [
        (
            "14: spec.source.config.start_positon: is not a known field, it is ignored "
            "(did you mean start_position?)"
        ),
        "25: spec.sinks[1].config.colour: is not a known field, it is ignored",
        "27: spec.engine.ranges: is not a known field, it is ignored (did you mean range?)",
    ]


def test_the_only_sink_can_be_wrong(write: Write) -> None:
    """A list whose only entry is invalid is not also reported as empty."""
    path = write({"spec.sinks": [{"type": "file", "config": {"id": "lines"}}]})

    assert problems(path) == ["16: spec.sinks[0].config.path: is required"]


def test_an_unset_variable_is_mentioned_once(write: Write) -> None:
    """A variable that a problem names causes no warning; a variable that nothing else mentions does."""
    path = write({f"{SOURCE}.dsn": "${NOT_SET_DSN}"})
    path.write_text(path.read_text() + "# ${NOT_SET_EITHER}\n")

    (broken,) = load_pipelines(path)

    assert isinstance(broken, BrokenPipeline)
    assert len(broken.error.problems) == 1
    assert broken.warnings == (
        f"{path}:24: ${{NOT_SET_EITHER}} stays as it is: no environment variable NOT_SET_EITHER is set",
    )


def test_fields_without_effect_warn(write: Write) -> None:
    """A field without effect is not ignored silently."""
    path = write({"spec.batch": {"max_inflight": 2}})

    assert warnings(path) == [
        "25: spec.batch.max_inflight: has no effect (the next messages are always encoded meanwhile)"
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {f"{SINK}.filter": {"exclude_synthetic": True, "synthetic_only": True}},
            "spec.sinks[0].config.filter: exclude_synthetic and synthetic_only together let nothing pass (remove one of them)",
        ),
        (
            {f"{SINK}.filter": {"exclude_synthetic": True, "producers": ["js"]}},
            "spec.sinks[0].config.filter: exclude_synthetic and producers together let nothing pass (remove one of them)",
        ),
        (
            {f"{SINK}.key": "${source.table}-${after.id}"},
            "spec.sinks[0].config.key: ${after.id} is empty text in a delete (use ${key.id} for a column of the primary key)",
        ),
        (
            {f"{SOURCE}.snapshot": {"chunk_size": 5}},
            "spec.source.config.snapshot: has no `mode`, so that tables are read only on request (write mode: initial to have them read once, or mode: never)",
        ),
    ],
)
def test_what_is_allowed_and_not_meant_warns(
    write: Write, changes: dict[str, Any], expected: str
) -> None:
    """The file loads and does what it says, with a warning."""
    (warning,) = warnings(write(changes))

    assert warning.partition(": ")[2] == expected


def test_an_instance_has_a_name_of_its_own(write: Write) -> None:
    """Everything that is named after the pipeline is named after the instance."""
    loaded = load_pipeline(write({"spec.engine.checkpoint": {"instance_id": "b"}}))

    assert (loaded.name, loaded.spec.metadata.name) == ("orders.b", "orders.b")
    assert (
        load_pipeline(write({"spec.engine.checkpoint": {"instance_id": "default"}})).name
        == "orders"
    )


def test_a_change_waits_no_longer_than_a_batch(write: Write) -> None:
    """`batch.max_ms` lowers the waiting time of a segment, and never raises it."""
    for asked, expected in ((0, 0), (10, 10), (1000, 40)):
        spec = load_pipeline(write({"spec.batch": {"max_ms": asked}})).spec.spec
        assert (spec.segment_limits.min_ms, spec.segment_limits.max_ms) == (expected, 1000)


def test_unknown_fields_do_not_change_the_pipeline(write: Write) -> None:
    """A file with an unknown field is the same pipeline as the file without it."""
    assert load_pipeline(write()).spec == load_pipeline(write({"spec.colour": "red"})).spec


def test_missing_ids_are_derived(write: Write) -> None:
    """Source and sinks get an id from the pipeline's name and their type, with a warning."""
    path = write({f"{SOURCE}.id": None, f"{SINK}.id": None, "spec.sinks.1.config.id": None})

    spec = load_pipeline(path).spec.spec

    assert spec.source.config.id == "orders"
    assert [sink.config.id for sink in spec.sinks] == ["redis-0", "file-1"]
    assert warnings(path) == [
        "7: spec.source.config.id: is missing, orders is used (give one)",
        "15: spec.sinks[0].config.id: is missing, redis-0 is used (give one)",
        "19: spec.sinks[1].config.id: is missing, file-1 is used (give one)",
    ]


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["filter"], ["filter"]),
        (["filter", "flatten"], ["filter", "flatten"]),
        (["outbox", "outbox", "outbox"], ["outbox", "outbox-2", "outbox-3"]),
        (["filter", "outbox", "filter"], ["filter", "outbox", "filter-2"]),
        (["javascript", "javascript"], ["javascript-0", "javascript-1"]),
        (["filter", ("filter", "filter-2"), "filter"], ["filter", "filter-2", "filter-3"]),
        (["filter", ("flatten", "filter")], ["filter-2", "filter"]),
        ([("filter", "javascript-1"), "javascript"], ["javascript-1", "javascript-1-2"]),
    ],
)  # fmt: skip
def test_processors_without_ids_never_collide(
    write: Write, given: list[str | tuple[str, str]], ids: list[str]
) -> None:
    """The first processor of a type keeps the usual id, others get a number, and given ids are avoided."""
    blocks: list[dict[str, Any]] = []
    for one in given:
        kind, name = (one, None) if isinstance(one, str) else one
        inline = {"inline": "event => event"} if kind == "javascript" else {}
        blocks.append({"type": kind, **inline} | ({} if name is None else {"id": name}))
    path = write({f"{SOURCE}.outbox": {"prefixes": ["outbox"]}, "spec.processors": blocks})

    loaded = load_pipeline(path)
    alone = path.with_name("processors.yaml")
    alone.write_text(yaml.safe_dump({"processors": blocks}))

    assert [one.id for one in loaded.spec.spec.processors] == ids
    assert [one.id for one in load_processors(alone)] == ids
    unusual = [
        one
        for one, block in zip(ids, blocks, strict=True)
        if "id" not in block and one != block["type"]
    ]
    assert [warning.split(" is missing, ")[1].split()[0] for warning in loaded.warnings] == unusual


def test_sinks_without_ids_never_collide(write: Write) -> None:
    """A sink's derived id avoids an id that the file gives to another sink."""
    path = write({f"{SINK}.id": "file-1", "spec.sinks.1.config.id": None})

    assert [one.config.id for one in load_pipeline(path).spec.spec.sinks] == ["file-1", "file-1-2"]


def test_ignored_keys_of_a_connection_string_warn(write: Write) -> None:
    """The warning names the key that PostgreSQL does not know, but not its value."""
    path = write({f"{SOURCE}.dsn": "host=h pasword=geheim"})

    (warning,) = warnings(path)

    assert "pasword" in warning
    assert "geheim" not in warning


def test_all_problems_at_once(write: Write) -> None:
    """Problems of YAML, unsupported features, models and rules are reported together."""
    path = write(
        {
            "metadata.tenant": None,
            "spec.schema_sensing": {"enabled": True, "output": {"emit_events": True}},
            f"{SOURCE}.slot": "S",
            f"{SINK}.id": "lines",
            "spec.sinks.1.config.path": "${",
        }
    )
    path.write_text(path.read_text() + "kind: a\nkind: b\n")

    assert [problem.split(": ")[1] for problem in problems(path)] == [
        "kind",
        "spec.schema_sensing.output.emit_events",
        "metadata.tenant",
        "spec.source.config.slot",
        "spec.sinks[1].config.path",
        "spec.sinks[1].config.id",
    ]


@pytest.mark.parametrize("text", ["", "- a", "just text", "# only a comment"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    """An empty file, a list or a single word is not a pipeline."""
    path = tmp_path / "a.yaml"
    path.write_text(text)

    assert problems(path) == ["1: must be a mapping with `metadata` and `spec`"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and a file that is not text have their own messages."""
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff")

    with pytest.raises(SpecError, match=r"missing.yaml: cannot be read: No such file"):
        load_pipeline(missing)
    with pytest.raises(SpecError, match=r"binary.yaml: is not UTF-8 text \(byte 3\)"):
        load_pipeline(binary)


def test_environment_variables_are_filled_in(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are expanded in every field; routing templates stay."""
    monkeypatch.setenv("PG_PASSWORD", "geheim2")
    path = write(
        {
            f"{SOURCE}.dsn": "postgres://u:${PG_PASSWORD}@${PG_HOST:-db1}/app",
            f"{SINK}.stream": "cdc.${source.table}",
        }
    )

    loaded = load_pipeline(path)

    redis = loaded.spec.spec.sinks[0]
    source = loaded.spec.spec.source
    assert isinstance(source.config, PostgresSourceConfig)
    assert source.config.dsn.get_secret_value() == "postgres://u:geheim2@db1/app"
    assert isinstance(redis.config, RedisSinkConfig)
    assert redis.config.stream == "cdc.${source.table}"
    assert loaded.warnings == ()


def test_hash_is_of_what_the_file_does(write: Write) -> None:
    """Comments, order, explicit defaults and passwords do not change the hash; everything else does."""
    one = load_pipeline(write()).hash
    same = {
        "kind": "Pipeline",
        "spec.commit_policy": {"mode": "required"},
        f"{SOURCE}.dsn": "postgres://u:other@localhost/app",
    }

    assert load_pipeline(write(same)).hash == one
    assert load_pipeline(write({f"{SOURCE}.dsn": "postgres://u:geheim@db2/app"})).hash != one
    assert load_pipeline(write({"spec.sinks.1.config.required": False})).hash != one


def test_a_directory_is_read_whole(write: Write, tmp_path: Path) -> None:
    """Every *.yaml and *.yml file below the directory is a pipeline, except hidden files and folders."""
    for file in ("b.yml", "team/a.yaml", ".c.yaml", "..data/d.yaml", "e.txt"):
        name = Path(file).stem.strip(".")
        write({"metadata.name": name}, file=file)

    loaded = load_pipelines(tmp_path)

    assert [pipeline.name for pipeline in loaded] == ["b", "a"]


def test_one_bad_file_never_stops_the_others(write: Write, tmp_path: Path) -> None:
    """Broken files are returned as such, under their own names if these can be read."""
    write({"metadata.name": "good"}, file="a.yaml")
    write({"metadata.name": "bad", f"{SOURCE}.slot": None}, file="b.yaml")
    (tmp_path / "c.yaml").write_text("a: [")
    write({"metadata.name": "no/name"}, file="good.yaml")

    good, bad, unreadable, unnamed = load_pipelines(tmp_path)

    assert isinstance(good, LoadedPipeline)
    assert isinstance(bad, BrokenPipeline)
    assert (good.name, bad.name, unreadable.name, unnamed.name) == ("good", "bad", "c", "good-2")
    assert bad.error.problems == (f"{bad.path}:7: spec.source.config.slot: is required",)


def test_one_name_in_two_files_breaks_both(write: Write, tmp_path: Path) -> None:
    """Two files with the same name are both broken; the others load."""
    paths = [write(file=file) for file in ("a.yaml", "b.yaml")]
    write({"metadata.name": "other"}, file="c.yaml")

    broken, other = load_pipelines(tmp_path)

    assert isinstance(other, LoadedPipeline)
    assert isinstance(broken, BrokenPipeline)
    assert (broken.name, broken.path) == ("orders", paths[0])
    assert broken.error.problems == (
        (
            f"{paths[0]}:2: metadata.name: the name orders is also used by {paths[1]} "
            "(names must be unique)"
        ),
        (
            f"{paths[1]}:2: metadata.name: the name orders is also used by {paths[0]} "
            "(names must be unique)"
        ),
    )


def test_nothing_to_load(tmp_path: Path) -> None:
    """An empty directory is an installation without pipelines; a missing directory is an error."""
    assert load_pipelines(tmp_path) == []
    with pytest.raises(SpecError, match="missing: does not exist"):
        load_pipelines(tmp_path / "missing")
