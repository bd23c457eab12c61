"""The cache of server programs that are on Maven Central but not on PyPI.

Only the servers of this package use it, for the demo, benchmarks and tests. The cache is
`$XDG_CACHE_HOME/deltaforge/maven` (`~/.cache` without that variable), in the layout of a Maven
repository.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.folders import user_cache
from deltaforge_dagster.installation.maven import Artifact, download

_PARALLEL = 8


def parse_pins(text: str) -> list[Artifact]:
    """Parse lines of `group:name:version sha256`."""
    return [Artifact(*line.split()) for line in text.strip().splitlines()]


def fetch(artifacts: Iterable[Artifact]) -> list[Path]:
    """Return the files of `artifacts`, in the same order; download those that are not in the cache.

    Several processes may do this at the same time.

    Raises:
        SettingsError: Maven Central cannot be reached, the cache cannot be written, or a file is
            not the one that was pinned.
    """
    cache = user_cache() / "maven"
    with ThreadPoolExecutor(_PARALLEL) as pool:
        return list(pool.map(lambda artifact: _cached(artifact, cache), artifacts))


def _cached(artifact: Artifact, cache: Path) -> Path:
    file = cache / artifact.path
    if file.exists():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{artifact.coordinates} cannot be cached: {error}; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    download(artifact, file)
    return file
