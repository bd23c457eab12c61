"""NATS for tests: one server per session, on which every test makes streams of its own.

`DELTAFORGE_TEST_NATS_URL` names a running server to use instead, with JetStream. Otherwise an
installed nats-server is started, or the one of the extra `lab`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltaforge_lab.servers.nats import NatsServer, installed_version
from deltaforge_lab.servers.nats_client import NatsClient
from tests.started import each_closed, or_fail

URL_VARIABLE = "DELTAFORGE_TEST_NATS_URL"

SETTINGS = {"max_payload": "8MB"}

StartNats = Callable[..., NatsServer]


class Admin(NatsClient):
    """Makes, changes and reads streams of a server."""

    def make(self, name: str, *subjects: str, **config: object) -> str:
        """Make a stream in memory and return its name."""
        wanted = {"name": name, "subjects": subjects, "storage": "memory", **config}
        answer = self.ask(f"STREAM.CREATE.{name}", wanted)
        assert "error" not in answer, answer
        return name

    def change(self, name: str, **config: object) -> None:
        """Change a stream's configuration."""
        now = self.ask(f"STREAM.INFO.{name}")["config"]
        answer = self.ask(f"STREAM.UPDATE.{name}", {**now, **config})
        assert "error" not in answer, answer

    def delete(self, name: str) -> None:
        """Delete a stream."""
        self.ask(f"STREAM.DELETE.{name}")

    def purge(self, name: str) -> None:
        """Remove every message of a stream."""
        self.ask(f"STREAM.PURGE.{name}")

    def state(self, name: str) -> dict[str, Any]:
        """Return a stream's state: `messages`, `first_seq`, `last_seq` ..."""
        state: dict[str, Any] = self.ask(f"STREAM.INFO.{name}")["state"]
        return state

    def await_messages(self, name: str, last: int) -> None:
        """Wait until a stream has had so many messages."""
        while self.state(name)["last_seq"] < last:
            pass

    def publish_as(self, subject: str, value: str, message_id: str) -> None:
        """Store a message under an id."""
        answer = self.request(subject, value.encode(), {"Nats-Msg-Id": message_id})
        assert "seq" in answer, answer

    def listen(self, subject: str) -> Callable[[int], list[bytes]]:
        """Subscribe without a stream; the returned function waits for so many messages."""
        heard = self._done(self._nats.subscribe(subject))
        self._done(self._nats.flush())

        async def take(count: int) -> list[bytes]:
            return [(await heard.next_msg(timeout=60)).data for _ in range(count)]

        return lambda count: self._done(take(count))

    def values(self, name: str, subject: str = ">") -> list[str]:
        """Return the values in a stream, in order."""
        return [one.value.decode() for one in self.read(name, subject)]


def pytest_report_header() -> str:
    """Say which NATS the tests use."""
    if os.environ.get(URL_VARIABLE):
        return f"nats: the server of {URL_VARIABLE}"
    return f"nats: {installed_version()}"


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A server with `.url`; not to be stopped or changed."""
    url = os.environ.get(URL_VARIABLE)
    with or_fail(
        lambda: NatsServer.attach(url) if url else NatsServer.start(settings=SETTINGS)
    ) as server:
        yield server


@pytest.fixture
def nats_admin(nats_server: NatsServer) -> Iterator[Admin]:
    """Makes and reads streams of the session's server."""
    admin = Admin(nats_server.url)
    yield admin
    admin.close()


@pytest.fixture
def nats_stream(nats_admin: Admin) -> Iterator[str]:
    """The name of a stream that takes every subject beginning with its name and a dot."""
    name = f"df_{secrets.token_hex(6)}"
    nats_admin.make(name, f"{name}.>")
    yield name
    nats_admin.delete(name)


@pytest.fixture
def start_nats() -> Iterator[StartNats]:
    """Start a server of the test's own, to stop, pause and configure: `start_nats(settings)`.

    Always a new server, whatever `DELTAFORGE_TEST_NATS_URL` says.
    """
    with each_closed(NatsServer.start) as start:
        yield start
