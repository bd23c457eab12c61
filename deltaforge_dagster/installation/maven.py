"""Download pinned jars from a Maven repository.

Only `deltaforge lake install` and the servers of `deltaforge_lab` use it; a pipeline never
downloads anything. The source names each artifact with its SHA-256, so exactly the tested files are
used, and dependencies are not resolved.

A download is written to `NAME.part` and renamed once its checksum is right. It continues where an
interrupted one ended, and several processes may ask for the same file: the first one downloads it,
the others wait for its lock. Proxies and certificates come from the usual variables (`https_proxy`,
`SSL_CERT_FILE`).
"""

from __future__ import annotations

import fcntl
import hashlib
import http
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.folders import sync_folder

CENTRAL = "https://repo1.maven.org/maven2"

_ATTEMPTS = 4  # with the pauses between them, they outlast an outage of 7 s
_PAUSE_SECONDS = 1.0
"""The first pause between attempts; each further one is twice as long."""
_TIMEOUT_SECONDS = 60
_CHUNK_BYTES = 1 << 18
_TEMPORARY = (408, 429)
"""Status codes of rejected requests that are repeated."""

Progress = Callable[[int, int], None]
"""Called during a download with the number of bytes received and the file's size; 0 if that is
unknown."""


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
        return f"{group.replace('.', '/')}/{name}/{version}/{self.file_name}"

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        _, name, version = self.coordinates.split(":")
        return f"{name}-{version}.jar"

    def is_at(self, file: Path) -> bool:
        """Return whether `file` exists and has this artifact's checksum."""
        try:
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest() == self.sha256
        except FileNotFoundError:
            return False


def download(
    artifact: Artifact,
    file: Path,
    *,
    repository: str = CENTRAL,
    progress: Progress = lambda _done, _total: None,
) -> None:
    """Write `artifact` to `file`, whose folder exists; replace a file with another content.

    Args:
        artifact: What to download.
        file: Where to write it.
        repository: URL of a Maven repository.
        progress: Called with the number of bytes received so far.

    Raises:
        SettingsError: The repository cannot be reached, the folder cannot be written, or the file
            is not the one that was pinned.
    """
    part = file.with_name(f"{file.name}.part")
    with _written(artifact, file), part.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if artifact.is_at(file):  # another process has written it meanwhile
            part.unlink(missing_ok=True)
            return
        _receive(artifact, f"{repository.rstrip('/')}/{artifact.path}", part, stream, progress)
        _finish(stream, file)


def copy(artifact: Artifact, downloaded: Path, file: Path) -> None:
    """Write `artifact` to `file`, whose folder exists, from a file that was downloaded elsewhere.

    Raises:
        SettingsError: The file is missing or not the one that was pinned, or the folder cannot be
            written.
    """
    if not artifact.is_at(downloaded):
        problem = "is not the file that was pinned" if downloaded.exists() else "does not exist"
        raise SettingsError(
            f"{downloaded} {problem}: download {CENTRAL}/{artifact.path}, "
            f"whose SHA-256 is {artifact.sha256}"
        )
    part = file.with_name(f"{file.name}.part")
    with _written(artifact, file), part.open("ab") as stream, downloaded.open("rb") as source:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.truncate(0)
        shutil.copyfileobj(source, stream)
        _finish(stream, file)


def _finish(stream: BinaryIO, file: Path) -> None:
    """Give a complete file its name, durably."""
    # First the content, then the name: after a crash, a file with this name has its content.
    stream.flush()
    os.fsync(stream.fileno())
    Path(stream.name).rename(file)
    sync_folder(file.parent)


@contextmanager
def _written(artifact: Artifact, file: Path) -> Iterator[None]:
    """Turn a file system error while `artifact` is written to `file` into a `SettingsError`."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"{artifact.coordinates} cannot be written to {file.parent}: {error.strerror}"
        ) from error


def _receive(
    artifact: Artifact, url: str, file: Path, stream: BinaryIO, progress: Progress
) -> None:
    """Append the missing rest of the file at `url` to `stream`, the open `file`, and verify it."""
    problem: Exception | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS * 2.0 ** (attempt - 1))
        present = stream.seek(0, os.SEEK_END)
        if present and artifact.is_at(file):
            return
        try:
            for position, content, total in _content(url, present):
                with _written(artifact, file):
                    stream.truncate(position)
                    stream.write(content)
                progress(position + len(content), total)
        except (OSError, http.client.HTTPException) as error:
            problem = error
            if _is_final(error):
                break
            continue
        stream.flush()
        if artifact.is_at(file):
            return
        stream.truncate(0)
        # All of it came in this attempt, so the next one would get the same bytes.
        if not present:
            raise SettingsError(
                f"{url} is not the file that was pinned: its SHA-256 is not {artifact.sha256}"
            )
    raise SettingsError(
        f"{artifact.coordinates} cannot be downloaded from {url}: {problem}; "
        "this machine needs the network once (https_proxy and SSL_CERT_FILE are honoured)"
    ) from problem


def _content(url: str, present: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield the parts of a file after its first `present` bytes: offset, content, the file's size.

    A server that does not support ranges sends the file from the beginning. If the file is not
    longer than `present`, what is present is wrong, and an empty part at its beginning is yielded.
    """
    request = urllib.request.Request(  # noqa: S310 - the command accepts no other scheme than HTTP
        url, headers={"Range": f"bytes={present}-"} if present else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
            position = present if answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0
            length = answer.headers["Content-Length"]
            total = position + int(length) if length else 0
            while content := answer.read(_CHUNK_BYTES):
                yield position, content, total
                position += len(content)
            if position < total:
                raise http.client.IncompleteRead(b"", total - position)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        yield 0, b"", 0


def _is_final(error: Exception) -> bool:
    """Return whether a repeated request fails in the same way."""
    return (
        isinstance(error, urllib.error.HTTPError)
        and error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR
        and error.code not in _TEMPORARY
    )
