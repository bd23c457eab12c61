import os
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_pipeline,
    load_pipelines,
)
from deltaforge_dagster.config.model import (
    FileSink,
    KafkaSink,
    MysqlSource,
    PostgresSource,
    RedisSink,
)
from deltaforge_dagster.errors import SpecError
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
    """Everything in the file arrives in the models, and everything else has its default."""
    loaded = load_pipeline(write())

    spec = loaded.spec.spec
    assert loaded.name == "orders"
    assert loaded.warnings == ()
    assert isinstance(spec.source, PostgresSource)
    assert spec.source.config.dsn.get_secret_value() == "postgres://u:geheim@localhost/app"
    assert spec.source.config.start_position == "earliest"
    redis, file = spec.sinks
    assert isinstance(redis, RedisSink)
    assert isinstance(file, FileSink)
    assert (redis.config.required, redis.config.send_timeout_secs) == (True, 5.0)
    assert file.config.envelope.type == "native"
    assert spec.batch is None
    assert spec.engine.segment.max_events == 200_000


def test_a_mysql_source_is_its_fields(write: Write) -> None:
    """`tables` may be left out, and snapshots may be switched off in words."""
    config = {"id": "db", "dsn": "mysql://u:geheim@h/d", "snapshot": {"mode": "never"}}
    source = load_pipeline(
        write({"spec.source": {"type": "mysql", "config": config}})
    ).spec.spec.source

    assert isinstance(source, MysqlSource)
    assert source.config.tables == ()
    assert source.config.model_dump()["dsn"] == "mysql://u:***@h/d"


KAFKA = {"id": "k", "brokers": "a:9092, b", "topic": "cdc.${source.table}"}


def test_a_kafka_sink_is_its_fields(write: Write) -> None:
    """Properties of the client are text whatever YAML makes of them; secrets show nowhere."""
    client_conf = {"sasl.password": "geheim", "ssl.key.pem": "geheim", "acks": 1, "x": True}
    loaded = load_pipeline(
        write({"spec.sinks.0": {"type": "kafka", "config": {**KAFKA, "client_conf": client_conf}}})
    )

    kafka = loaded.spec.spec.sinks[0]
    assert isinstance(kafka, KafkaSink)
    assert (kafka.config.send_timeout_secs, kafka.config.exactly_once) == (30.0, False)
    assert kafka.config.client_conf["x"].get_secret_value() == "true"
    assert kafka.config.model_dump()["client_conf"] == {
        "sasl.password": "***",
        "ssl.key.pem": "***",
        "acks": "1",
        "x": "true",
    }
    assert "geheim" not in repr(loaded) + str(loaded.spec.masked())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"brokers": "a:99999"}, "spec.sinks[0].config.brokers: is not a list of Kafka brokers (write host:port,host:port; TLS and users stand under client_conf)"),
        ({"brokers": "u:geheim@a:1"}, "spec.sinks[0].config.brokers: is not a list of Kafka brokers (write host:port,host:port; TLS and users stand under client_conf)"),
        ({"topic": "cdc:${source.table}"}, "spec.sinks[0].config.topic: is not the name of a Kafka topic (only letters, digits, `.`, `_` and `-` are allowed)"),
        ({"client_conf": {"sasl.password": "${NOT_SET}"}}, "spec.sinks[0].config.client_conf.sasl.password: needs the environment variable NOT_SET, which is not set (set it for every process that loads this file)"),
        ({"client_conf": {"acks": {}}}, "spec.sinks[0].config.client_conf.acks: must be text (put it in quotes if it looks like a number)"),
    ],
)  # fmt: skip
def test_what_kafka_cannot_be(write: Write, config: dict[str, Any], expected: str) -> None:
    """A typing error in brokers, topic or the client's properties is found before anything runs."""
    path = write({"spec.sinks.0": {"type": "kafka", "config": {**KAFKA, **config}}})

    (problem,) = problems(path)
    assert problem.partition(": ")[2] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dsn": "postgres://u:geheim@h/d"}, "is not a MySQL connection string"),
        ({"tables": ["a*b.c"]}, "is not a table pattern"),
        ({"outbox": {"tables": ["shop.outbox"]}}, "outbox capture is not supported yet"),
    ],
)
def test_a_mysql_source_has_its_problems(
    write: Write, config: dict[str, Any], expected: str
) -> None:
    """As with every source: one mistake, one sentence, at its place."""
    block = {"id": "db", "dsn": "mysql://u@h/d", **config}
    (problem,) = problems(write({"spec.source": {"type": "mysql", "config": block}}))

    assert f"spec.source.config.{next(iter(config))}" in problem
    assert expected in problem
    assert "geheim" not in problem


