"""What a changed file changes, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.spec_changes import (
    PipelineStatus,
    SpecChange,
    spec_changes,
)
from deltaforge_dagster.pipeline.control.specs import kept_form
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.state.store import StateStore
from tests.config.conftest import GOOD, Write, write
from tests.state.make import NAME, capture, deliver, position

__all__ = ["write"]

SOURCE = "spec.source.config"
CACHE, LINES = GOOD["spec"]["sinks"]
HOOK = {"type": "webhook", "url": "https://ops.example/hooks"}
FLATTEN = {"type": "flatten", "max_depth": 2}
FILTER = {"type": "filter", "ops": ["create"]}


@pytest.fixture
def status(sqlite_store: StateStore, write: Write) -> PipelineStatus:
    """The good file's pipeline with three segments; `cache` has two of them, `lines` has one."""
    register(sqlite_store, load_pipeline(write()))
    sqlite_store.pipelines.set_start(NAME, position(0))
    lease = sqlite_store.leases.acquire(NAME, "run-1", 60)
    assert lease is not None
    capture(sqlite_store, lease, 1, 2, 3)
    deliver(sqlite_store, lease, "cache", 2)
    deliver(sqlite_store, lease, "lines", 1)
    row = sqlite_store.pipelines.get(NAME)
    assert row is not None
    return PipelineStatus(row, sqlite_store.checkpoints.read(NAME))


def found(
    write: Write,
    status: PipelineStatus,
    changes: dict[str, Any],
    before: dict[str, Any] | None = None,
) -> list[SpecChange]:
    """Return the changes from the good file, with `before` changed, to one with `changes`."""
    old, new = (kept_form(load_pipeline(write(one)).spec) for one in (before or {}, changes))
    return spec_changes(old, new, status)


