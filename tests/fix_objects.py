"""Object storage for tests: one server per session, on which every test makes a bucket of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deltaforge_lab.servers.s3 import S3Server
from tests.started import or_fail


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a server.

    Attributes:
        server: The server.
        name: Name of the bucket.
        folder: Where the server has its objects.
    """

    server: S3Server
    name: str
    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """Options of a sink that writes to it."""
        return {
            "bucket": self.name,
            "endpoint": self.server.url,
            "region": "us-east-1",
            "access_key_id": self.server.key,
            "secret_access_key": self.server.secret,
        }

    def paths(self) -> list[str]:
        """The keys of its objects."""
        files = (one for one in self.folder.rglob("*") if one.is_file())
        return sorted(one.relative_to(self.folder).as_posix() for one in files)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server; not to be stopped or changed."""
    with or_fail(S3Server.start) as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    """A bucket of the session's server."""
    name = f"df-{secrets.token_hex(6)}"
    client = fsspec.filesystem(
        "s3",
        key=s3_server.key,
        secret=s3_server.secret,
        endpoint_url=s3_server.url,
        config_kwargs={"s3": {"addressing_style": "path"}},
        skip_instance_cache=True,
    )
    client.mkdir(name)
    return Bucket(s3_server, name, s3_server.folder(name))
