"""The kinds of sources: who may name them, what loading them costs, and what an unusable one says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deltaforge_dagster
from deltaforge_dagster.config.file.load import BrokenPipeline, load_document
from deltaforge_dagster.config.sources import SourceConfig
from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources import registry
from deltaforge_dagster.sources.mysql.source_type import MYSQL
from deltaforge_dagster.sources.registry import identify_position
from tests.config.conftest import GOOD
from tests.entry_points import pretend

ROOT = Path(deltaforge_dagster.__file__).parent
KINDS = tuple(registry.source_types())

NOT_SOURCES = {
    "config/model.py",
    "config/postgres_dsn.py",
    "installation/process.py",
    "sinks/registry.py",
}
"""Modules with the word `postgres` for a role of servers, a state store of DeltaForge, an account of Linux, and a kind of sink."""


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
    folders = {ROOT / "sources" / kind for kind in KINDS}
    names = {*KINDS, *(kind.connector for kind in registry.source_types().values())}
    named = []
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if folders & set(path.parents) or path == Path(registry.__file__):
            continue
        # Our own databases, those of state store and Dagster, and those of sinks are no sources.
        own = place in NOT_SOURCES or place.startswith(("state/", "resources/", "sinks/postgres/"))
        for node in ast.walk(ast.parse(path.read_text())):
            imported = node.module if isinstance(node, ast.ImportFrom) else ""
            parts = (imported or "").split(".")
            if parts[:2] == ["deltaforge_dagster", "sources"] and set(parts[2:]) & set(KINDS):
                named.append(f"{place}: {imported}")
            if isinstance(node, ast.Constant) and node.value in names and not own:
                named.append(f"{place}: {node.value}")

    assert named == []


def test_the_kinds_are_light() -> None:
    """What loads a pipeline file loads every kind, but no client library, no kernels and no Arrow."""
    heavy = ["numba", "pyarrow", "psycopg", "pymysql", "turso", "httpx", "dagster", "pyspark"]
    program = (
        "import json, sys, deltaforge_dagster.config.file.load; "
        f"print(json.dumps([one for one in {heavy} if one in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_tick_needs_no_compiler(kind: str) -> None:
    """A code server builds each source to ask it for its head, but never imports Numba."""
    program = (
        f"import sys, deltaforge_dagster.sources.{kind}.source; sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:JSONL", "package acme 1.0 cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("deltaforge_dagster.sources.registry:SourceType", "package acme 1.0 cannot be loaded: TypeError: deltaforge_dagster.sources.registry:SourceType is no SourceType"),
        ("deltaforge_dagster.sources.mysql.source_type:MYSQL", "package acme 1.0 cannot be loaded: ValueError: deltaforge_dagster.sources.mysql.source_type:MYSQL is named 'mysql', and its entry point 'jsonl'"),
    ],
)  # fmt: skip
def test_a_kind_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    """A file that uses it is broken and names the package; all other kinds and files go on."""
    install(monkeypatch, ("acme", "jsonl", value))
    document: Any = json.loads(json.dumps(GOOD))
    fine = load_document("fine", document)
    document["spec"]["source"] = {"type": "jsonl", "config": {"id": "a", "path": "x"}}

    broken = load_document("broken", document)

    assert not isinstance(fine, BrokenPipeline)
    assert isinstance(broken, BrokenPipeline)
    assert broken.error.problems == (f"spec.source.type: is jsonl: {said}",)
    assert tuple(registry.source_types()) == KINDS


def test_a_kind_declares_what_every_source_has() -> None:
    """Without these fields the rest of the product could not ask for tables and snapshots."""
    kind: Any = SimpleNamespace(config=SourceConfig)

    with pytest.raises(TypeError, match="does not declare tables, on_schema_drift, snapshot"):
        registry._check(kind)


def test_two_packages_with_one_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither of two packages is used for a name that both have; ours are never replaced."""
    ours = "deltaforge_dagster.sources.mysql.source_type:MYSQL"
    install(monkeypatch, ("b", "jsonl", ours), ("a", "jsonl", ours), ("acme", "mysql", "acme:X"))

    assert registry.broken_source_types() == {
        "jsonl": "package a 1.0 and package b 1.0 both provide it (uninstall one)"
    }
    assert registry.source_types()["mysql"] is MYSQL
    assert "package acme 1.0: source type mysql is not used" in caplog.text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"lsn": "0/16B6C50", "tx_id": 731}', "postgres"),
        ('{"file": "mysql-bin.000003", "pos": 4, "gtid_set": null}', "mysql"),
        ('{"file": "mysql-bin.000003", "pos": 4, "lsn": "0/1"}', "mysql"),
        ('{"mode": "native", "last_change_id": 57, "table_positions": {}}', "turso"),
    ],
)
def test_a_stored_position_finds_its_kind(text: str, kind: str) -> None:
    """Stored positions name no kind, and every one is of exactly one."""
    assert identify_position(text)[0].name == kind


@pytest.mark.parametrize("text", ["", "5", "[]", '"mode"', "{}", '{"line": 7}', '{"lsn": 7}'])
def test_what_is_no_position(text: str) -> None:
    """It is refused, whatever its form."""
    with pytest.raises(CorruptLog, match="not a position"):
        identify_position(text)
