"""Blocks of the original that this version does not support, or does not read: rejected or ignored, but checked all the same."""

from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SpecError
from tests.config.conftest import Write

NO_STORE = (
    "are not supported: a checkpoint is written in the transaction that compares the run's lease"
)
SENSING = "spec.schema_sensing"


def problems(write: Write, changes: dict[str, Any]) -> list[str]:
    """Return the problems of a changed file, without file and line."""
    path = write(changes)
    with pytest.raises(SpecError) as caught:
        load_pipeline(path)
    assert "geheim" not in str(caught.value)
    return [one.removeprefix(f"{path}:").partition(": ")[2] for one in caught.value.problems]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"enabled": "yes"}, "enabled: must be true or false"),
        ({"deep_inspect": {"max_depth": 0}}, "deep_inspect.max_depth: must be more than 0"),
        ({"sampling": {"warmup_events": -1}}, "sampling.warmup_events: must be at least 0"),
        ({"high_cardinality": {"hll_precision": 17}}, "high_cardinality.hll_precision: must be at most 16"),
        ({"high_cardinality": {"stable_threshold": 2}}, "high_cardinality.stable_threshold: must be at most 1"),
        ({"tracking": {"null_rates": 1}}, "tracking.null_rates: must be true or false"),
        ({"output": {"json_schema_format": "draft-04"}}, "output.json_schema_format: must be 'draft-07' or 'draft-2020-12'"),
        ({"tables": {"include": "a"}}, "tables.include: must be a list"),
    ],
)  # fmt: skip
def test_sensing_is_checked(write: Write, block: dict[str, Any], expected: str) -> None:
    """A disabled block must be valid, too."""
    assert problems(write, {SENSING: block}) == [f"{SENSING}.{expected}"]


def test_sensing_as_in_the_samples(write: Write) -> None:
    """Every field of the original is known, even those that only occur in its samples."""
    block = {
        "enabled": False,
        "tables": {"include": ["shop%"], "exclude": ["audit"]},
        "deep_inspect": {"enabled": True, "max_depth": 5, "max_sample_size": 0, "columns": {}},
        "sampling": {
            "warmup_events": 100,
            "sample_rate": 0,
            "structure_cache": True,
            "structure_cache_size": 100,
        },
        "high_cardinality": {
            "enabled": True,
            "min_events": 100,
            "stable_threshold": 0.5,
            "min_dynamic_fields": 5,
            "confidence_threshold": 0.7,
            "reevaluate_interval": 0,
            "hll_precision": 12,
            "heavy_hitter_capacity": 50,
            "sample_size": 50,
        },
        "tracking": {
            "field_statistics": True,
            "null_rates": True,
            "enum_detection": True,
            "enum_max_cardinality": 50,
            "detect_drift": True,
            "drift_threshold": 0.1,
        },
        "output": {
            "expose_api": True,
            "emit_events": False,
            "export_json_schema": True,
            "emit_schemas": True,
            "json_schema_format": "draft-07",
        },
    }

    loaded = load_pipeline(write({SENSING: block}))

    assert loaded.warnings == ()
    assert loaded.hash == load_pipeline(write()).hash


def test_sensing_without_effect_warns(write: Write) -> None:
    """A field of an enabled block that has no effect causes a warning with its line; other fields do not."""
    fields = {
        "tracking": {"detect_drift": False, "drift_threshold": 0.2, "null_rates": False},
        "output": {"emit_schemas": True, "json_schema_format": "draft-07"},
    }
    warnings = load_pipeline(write({SENSING: {"enabled": True, **fields}})).warnings
    assert [one.split(": ", 1)[1] for one in warnings] == [
        (
            f"{SENSING}.tracking.detect_drift: has no effect (drift is always detected; tables.exclude"
            " leaves tables out)"
        ),
        f"{SENSING}.tracking.drift_threshold: has no effect (every row that differs is counted)",
        f"{SENSING}.output.emit_schemas: has no effect (API, commands and Dagster show every schema)",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spec.sharding": {}}, "spec.sharding.mode: is required"),
        ({"spec.sharding": {"mode": "hash", "count": -1}}, "spec.sharding.count: must be at least 0"),
        ({"spec.connection_policy": {"limits": {"max_dedicated_per_source": "x"}}}, "spec.connection_policy.limits.max_dedicated_per_source: must be a whole number"),
        ({"storage": {"backend": "mongo"}}, "storage.backend: must be 'sqlite', 'memory' or 'postgres'"),
        ({"storage": {"backend": "postgres"}}, "storage: backend postgres needs `dsn`"),
        ({"kind": 5}, "kind: must be text (put it in quotes if it looks like a number)"),
    ],
)  # fmt: skip
def test_what_nobody_reads_is_checked(write: Write, changes: dict[str, Any], expected: str) -> None:
    """A wrong type is also a problem in a block that is not used."""
    assert problems(write, changes) == [expected]