def test_no_secret_is_shown(write: Write) -> None:
    """Neither the repr nor the masked form of a pipeline shows a password."""
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
        ({"spec.source.type": "oracle"}, "5: spec.source: has an unknown type; it must be 'postgres' or 'mysql'"),
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
        ({"spec.sinks.0.type": "pulsar"}, "15: spec.sinks[0]: has an unknown type; it must be 'redis' or 'kafka' or 'file'"),
        ({"spec.sinks.0.type": None}, "15: spec.sinks[0]: needs a `type`"),
        ({"spec.sinks.0": "redis"}, "15: spec.sinks[0]: must be a block of fields"),
        ({f"{SINK}.uri": None}, "16: spec.sinks[0].config.uri: is required"),
        ({f"{SINK}.uri": "http://u:geheim@h"}, "18: spec.sinks[0].config.uri: is not a Redis address (write redis://user:password@host:port/database, or rediss:// for TLS, unix:// or redis+sentinel://, with special characters of the password percent-encoded)"),
        ({f"{SINK}.uri": "redis://:geheim@h:port"}, "18: spec.sinks[0].config.uri: is not a Redis address (write redis://user:password@host:port/database, or rediss:// for TLS, unix:// or redis+sentinel://, with special characters of the password percent-encoded)"),
        ({f"{SINK}.stream": "a${}"}, "19: spec.sinks[0].config.stream: empty variable '${}' at position 1 in template: a${}"),
        ({f"{SINK}.stream": "${source.tabel}"}, "19: spec.sinks[0].config.stream: names ${source.tabel}, which is neither a field of events nor an environment variable that is set"),
        ({f"{SINK}.key": "${NOT_SET}"}, "20: spec.sinks[0].config.key: names ${NOT_SET}, which is neither a field of events nor an environment variable that is set"),
        ({f"{SINK}.key": ""}, "20: spec.sinks[0].config.key: is empty"),
        ({f"{SINK}.id": "a/b"}, "17: spec.sinks[0].config.id: must be 1 to 100 letters, digits, `-`, `_` or `.`, and start with a letter or digit (it becomes part of asset keys and file names)"),
        ({f"{SINK}.required": "yes"}, "20: spec.sinks[0].config.required: must be true or false"),
        ({f"{SINK}.send_timeout_secs": 0}, "20: spec.sinks[0].config.send_timeout_secs: must be more than 0"),
        ({f"{SINK}.send_timeout_secs": float("inf")}, "20: spec.sinks[0].config.send_timeout_secs: must be a finite number"),
        ({f"{SINK}.send_timeout_secs": "x"}, "20: spec.sinks[0].config.send_timeout_secs: must be a number"),
        ({f"{SINK}.envelope": "flat"}, "20: spec.sinks[0].config.envelope.type: must be 'native'"),
        ({f"{SINK}.id": "lines"}, "22: spec.sinks[1].config.id: lines is also the id of spec.sinks[0] (ids must be unique)"),
        ({"spec.commit_policy": {"mode": "most"}}, "25: spec.commit_policy.mode: must be 'required', 'all' or 'quorum'"),
        ({"spec.commit_policy": {"mode": "quorum"}}, "24: spec.commit_policy: mode quorum needs `quorum`, the number of sinks that must have it"),
        ({"spec.commit_policy": {"mode": "quorum", "quorum": 3}}, "26: spec.commit_policy.quorum: is 3, but there are only 2 sinks"),
        ({"spec.commit_policy": {"mode": "quorum", "quorum": 0}}, "26: spec.commit_policy.quorum: must be more than 0"),
        ({"spec.batch": {"max_events": 1.5}}, "25: spec.batch.max_events: must be a whole number"),
        ({"spec.engine.run.renew_seconds": 20}, "25: spec.engine.run: renew_seconds must be at most half of lease_seconds (one late renewal would lose the lease)"),
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
    """One mistake gives one problem: line, place, what is wrong, what to do."""
    assert problems(write(changes)) == [expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spec.source.type": "turso"}, "6: spec.source.type: turso sources are not supported yet (postgres and mysql are)"),
        ({"spec.processors": [{"type": "javascript"}]}, "25: spec.processors[0]: processors are not supported yet (remove it)"),
        ({"spec.processors": {}}, "24: spec.processors: must be a list"),
        ({"spec.schema_sensing": {"enabled": True}}, "24: spec.schema_sensing: schema sensing is not supported yet (set enabled: false)"),
        ({"spec.journal": {"enabled": True}}, "24: spec.journal: the dead letter journal is not supported yet (set enabled: false)"),
        ({"spec.sink_batch_deadline_secs": 5}, "24: spec.sink_batch_deadline_secs: a deadline over a sink's batches is not supported yet (use the sink's own timeouts)"),
        ({f"{SOURCE}.snapshot": {"chunk_size": 5}}, "14: spec.source.config.snapshot: snapshots are not supported yet (set mode: never)"),
        ({f"{SOURCE}.snapshot": {"mode": "initial"}}, "14: spec.source.config.snapshot: snapshots are not supported yet (set mode: never)"),
        ({f"{SOURCE}.outbox": {"prefixes": ["x"]}}, "14: spec.source.config.outbox: outbox capture is not supported yet (remove it)"),
        ({"spec.sinks.0": {"type": "nats", "config": {"url": "h"}}}, "15: spec.sinks[0].type: nats sinks are not supported yet (redis, kafka and file are)"),
        ({f"{SINK}.envelope": {"type": "debezium"}}, "20: spec.sinks[0].config.envelope: the debezium envelope is not supported yet (native is)"),
        ({f"{SINK}.envelope": "cloudevents"}, "20: spec.sinks[0].config.envelope: the cloudevents envelope is not supported yet (native is)"),
        ({f"{SINK}.encoding": {"type": "avro"}}, "20: spec.sinks[0].config.encoding: avro is not supported yet (json is)"),
        ({f"{SINK}.filter": {"synthetic_only": True}}, "20: spec.sinks[0].config.filter: sink filters are not supported yet (remove it)"),
    ],
)  # fmt: skip
def test_what_this_version_lacks_is_a_problem(
    write: Write, changes: dict[str, Any], expected: str
) -> None:
    """A feature of the original that would change what is delivered is never left out in silence."""
    assert problems(write(changes)) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"apiVersion": "deltaforge/v1", "kind": "Pipeline"},
        {"spec.sharding": {"mode": "hash"}, "spec.connection_policy": {}},
        {"spec.processors": []},
        {"spec.schema_sensing": {"enabled": False, "tables": {"include": ["a"]}}},
        {"spec.journal": {"max_event_bytes": 5}},
        {f"{SOURCE}.snapshot": {"mode": "never"}, f"{SOURCE}.on_schema_drift": "adapt"},
        {f"{SINK}.envelope": {"type": "native"}, f"{SINK}.encoding": {"type": "json"}},
        {f"{SINK}.envelope": "native", f"{SINK}.encoding": "json", f"{SINK}.filter": {}},
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
    """What means nothing, or asks only for what is done anyway, is fine."""
    assert warnings(write(changes)) == []


