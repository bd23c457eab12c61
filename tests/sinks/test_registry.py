"""The kinds of sinks: who may name them, what loading them costs, and what an unusable one says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deltaforge_dagster
from deltaforge_dagster.config.file.load import BrokenPipeline, load_document
from deltaforge_dagster.config.sinks import SinkConfig
from deltaforge_dagster.sinks import registry
from deltaforge_dagster.sinks.kafka.sink_type import KAFKA
from deltaforge_dagster.sinks.lake.config import DeltaSinkConfig
from tests.config.conftest import GOOD
from tests.entry_points import pretend

ROOT = Path(deltaforge_dagster.__file__).parent
KINDS = tuple(registry.sink_types())
OTHERS = {"file", "http", "postgres", "s3"}
"""Names of kinds that are also words for something else: schemes of URLs, and a kind of source."""


class Neither(registry.SinkType[SinkConfig]):
    """A kind that is neither of the two sorts."""

    name = "csv"
    config = SinkConfig

    def problems(self, config: SinkConfig, context: registry.SinkContext) -> list[str]:
        """Return nothing."""
        return []


class Mixed(registry.MessageSinkType[Any]):
    """A kind of messages whose options are those of tables."""

    name = "csv"
    config = DeltaSinkConfig

    def build(self, config: Any, context: registry.SinkContext) -> Any:
        """Return nothing."""


NEITHER, MIXED = Neither(), Mixed()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget afterwards what a test has let the registry find."""
    yield
    registry._kinds.cache_clear()


def install(patch: pytest.MonkeyPatch, *entries: tuple[str, str, str]) -> None:
    """Pretend that packages are installed: package, name of the entry point, and its value."""
    pretend(patch, registry.GROUP, *entries)
    registry._kinds.cache_clear()


def test_only_its_own_folder_names_a_kind() -> None:
    """No module imports from a kind's folder but those in it, and none compares with a kind's name."""
    modules = (type(kind).__module__ for kind in registry.sink_types().values())
    folders = {ROOT.joinpath(*module.split(".")[1:-1]) for module in modules}
    named = []
    for path in ROOT.rglob("*.py"):
        if path.parent in folders or path == Path(registry.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            imported = node.module if isinstance(node, ast.ImportFrom) else ""
            parts = (imported or "").split(".")
            if parts[:2] == ["deltaforge_dagster", "sinks"] and set(parts[2:]) & {
                *KINDS,
                "sink_type",
            }:
                named.append(f"{path.relative_to(ROOT)}: {imported}")
            if isinstance(node, ast.Constant) and node.value in set(KINDS) - OTHERS:
                named.append(f"{path.relative_to(ROOT)}: {node.value}")

    assert named == []


def test_the_kinds_are_light() -> None:
    """What loads a pipeline file loads every kind, but no client library, no kernels and no Arrow."""
    heavy = ["numba", "pyarrow", "confluent_kafka", "redis", "dagster", "pyspark"]
    program = (
        "import json, sys, deltaforge_dagster.config.file.load; "
        f"print(json.dumps([one for one in {heavy} if one in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("tests.sinks.test_registry:NEITHER", "package acme 1.0 cannot be loaded: TypeError: Neither is neither a MessageSinkType, a DatabaseSinkType, a LakeSinkType nor an ObjectSinkType"),
        ("tests.sinks.test_registry:MIXED", "package acme 1.0 cannot be loaded: TypeError: DeltaSinkConfig is no MessageSinkConfig"),
        ("no_such_module:CSV", "package acme 1.0 cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("deltaforge_dagster.sinks.registry:SinkType", "package acme 1.0 cannot be loaded: TypeError: deltaforge_dagster.sinks.registry:SinkType is no SinkType"),
        ("deltaforge_dagster.sinks.kafka.sink_type:KAFKA", "package acme 1.0 cannot be loaded: ValueError: deltaforge_dagster.sinks.kafka.sink_type:KAFKA is named 'kafka', and its entry point 'csv'"),
    ],
)  # fmt: skip
def test_a_kind_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    """A file that uses it is broken and names the package; all other kinds and files go on."""
    install(monkeypatch, ("acme", "csv", value))
    document: Any = json.loads(json.dumps(GOOD))
    fine = load_document("fine", document)
    document["spec"]["sinks"][0] = {"type": "csv", "config": {"id": "a", "path": "x"}}

    broken = load_document("broken", document)

    assert not isinstance(fine, BrokenPipeline)
    assert isinstance(broken, BrokenPipeline)
    assert broken.error.problems == (f"spec.sinks[0].type: is csv: {said}",)
    assert tuple(registry.sink_types()) == KINDS


def test_two_packages_with_one_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither of two packages is used for a name that both have; ours are never replaced."""
    ours = "deltaforge_dagster.sinks.kafka.sink_type:KAFKA"
    install(monkeypatch, ("b", "csv", ours), ("a", "csv", ours), ("acme", "kafka", "acme:KAFKA"))

    assert registry.broken_sink_types() == {
        "csv": "package a 1.0 and package b 1.0 both provide it (uninstall one)"
    }
    assert registry.sink_types()["kafka"] is KAFKA
    assert "package acme 1.0: sink type kafka is not used" in caplog.text
