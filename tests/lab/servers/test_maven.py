"""The cache of server programs from Maven Central."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.maven import Artifact, download
from deltaforge_lab.servers import maven
from deltaforge_lab.servers.maven import fetch, parse_pins
from tests.installation.test_maven import CONTENT, JAR, serving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_pins_are_lines() -> None:
    """A list of artifacts is readable text in the source."""
    assert parse_pins("\na:b:1 00\nc.d:e:2 ff\n") == [
        Artifact("a:b:1", "00"),
        Artifact("c.d:e:2", "ff"),
    ]


def test_a_file_is_fetched_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The second time there is no request; the cache has the layout of a Maven repository."""
    with serving() as repository:
        monkeypatch.setattr(maven, "download", partial(download, repository=repository.url))
        found = fetch([JAR])

    assert fetch([JAR]) == found == [cache / "deltaforge" / "maven" / JAR.path]
    assert found[0].read_bytes() == CONTENT
    assert repository.ranges == [None]


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    """The error names the artifact, and the variable that moves the cache."""
    (cache / "deltaforge").write_text("no folder")

    with pytest.raises(SettingsError, match=r"org.some:thing.*cannot be cached.*XDG_CACHE_HOME"):
        fetch([JAR])
