"""A small NATS client for benchmarks and tests, which calls the JetStream API and reads whole streams.

It implements the text protocol itself (docs.nats.io, "Client Protocol"), so its results do not depend on
the code of the sink. It does not answer PINGs, so a connection lasts less than two minutes.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from deltaforge_dagster.errors import SettingsError

_SECONDS = 60.0
_BATCH = 10_000


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a stream; `ms` is the time when the server stored it, in milliseconds since 1970."""

    sequence: int
    subject: str
    headers: Mapping[str, str]
    value: bytes
    ms: int


class NatsClient:
    """A connection; a context manager.

    Args:
        url: `nats://[token@]host:port`.

    Raises:
        SettingsError: The server rejects the connection.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._sock = socket.create_connection((parts.hostname, parts.port or 4222), _SECONDS)
        self._file = self._sock.makefile("rb", 1 << 20)
        self._file.readline()
        options = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        if parts.username:
            options["auth_token"] = parts.username  # type: ignore[assignment]
        self._send(f"CONNECT {json.dumps(options)}\r\nSUB {self._inbox}.> 1\r\nPING\r\n".encode())
        answer = self._file.readline()
        if answer != b"PONG\r\n":
            raise SettingsError(f"NATS refuses a client: {answer.decode().strip()}")

    def ask(self, subject: str, question: object = None) -> dict[str, Any]:
        """Call JetStream's API, such as `STREAM.INFO.<name>`, and return its answer."""
        body = b"" if question is None else json.dumps(question).encode()
        return self.request(f"$JS.API.{subject}", body)

    def request(self, subject: str, body: bytes) -> dict[str, Any]:
        """Publish a message and return the reply to it, from a stream or JetStream's API."""
        head = f"PUB {subject} {self._inbox}.r {len(body)}\r\n".encode()
        self._send(head + body + b"\r\n")
        _, reply, _ = self._message()
        answer: dict[str, Any] = json.loads(reply or b'{"error":"nobody answers"}')
        return answer

    def read(self, stream: str, subject: str | None = None) -> Iterator[Stored]:
        """Yield every message of a stream in order, or those of one subject or pattern."""
        wanted = {"ack_policy": "none", "inactive_threshold": 60_000_000_000}
        if subject is not None:
            wanted["filter_subject"] = subject
        answer = self.ask(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": wanted})
        if "error" in answer:
            raise SettingsError(f"NATS refuses to read {stream}: {answer['error']}")
        name, pending = answer["name"], int(answer["num_pending"])
        while pending > 0:
            batch = min(pending, _BATCH)
            body = json.dumps({"batch": batch, "no_wait": True}).encode()
            head = f"PUB $JS.API.CONSUMER.MSG.NEXT.{stream}.{name} {self._inbox}.m {len(body)}\r\n"
            self._send(head.encode() + body + b"\r\n")
            for _ in range(batch):
                words, value, headers = self._message()
                # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer's>.<ns>.<pending>
                place = words[3].split(".")
                yield Stored(int(place[5]), words[1], headers, value, int(place[7]) // 1_000_000)
            pending -= batch
        self.ask(f"CONSUMER.DELETE.{stream}.{name}")

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def _message(self) -> tuple[list[str], bytes, dict[str, str]]:
        """Return the next message: the words of its protocol line, its body and its headers."""
        while True:
            line = self._file.readline().decode()
            words = line.split()
            if not words:
                raise SettingsError("NATS ended the connection of a client")
            if words[0] == "-ERR":
                raise SettingsError(f"NATS refuses a client: {line.strip()}")
            if words[0] not in {"MSG", "HMSG"}:
                continue
            size = int(words[-1])
            data = self._file.read(size + 2)[:size]
            if words[0] == "MSG":
                return words, data, {}
            head = int(words[-2])
            lines = data[:head].decode().split("\r\n")[1:]
            return words, data[head:], dict(one.split(": ", 1) for one in lines if one)
