"""Pipelines of files and of the state store, together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline, load_document
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.control.catalog import installed, kept, reread
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.state.store import StateStore

FILE = """\
metadata: {name: filed, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""


def document(name: str, **more: Any) -> dict[str, Any]:
    """Return a document; `more` goes into its metadata."""
    source = {
        "type": "postgres",
        "config": {
            "id": "db",
            "dsn": "postgres://u@localhost/d",
            "slot": "s",
            "publication": "p",
            "tables": ["t"],
        },
    }
    sink = {"type": "redis", "config": {"id": "redis", "uri": "redis://localhost", "stream": "s"}}
    return {
        "metadata": {"name": name, "tenant": "acme", **more},
        "spec": {"source": source, "sinks": [sink]},
    }


def keep(store: StateStore, name: str, value: dict[str, Any]) -> None:
    """Keep a document in the store."""
    assert store.pipelines.add_document(name, orjson.dumps(value).decode())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An installation with one file."""
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "filed.yaml").write_text(FILE)
    return replace(Settings.from_env(), pipelines=folder)


def test_both_are_installed(sqlite_store: StateStore, settings: Settings) -> None:
    """A document does what the same file does; a broken one stands beside the others."""
    keep(sqlite_store, "kept", document("kept"))
    keep(sqlite_store, "bad", document("bad", tenant=""))
    filed, bad, stored = installed(settings, sqlite_store)
    assert isinstance(filed, LoadedPipeline)
    assert isinstance(stored, LoadedPipeline)
    assert (filed.name, stored.name, stored.path) == ("filed", "kept", None)
    assert stored.spec.spec == filed.spec.spec
    assert isinstance(bad, BrokenPipeline)
    assert (bad.name, bad.path) == ("bad", None)
    assert bad.error.problems[0].startswith("metadata.tenant: ")
    assert [one.name for one in installed(settings, None)] == ["filed"]


def test_one_name_twice(sqlite_store: StateStore, settings: Settings) -> None:
    """Nobody knows which one is meant, so neither runs."""
    keep(sqlite_store, "filed", document("filed"))
    (only,) = installed(settings, sqlite_store)
    assert isinstance(only, BrokenPipeline)
    assert only.path == settings.pipelines / "filed.yaml"
    assert "also used by a pipeline that the state store keeps" in str(only.error)


def test_variables_are_those_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a document nothing is expanded: it could show any secret of the process."""
    monkeypatch.setenv("SECRET", "geheim")
    found = load_document("x", document("kept", labels={"a": "${SECRET}"}))
    assert isinstance(found, LoadedPipeline)
    assert found.spec.metadata.labels == {"a": "${SECRET}"}


def test_a_pipeline_is_read_again(sqlite_store: StateStore, settings: Settings) -> None:
    """As it is now, from where it came; None when it is gone, or another has taken its file."""
    keep(sqlite_store, "kept", document("kept"))
    filed, stored = installed(settings, sqlite_store)
    assert isinstance(filed, LoadedPipeline)
    assert isinstance(stored, LoadedPipeline)
    for one in (filed, stored):
        again = reread(sqlite_store, one)
        assert isinstance(again, LoadedPipeline)
        assert again.hash == one.hash

    changed = orjson.dumps(document("kept", tenant="other")).decode()
    assert sqlite_store.pipelines.replace_document("kept", 1, changed)
    path = settings.pipelines / "filed.yaml"
    path.write_text(FILE.replace("acme", "other"))
    for one in (filed, stored):
        again = reread(sqlite_store, one)
        assert isinstance(again, LoadedPipeline)
        assert again.hash != one.hash
        assert again.spec.metadata.tenant == "other"

    path.write_text(FILE.replace("slot: s,", ""))
    assert isinstance(reread(sqlite_store, filed), BrokenPipeline)
    path.write_text(FILE.replace("filed", "renamed"))
    assert reread(sqlite_store, filed) is None
    path.unlink()
    sqlite_store.pipelines.remove_document("kept")
    assert reread(sqlite_store, filed) is None
    assert reread(sqlite_store, stored) is None


def test_a_removed_pipeline_does_not_come_back(sqlite_store: StateStore) -> None:
    """A tick that has loaded it and is slower than its removal leaves nothing behind."""
    keep(sqlite_store, "kept", document("kept"))
    (loaded,) = kept(sqlite_store)
    assert isinstance(loaded, LoadedPipeline)
    register(sqlite_store, loaded)
    sqlite_store.pipelines.remove("kept")
    with pytest.raises(NotAllowed, match="'kept' was removed"):
        register(sqlite_store, loaded)
    assert sqlite_store.pipelines.read() == []