def test_where_state_is_kept_is_not_said_here(write: Write) -> None:
    """`storage` is DeltaForge's way to name the state store; a file with it loads, with a warning."""
    path = write({"storage": {"backend": "postgres", "dsn": "postgres://u:geheim@h/d"}})

    loaded = load_pipeline(path)

    (warning,) = loaded.warnings
    assert "storage: has no effect (DELTAFORGE_STATE_URL names the state store" in warning
    assert loaded.hash == load_pipeline(write()).hash
    assert "geheim" not in repr(loaded)


def test_what_nobody_reads_changes_nothing(write: Write) -> None:
    """Files that differ only in such blocks have the same hash."""
    unread = {
        "apiVersion": "deltaforge/v1",
        "kind": "Pipeline",
        "spec.sharding": {"mode": "hash", "count": 4, "key": "id"},
        "spec.connection_policy": {"default_mode": "dedicated", "preferred_replica": "r"},
    }
    loaded = load_pipeline(write(unread))

    assert loaded.warnings == ()
    assert loaded.hash == load_pipeline(write()).hash


@pytest.mark.parametrize(
    "place", ["checkpoint", "replicator.checkpoint", "spec.checkpoint", "spec.engine.checkpoint"]
)
@pytest.mark.parametrize("store", ["file", "mongo"])
def test_stores_of_replicators_are_refused_with_the_reason(
    write: Write, place: str, store: str
) -> None:
    """A replicator's store is rejected wherever its block is; so is another store in this project's own block."""
    block = {"type": store, "path": "mongodb://u:geheim@h", "database": "replicator"}

    (problem,) = problems(write, {place: block})
    (ours,) = problems(write, {"spec.engine.checkpoint": {"store": store}})

    assert problem.startswith(f"{place}: stores of type {store} {NO_STORE}")
    assert "DELTAFORGE_STATE_URL" in problem
    assert ours.startswith("spec.engine.checkpoint.store: must be state: a checkpoint is written")


MYSQL = {"type": "mysql", "config": {"id": "db", "dsn": "mysql://u:geheim@h/d"}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpoint": {"seeder": {"type": "chaser", "path": "a"}}}, "checkpoint.seeder: is not read: write spec.engine.checkpoint.seed, with type and path"),
        ({"checkpoint": {"seeder": "chaser"}, "spec.source": MYSQL}, "checkpoint.seeder: is not supported: a chaser file holds one number, which is a position of PostgreSQL only (use type position)"),
        ({"spec.engine.checkpoint": {"seed": {"type": "chaser", "path": "a"}}, "spec.source": MYSQL}, "spec: engine.checkpoint.seed: a chaser file holds one number, which is a position of PostgreSQL only (use type position)"),
    ],
)  # fmt: skip
def test_seeds_that_nothing_reads(write: Write, changes: dict[str, Any], expected: str) -> None:
    """A chaser file is not a position of MySQL; for a replicator's own field the message names the field to use."""
    assert problems(write, changes) == [expected]


def test_a_replicator_without_store_and_seed_is_an_unknown_field(write: Write) -> None:
    """A replicator's block is a problem only if it would change where a pipeline continues."""
    (warning,) = load_pipeline(
        write({"spec.checkpoint": {"type": "none", "seeder": "none"}})
    ).warnings

    assert "spec.checkpoint: is not a known field, it is ignored" in warning


@pytest.mark.parametrize(
    ("place", "theirs", "said"),
    [
        ("spec.engine.checkpoint", "checkpointAfter", "is not a known field, it is ignored (did you mean after?)"),
        ("spec.engine.checkpoint", "instanceId", "is not a known field, it is ignored (did you mean instance_id?)"),
        ("checkpoint", "checkpointAfter", "has no effect (write spec.engine.checkpoint.after)"),
        ("replicator.checkpoint", "instanceId", "has no effect (write spec.engine.checkpoint.instance_id)"),
    ],
)  # fmt: skip
def test_fields_of_replicators_are_named(write: Write, place: str, theirs: str, said: str) -> None:
    """Each of a replicator's names leads to ours, wherever its block is."""
    warnings = load_pipeline(write({place: {theirs: "5"}})).warnings

    assert any(warning.endswith(f"{place}.{theirs}: {said}") for warning in warnings), warnings