def test_unknown_fields_warn_by_name(write: Write) -> None:
    """A field nobody knows is ignored with a warning, with a guess what was meant."""
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
    """A list whose every entry has problems is not also called empty."""
    path = write({"spec.sinks": [{"type": "file", "config": {"id": "lines"}}]})

    assert problems(path) == ["16: spec.sinks[0].config.path: is required"]


def test_an_unset_variable_is_mentioned_once(write: Write) -> None:
    """A variable that a problem names needs no warning; one that nothing else names does."""
    path = write({f"{SOURCE}.dsn": "${NOT_SET_DSN}"})
    path.write_text(path.read_text() + "# ${NOT_SET_EITHER}\n")

    (broken,) = load_pipelines(path)

    assert isinstance(broken, BrokenPipeline)
    assert len(broken.error.problems) == 1
    assert broken.warnings == (
        f"{path}:24: ${{NOT_SET_EITHER}} stays as it is: no environment variable NOT_SET_EITHER is set",
    )


def test_fields_without_effect_warn(write: Write) -> None:
    """What a file sets and nothing reads yet is not left out in silence."""
    path = write({"spec.batch": {"max_events": 500}})

    assert warnings(path) == [
        (
            "24: spec.batch: has no effect in this version "
            "(a segment is what is acknowledged together)"
        ),
    ]


def test_unknown_fields_do_not_change_the_pipeline(write: Write) -> None:
    """A file with an unknown field is the same pipeline as without it."""
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


