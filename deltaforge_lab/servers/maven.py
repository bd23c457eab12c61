"""Download server programs that are on Maven Central but not on PyPI: pinned, verified and cached.

Only the servers of this package use it, for the demo, benchmarks and tests; nothing that a user's
pipeline runs is ever downloaded. The source names each artifact with its SHA-256, so exactly the tested
files run, and no dependencies are resolved here. The cache is `$XDG_CACHE_HOME/deltaforge/maven`
(`~/.cache` without that variable), in the layout of a Maven repository.

Proxies and certificates come from the usual variables (`https_proxy`, `SSL_CERT_FILE`).
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deltaforge_dagster.errors import SettingsError

CENTRAL = "https://repo1.maven.org/maven2"

_ATTEMPTS = 4
_TIMEOUT_SECONDS = 60
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Artifact:
    """One jar.

    Attributes:
        coordinates: `group:name:version`.
        sha256: Its SHA-256, in hexadecimal.
    """

    coordinates: str
    sha256: str

    @property
    def path(self) -> str:
        """The path in a repository: `org/slf4j/slf4j-api/1.7.36/slf4j-api-1.7.36.jar`."""
        group, name, version = self.coordinates.split(":")
        return f"{group.replace('.', '/')}/{name}/{version}/{name}-{version}.jar"


def parse_pins(text: str) -> list[Artifact]:
    """Parse lines of `group:name:version sha256`."""
    return [Artifact(*line.split()) for line in text.strip().splitlines()]


def cache_directory() -> Path:
    """Return the cache directory for programs: `$XDG_CACHE_HOME/deltaforge`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltaforge"


def fetch(artifacts: Iterable[Artifact]) -> list[Path]:
    """Return the files of `artifacts`, in the same order; download those that are not in the cache.

    Several processes may do this at the same time.

    Raises:
        SettingsError: Maven Central cannot be reached, the cache cannot be written, or a file is
            not the one that was pinned.
    """
    cache = cache_directory() / "maven"
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda artifact: _cached(artifact, cache), artifacts))


def _cached(artifact: Artifact, cache: Path) -> Path:
    file = cache / artifact.path
    if file.exists():
        return file
    content = _download(artifact)
    found = hashlib.sha256(content).hexdigest()
    if found != artifact.sha256:
        raise SettingsError(
            f"{artifact.coordinates} from Maven Central is not the file that was pinned: "
            f"SHA-256 {found}, expected {artifact.sha256}"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Rename complete files only: other processes may look for the file at any moment.
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=file.parent)
        with open(descriptor, "wb") as stream:  # noqa: PTH123 - mkstemp opened it
            stream.write(content)
        Path(temporary).replace(file)
    except OSError as error:
        raise SettingsError(
            f"{artifact.coordinates} cannot be cached: {error}; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    return file


def _download(artifact: Artifact) -> bytes:
    url = f"{CENTRAL}/{artifact.path}"
    problem: Exception | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(2.0**attempt / 2)
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - https
                content: bytes = answer.read()
                return content
        except (OSError, http.client.HTTPException) as error:  # the latter: truncated response
            problem = error
    raise SettingsError(
        f"{artifact.coordinates} cannot be downloaded from {CENTRAL}: {problem}; "
        "this machine needs the network once (https_proxy and SSL_CERT_FILE are honoured)"
    ) from problem
