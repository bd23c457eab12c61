"""Pinned jars from a Maven repository: a real HTTP server that interrupts, lies, and refuses."""

from __future__ import annotations

import hashlib
import http.server
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation import maven
from deltaforge_dagster.installation.maven import Artifact, copy, download

CONTENT = bytes(range(256)) * 4096
JAR = Artifact("org.some:thing_2.13:1.0", hashlib.sha256(CONTENT).hexdigest())


class Repository:
    """A Maven repository on this machine that has one file.

    Attributes:
        url: Its address.
        content: The file.
        ranges: The `Range` of each request, None for the whole file.
        cut: After how many bytes the connection is closed, for each request in turn.
        statuses: Rejections, for each request in turn.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.url = f"http://{address[0]}:{address[1]}/maven2"
        self.content = CONTENT
        self.ranges: list[str | None] = []
        self.cut: list[int] = []
        self.statuses: list[int] = []

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Answer a request for the file."""
        wanted = request.headers["Range"]
        self.ranges.append(wanted)
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if self.statuses:
            request.send_error(self.statuses.pop(0))
        elif request.path != f"/maven2/{JAR.path}":
            request.send_error(404)
        elif first >= len(self.content):
            request.send_error(416)
        else:
            rest = self.content[first:]
            request.send_response(206 if wanted else 200)
            request.send_header("Content-Length", str(len(rest)))
            request.end_headers()
            request.wfile.write(rest[: self.cut.pop(0)] if self.cut else rest)


@contextmanager
def serving() -> Iterator[Repository]:
    """Run a repository."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Repository(("127.0.0.1", server.server_port))
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A repository, and no waiting between attempts."""
    monkeypatch.setattr(maven, "_PAUSE_SECONDS", 0)
    with serving() as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the jar belongs; nothing is there yet."""
    return tmp_path / JAR.file_name


def get(repository: Repository, file: Path) -> None:
    """Download the jar."""
    download(JAR, file, repository=f"{repository.url}/")


def assert_alone(file: Path) -> None:
    """Assert that the right file is there, and nothing else."""
    assert file.read_bytes() == CONTENT
    assert [*file.parent.iterdir()] == [file]


def test_progress_is_reported(repository: Repository, file: Path) -> None:
    """The bytes that are here only grow, up to the size of the file."""
    told: list[tuple[int, int]] = []

    download(JAR, file, repository=repository.url, progress=lambda *one: told.append(one))

    assert_alone(file)
    assert told == sorted(told)
    assert {total for _, total in told} == {len(CONTENT)}
    assert told[-1] == (len(CONTENT), len(CONTENT))


def test_a_cut_connection_is_continued(repository: Repository, file: Path) -> None:
    """After a truncated response, only the rest is requested."""
    repository.cut = [300_000]

    get(repository, file)

    assert_alone(file)
    assert repository.ranges == [None, "bytes=300000-"]


def test_a_killed_download_is_continued(repository: Repository, file: Path) -> None:
    """What another process left is used; a complete part needs no request at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(CONTENT[:1000])
    get(repository, file)
    assert_alone(file)
    file.rename(part)
    get(repository, file)
    assert_alone(file)

    assert repository.ranges == ["bytes=1000-"]


@pytest.mark.parametrize("left", [b"something else", CONTENT + b"more", CONTENT[:-1] + b"?"])
def test_a_damaged_part_is_replaced(repository: Repository, file: Path, left: bytes) -> None:
    """If the whole is not right with the part that was here, it is downloaded from the beginning."""
    file.with_name(f"{file.name}.part").write_bytes(left)

    get(repository, file)

    assert_alone(file)
    assert repository.ranges == [f"bytes={len(left)}-", None]


def test_a_damaged_file_is_replaced(repository: Repository, file: Path) -> None:
    """A file with another content does not stay."""
    file.write_bytes(b"half of it")

    get(repository, file)

    assert_alone(file)


def test_a_short_failure_of_the_server_is_survived(repository: Repository, file: Path) -> None:
    """Requests that may succeed later are repeated."""
    repository.statuses = [503, 429]

    get(repository, file)

    assert_alone(file)


def test_another_file_than_the_pinned_one_is_refused(repository: Repository, file: Path) -> None:
    """What does not have the pinned SHA-256 never gets the name, and is not used as a part later."""
    repository.content = b"other"

    with pytest.raises(SettingsError, match=r"thing_2.13-1.0.jar is not the file that was pinned"):
        get(repository, file)

    assert not file.exists()
    assert repository.ranges == [None]
    repository.content = CONTENT
    get(repository, file)
    assert_alone(file)


def test_a_repository_without_the_file(repository: Repository, file: Path) -> None:
    """A request that fails again for sure is not repeated; the error names the address."""
    repository.url += "/wrong"

    with pytest.raises(SettingsError, match=r"downloaded from http://.*/wrong/org/some/.*404"):
        get(repository, file)
    assert len(repository.ranges) == 1


def test_without_network_one_line_says_so(repository: Repository, file: Path) -> None:
    """The error names the artifact, the place and the way out."""
    repository.url = "http://127.0.0.1:1"

    with pytest.raises(SettingsError, match=r"org.some:thing.*127.0.0.1:1/org.*refused.*needs the"):
        get(repository, file)


def test_many_at_once_download_it_once(repository: Repository, file: Path) -> None:
    """Those who come later wait for the first one, and leave nothing behind."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: get(repository, file), range(8)))

    assert_alone(file)
    assert repository.ranges == [None]


def test_a_folder_that_cannot_be_written(repository: Repository, file: Path) -> None:
    """The error names the folder and the reason, and does not blame the network."""
    with pytest.raises(SettingsError, match=r"written to /.*/missing: No such file or directory"):
        get(repository, file.parent / "missing" / file.name)


def test_a_disk_that_is_full(repository: Repository, file: Path) -> None:
    """The system's reason is shown, and the download is continued once there is space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, before[1]))
    try:
        with pytest.raises(SettingsError, match=rf"written to {file.parent}: File too large"):
            get(repository, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not file.exists()

    get(repository, file)

    assert_alone(file)
    assert repository.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_copy_is_verified(file: Path, tmp_path: Path) -> None:
    """A given file is copied only if it is the pinned one; otherwise the error says where to get it."""
    given = tmp_path / "given" / file.name
    given.parent.mkdir()
    wanted = rf"{maven.CENTRAL}/{JAR.path}, whose SHA-256 is {JAR.sha256}"
    with pytest.raises(SettingsError, match=rf"{given} does not exist: download {wanted}"):
        copy(JAR, given, file)
    given.write_bytes(b"other")
    with pytest.raises(
        SettingsError, match=rf"{given} is not the file that was pinned: .*{wanted}"
    ):
        copy(JAR, given, file)
    assert not file.exists()

    given.write_bytes(CONTENT)
    copy(JAR, given, file)

    assert file.read_bytes() == CONTENT