def test_ignored_keys_of_a_connection_string_warn(write: Write) -> None:
    """A key that PostgreSQL does not know is named; its value is not."""
    path = write({f"{SOURCE}.dsn": "host=h pasword=geheim"})

    (warning,) = warnings(path)

    assert "pasword" in warning
    assert "geheim" not in warning


def test_all_problems_at_once(write: Write) -> None:
    """A file is corrected in one go: YAML, features, models and rules report together."""
    path = write(
        {
            "metadata.tenant": None,
            "spec.processors": [{"type": "filter"}],
            f"{SOURCE}.slot": "S",
            f"{SINK}.id": "lines",
            "spec.sinks.1.config.path": "${",
        }
    )
    path.write_text(path.read_text() + "kind: a\nkind: b\n")

    assert [problem.split(": ")[1] for problem in problems(path)] == [
        "kind",
        "spec.processors[0]",
        "metadata.tenant",
        "spec.source.config.slot",
        "spec.sinks[1].config.path",
        "spec.sinks[1].config.id",
    ]


@pytest.mark.parametrize("text", ["", "- a", "just text", "# only a comment"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    """An empty file, a list or a word is no pipeline."""
    path = tmp_path / "a.yaml"
    path.write_text(text)

    assert problems(path) == ["1: must be a mapping with `metadata` and `spec`"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and one that is no text say so."""
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff")

    with pytest.raises(SpecError, match=r"missing.yaml: cannot be read: No such file"):
        load_pipeline(missing)
    with pytest.raises(SpecError, match=r"binary.yaml: is not UTF-8 text \(byte 3\)"):
        load_pipeline(binary)


def test_environment_variables_are_filled_in(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables reach every field; routing templates stay for the events."""
    monkeypatch.setenv("PG_PASSWORD", "geheim2")
    path = write(
        {
            f"{SOURCE}.dsn": "postgres://u:${PG_PASSWORD}@${PG_HOST:-db1}/app",
            f"{SINK}.stream": "cdc.${source.table}",
        }
    )

    loaded = load_pipeline(path)

    redis = loaded.spec.spec.sinks[0]
    assert loaded.spec.spec.source.config.dsn.get_secret_value() == "postgres://u:geheim2@db1/app"
    assert isinstance(redis, RedisSink)
    assert redis.config.stream == "cdc.${source.table}"
    assert loaded.warnings == ()


def test_hash_is_of_what_the_file_does(write: Write) -> None:
    """Comments, order, written defaults and passwords do not change the hash; anything else does."""
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
    """Every *.yaml and *.yml below is a pipeline; hidden files and folders are not."""
    for file in ("b.yml", "team/a.yaml", ".c.yaml", "..data/d.yaml", "e.txt"):
        name = Path(file).stem.strip(".")
        write({"metadata.name": name}, file=file)

    loaded = load_pipelines(tmp_path)

    assert [pipeline.name for pipeline in loaded] == ["b", "a"]


def test_one_bad_file_never_stops_the_others(write: Write, tmp_path: Path) -> None:
    """Broken files come back as such, under their own name where it can be read."""
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
    """Neither of two files with one name may run; the others do."""
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
    """An empty directory is an installation without pipelines; a missing one is a mistake."""
    assert load_pipelines(tmp_path) == []
    with pytest.raises(SpecError, match="missing: does not exist"):
        load_pipelines(tmp_path / "missing")


def test_examples_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example is right, once its environment variables are set."""
    for name in ("DEMO_POSTGRES_DSN", "ORDERS_POSTGRES_DSN"):
        monkeypatch.setenv(name, "postgres://localhost/app")
    for name in ("DEMO_REDIS_URI", "ORDERS_REDIS_URI"):
        monkeypatch.setenv(name, "redis://localhost")
    for name in ("ORDERS_KAFKA_BROKERS", "SHOP_KAFKA_BROKERS"):
        monkeypatch.setenv(name, "localhost:9092")
    monkeypatch.setenv("SHOP_MYSQL_DSN", "mysql://deltaforge@localhost/shop")
    monkeypatch.setenv("DEMO_FILES", "/tmp/files")
    examples = Path(os.path.relpath(Path(__file__).parents[2] / "examples"))

    for pipeline in load_pipelines(examples):
        assert isinstance(pipeline, LoadedPipeline), pipeline
        assert pipeline.warnings == ()
