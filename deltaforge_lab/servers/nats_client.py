"""A synchronous wrapper of nats-py for benchmarks and tests: JetStream, and a stream's messages.

What our sink has sent is read back with another client than the sink's own, so that a fault of that
client is detected.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from deltaforge_dagster.errors import SettingsError

try:
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig
except ModuleNotFoundError as missing:
    raise SettingsError("nats-py is missing: pip install 'deltaforge-dagster[lab]'") from missing

_SECONDS = 60.0
_BATCH = 1_000

_Result = TypeVar("_Result")


async def _raised_by_calls(_: Exception) -> None:
    """Ignore the error: nats-py also raises it in the call concerned."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a stream; `ms` is when the server stored it, in milliseconds since 1970."""

    subject: str
    headers: Mapping[str, str]
    value: bytes
    ms: int


class NatsClient:
    """A connection to a NATS server, as a context manager.

    It answers the server's PINGs only during calls, so it can be idle for a few minutes only.

    Args:
        url: `nats://[token@]host:port`.

    Raises:
        SettingsError: The server cannot be reached or rejects the connection.
    """

    def __init__(self, url: str) -> None:
        self._loop = asyncio.Runner()
        try:
            self._nats = self._done(
                nats.connect(
                    url,
                    connect_timeout=int(_SECONDS),
                    allow_reconnect=False,
                    max_reconnect_attempts=1,  # counts while it connects, too
                    error_cb=_raised_by_calls,
                )
            )
        except BaseException:
            self._loop.close()
            raise

    def ask(self, subject: str, question: object = None) -> dict[str, Any]:
        """Call JetStream's API, such as `STREAM.INFO.<name>`, and return its answer."""
        body = b"" if question is None else json.dumps(question).encode()
        return self.request(f"$JS.API.{subject}", body)

    def request(
        self, subject: str, body: bytes, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Publish a message and return the reply to it, from a stream or JetStream's API."""
        reply = self._done(self._nats.request(subject, body, timeout=_SECONDS, headers=headers))
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    def read(self, stream: str, subject: str = ">") -> list[StoredMessage]:
        """Return every message of a stream in order, or those of one subject or pattern."""
        return self._done(self._read(stream, subject))

    def close(self) -> None:
        """Close the connection."""
        try:
            self._done(self._nats.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _done(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return self._loop.run(work)
        except (nats.errors.Error, OSError) as error:
            raise SettingsError(f"NATS refuses a client: {error}") from error

    async def _read(self, stream: str, subject: str) -> list[StoredMessage]:
        wanted = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=_SECONDS)
        consumer = await self._nats.jetstream().pull_subscribe(
            subject, stream=stream, config=wanted
        )
        pending = (await consumer.consumer_info()).num_pending or 0
        messages: list[StoredMessage] = []
        while len(messages) < pending:
            batch = min(pending - len(messages), _BATCH)
            for message in await consumer.fetch(batch, timeout=_SECONDS):
                ms = round(message.metadata.timestamp.timestamp() * 1000)
                messages.append(
                    StoredMessage(
                        message.subject,
                        message.headers or {},
                        message.data,
                        ms,
                    )
                )
        await consumer.unsubscribe()
        return messages