def without(sink: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Return a sink with another configuration in part."""
    return {**sink, "config": {**sink["config"], **config}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"{SOURCE}.dsn": "postgres://u:x@elsewhere/app"}, ("changed", "spec.source.config.dsn", "only where that is safe")),
        ({f"{SOURCE}.id": "other"}, ("changed", "spec.source.config.id", "have other ids")),
        ({f"{SOURCE}.slot": "other"}, ("changed", "spec.source.config.slot", "must hold everything after the captured position")),
        ({f"{SOURCE}.publication": "other"}, ("changed", "spec.source.config.publication", "is made when missing")),
        ({f"{SOURCE}.tables": ["public.orders", "public.items"]}, ("changed", "spec.source.config.tables", "changes of public.items are captured from now on")),
        ({f"{SOURCE}.tables": ["public.items"]}, ("changed", "spec.source.config.tables", "public.orders: captured from now on only if another pattern matches")),
        ({f"{SOURCE}.snapshot": {"mode": "never"}}, ("changed", "spec.source.config.snapshot", "decides when tables are read")),
        ({f"{SOURCE}.start_position": "latest"}, ("changed", "spec.source.config.start_position", "has no effect any more")),
        ({"spec.engine.values.toast": "omit"}, ("changed", "spec.engine.values.toast", "keep the old form")),
        ({"spec.engine.range.max_seconds": 5}, ("changed", "spec.engine.range.max_seconds", "applies from the next run")),
        ({"spec.engine.run.idle_seconds": 5}, ("changed", "spec.engine.run.idle_seconds", "an active run notices the changed file and ends")),
        ({"spec.engine.dagster.sensor_interval_seconds": 60}, ("changed", "spec.engine.dagster.sensor_interval_seconds", "applies when Dagster has reloaded the file")),
        ({"spec.engine.dagster.freshness.warn_seconds": 5}, ("changed", "spec.engine.dagster.freshness.warn_seconds", "applies from the sensor's next check of the sinks")),
        ({"spec.engine.alerts": [HOOK]}, ("changed", "spec.engine.alerts", "if no pipeline had a hook before, it applies when Dagster has reloaded")),
        ({"metadata.labels": {"team": "shop"}}, ("changed", "metadata.labels.team", "is displayed only; in Dagster it applies")),
        ({"metadata.tenant": "other"}, ("changed", "metadata.tenant", "idempotency keys")),
        ({"spec.commit_policy": {"mode": "all"}}, ("changed", "spec.commit_policy.mode", "which part of its log the source may discard")),
        ({"spec.processors": [FLATTEN]}, ("added", "spec.processors[flatten]", "go through the new chain")),
        ({"spec.sinks.0.config.stream": "other"}, ("changed", "spec.sinks[cache].config.stream", "delivered messages stay where they are")),
        ({"spec.sinks.1.config.envelope": "debezium"}, ("changed", "spec.sinks[lines].config.envelope.type", "sends delivered ranges again")),
        ({"spec.sinks.1.config.key": "${key.id}"}, ("changed", "spec.sinks[lines].config.key", "order per key")),
        ({"spec.sinks.0.config.required": False}, ("changed", "spec.sinks[cache].config.required", "which part of its log the source may discard")),
        ({"spec.sinks.0.config.exactly_once": True}, ("changed", "spec.sinks[cache].config.exactly_once", "begins at the checkpoint")),
        ({"spec.sinks": [LINES]}, ("removed", "spec.sinks[cache]", "its checkpoint is dropped")),
        ({"spec.sinks": [CACHE, LINES, without(LINES, id="more")]}, ("added", "spec.sinks[more]", "begins with segment 2, the checkpoint of sink lines")),
        ({"spec.sinks": [CACHE, LINES, without(LINES, id="more", start="tail")]}, ("added", "spec.sinks[more]", "captured after it was added")),
        ({"spec.sinks": [CACHE, LINES, without(LINES, id="more", start="journal")]}, ("added", "spec.sinks[more]", "oldest segment of the journal")),
        ({"spec.sinks": [CACHE, without(LINES, id="rows")]}, ("renamed", "spec.sinks[rows]", "the checkpoint of lines is dropped, rows begins with segment 2")),
        ({"spec.sinks.0": without(LINES, id="cache", path="/tmp/other")}, ("changed", "spec.sinks[cache].type", "another kind of server")),
    ],
)  # fmt: skip
def test_each_change_has_its_consequence(
    write: Write,
    status: PipelineStatus,
    changes: dict[str, Any],
    expected: tuple[str, str, str],
) -> None:
    """One difference is one change: where, what kind of, and what it means for the data."""
    (change,) = found(write, status, changes)

    kind, path, consequence = expected
    assert (change.kind, change.path) == (kind, path)
    assert consequence in change.consequence


@pytest.mark.parametrize(
    ("changes", "field", "consequence"),
    [
        ({"type": "json"}, "type", "later messages have the new form"),
        (
            {"schema_registry_url": "http://s"},
            "schema_registry_url",
            "have the ids of that registry",
        ),
        (
            {"subject_strategy": "record_name"},
            "subject_strategy",
            "registered under the new subjects",
        ),
        ({"enum_mode": "enum"}, "enum_mode", "later messages have the new form"),
        ({"username": "u", "password": "p"}, "username", "applies from the next run"),
    ],
)
def test_changes_of_an_encoding(
    write: Write, status: PipelineStatus, changes: dict[str, Any], field: str, consequence: str
) -> None:
    """Each field of `encoding` has its own consequence."""
    avro = {"type": "avro", "schema_registry_url": "http://r"}
    new = changes if "type" in changes else {**avro, **changes}
    place = "spec.sinks.0.config.encoding"

    made = {one.path: one.consequence for one in found(write, status, {place: new}, {place: avro})}

    assert consequence in made[f"spec.sinks[cache].config.encoding.{field}"]


def test_changes_of_a_login(write: Write, status: PipelineStatus) -> None:
    """Certificates and OAuth at a schema registry change no message: all of them apply from the next run."""
    avro = {"type": "avro", "schema_registry_url": "https://r"}
    login = {
        "certificate_file": "/c.pem",
        "key_file": "/k.pem",
        "oauth_token_url": "https://i/token",
        "oauth_client_id": "df",
        "oauth_client_secret": "s",
        "oauth_scope": "r",
        "oauth_logical_cluster": "lsrc-1",
        "oauth_identity_pool": "pool-1",
    }
    place = "spec.sinks.0.config.encoding"

    made = found(write, status, {place: avro | login}, {place: avro})

    consequences = {one.path.rpartition(".")[2]: one.consequence for one in made}
    assert consequences.keys() == login.keys()
    assert all("applies from the next run" in one for one in consequences.values())


@pytest.mark.parametrize(
    ("options", "consequence"),
    [
        ({"mode": "history"}, "needs a resync"),
        ({"soft_deletes": True}, "needs a resync"),
        ({"keys": {"public.orders": ["id"]}}, "needs a resync"),
        ({"table": "raw.${source.table}"}, "tables that are new there need a resync"),
        ({"path": "/other"}, "tables that are new there need a resync"),
        ({"types": {"public.orders": {"a": "text"}}}, "lets a held table go on"),
        ({"partition_by": {"public.orders": ["day"]}}, "created from now on"),
        ({"skipped_operations": "d"}, "what the tables have stays as it is"),
        ({"commit_seconds": 5.0}, "applies from the next run"),
    ],
)
def test_changes_of_a_lake(
    write: Write, status: PipelineStatus, options: dict[str, Any], consequence: str
) -> None:
    """What existing tables cannot follow needs a resync; the rest says from when it applies."""
    lake = {"type": "delta", "config": {"id": "lake", "path": "/lake"}}
    before, after = ({"spec.sinks.1": one} for one in (lake, without(lake, **options)))

    (change,) = found(write, status, after, before)

    assert consequence in change.consequence


def test_chains_are_compared_by_id(write: Write, status: PipelineStatus) -> None:
    """A processor that changed, one that is gone, and another order are named."""
    before = {"spec.processors": [FLATTEN, FILTER]}
    changed = {"spec.processors": [{"type": "flatten", "max_depth": 3}]}
    swapped = {"spec.processors": [FILTER, FLATTEN]}

    assert [(one.path, one.kind) for one in found(write, status, changed, before)] == [
        ("spec.processors[flatten].max_depth", "changed"),
        ("spec.processors[filter]", "removed"),
    ]
    (order,) = found(write, status, swapped, before)
    assert (order.path, order.after) == ("spec.processors", ["filter", "flatten"])


def test_a_script_changes_and_nobody_reads_it(write: Write, status: PipelineStatus) -> None:
    """Scripts may hold what the environment gave them: a change shows by hashes."""
    script = {
        "type": "javascript",
        "id": "s",
        "inline": "function processBatch(e) { /* geheim */ }",
    }
    other = {**script, "inline": "function processBatch(e) { return e; /* geheim */ }"}

    (change,) = found(write, status, {"spec.processors": [other]}, {"spec.processors": [script]})

    assert change.path == "spec.processors[s].inline"
    assert "geheim" not in str(change)


def test_nothing_changes_by_itself(write: Write, status: PipelineStatus) -> None:
    """The order of sinks, and what nobody reads, is no change."""
    same = {"spec.sinks": [LINES, CACHE], "apiVersion": "deltaforge/v1"}

    assert found(write, status, same) == []
