"""Server programs from Maven Central."""

from __future__ import annotations

import hashlib
import io
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_lab.servers import maven
from deltaforge_lab.servers.maven import Artifact, fetch, parse_pins

CONTENT = b"a jar"
JAR = Artifact("org.some:thing_2.13:1.0", hashlib.sha256(CONTENT).hexdigest())
FILE = "deltaforge/maven/org/some/thing_2.13/1.0/thing_2.13-1.0.jar"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no waiting between attempts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    return tmp_path


class Central:
    """A Maven Central that has one file; the first `failures` requests find no network."""

    def __init__(self, content: bytes, failures: int = 0) -> None:
        self.content = content
        self.failures = failures
        self.requests: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, url: str, timeout: float) -> io.BytesIO:
        """Answer like `urlopen`."""
        with self._lock:
            self.requests.append(url)
            if len(self.requests) <= self.failures:
                raise URLError("no network")
        return io.BytesIO(self.content)


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT, failures: int = 0) -> Central:
    """Put a repository in the place of Maven Central."""
    central = Central(content, failures)
    monkeypatch.setattr(urllib.request, "urlopen", central)
    return central


def test_pins_are_lines() -> None:
    """A list of artifacts is readable text in the source."""
    assert parse_pins("\na:b:1 00\nc.d:e:2 ff\n") == [
        Artifact("a:b:1", "00"),
        Artifact("c.d:e:2", "ff"),
    ]


def test_a_file_is_fetched_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The second time there is no request; files come in the order they were asked for."""
    central = serve(monkeypatch)

    assert fetch([JAR]) == fetch([JAR]) == [cache / FILE]
    assert (cache / FILE).read_bytes() == CONTENT
    assert central.requests == [f"{maven.CENTRAL}/org/some/thing_2.13/1.0/thing_2.13-1.0.jar"]


def test_another_file_than_the_pinned_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """What does not have the pinned SHA-256 is never kept."""
    serve(monkeypatch, b"other")

    with pytest.raises(SettingsError, match=r"org.some:thing_2.13:1.0 .* is not the file"):
        fetch([JAR])
    assert not (cache / FILE).exists()


def test_a_short_failure_of_the_network_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed request is no failed test run."""
    serve(monkeypatch, failures=2)

    assert fetch([JAR])


def test_without_network_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the artifact, the place and the way out."""
    serve(monkeypatch, failures=100)

    with pytest.raises(SettingsError, match=r"thing.*cannot be downloaded from https.*no network"):
        fetch([JAR])


def test_many_at_once_leave_one_whole_file(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Test runs share the cache: no half file under the final name, no leftovers."""
    serve(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: fetch([JAR]), range(16)))

    assert [path.name for path in (cache / FILE).parent.iterdir()] == [Path(FILE).name]
