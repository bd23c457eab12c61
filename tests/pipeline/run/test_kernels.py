"""Tests of what is compiled before a run reads anything."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_document
from deltaforge_dagster.pipeline.run import kernels

SERVER = {"dsn": "postgres://u@localhost/app", "slot": "s", "publication": "p"}
SOURCE = {"id": "pg", "tables": ["public.*"], **SERVER}
REDIS = {"type": "redis", "config": {"id": "cache", "uri": "redis://localhost", "stream": "s"}}
TABLES = {"type": "postgres", "config": {"id": "copy", "dsn": "postgres://u@localhost/copy"}}


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, and kernels that take no time; which were compiled."""
    made: list[str] = []
    parts = {name: partial(made.append, name) for name in kernels.all_kernels()}
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(kernels, "all_kernels", lambda: parts)
    return made


def test_what_the_cache_lacks_is_compiled_and_said(compiled: list[str]) -> None:
    """A run says what it compiles before it does so, and the next one finds it there; another sink needs more."""
    told: list[str] = []

    def prepare(*sinks: object) -> None:
        source = {"type": "postgres", "config": SOURCE}
        spec = {"source": source, "sinks": [*sinks]}
        document = {"metadata": {"name": "shop", "tenant": "acme"}, "spec": spec}
        loaded = load_document("shop", document)
        assert isinstance(loaded, LoadedPipeline)
        kernels.prepare(loaded.spec, told.append)

    prepare(REDIS)
    assert compiled == ["source postgres", "messages", "sink redis"]
    assert [one.partition(", once")[0] for one in told] == [
        "compiles the kernels of source postgres (1 of 3)",
        "compiles the kernels of messages (2 of 3)",
        "compiles the kernels of sink redis (3 of 3)",
    ]
    prepare(REDIS)
    assert len(told) == 3
    prepare(REDIS, TABLES)
    assert compiled[3:] == ["typed rows", "keys of tables", "sink postgres"]
