"""The HTTP sink: each message, or a batch of them, is a request.

Delivery is at least once. A request counts as delivered when a response with a status of 2xx has
arrived; a receiver can drop an `idempotency-key` that it has seen. `requests` says what a request
looks like, `answers` what a response means, and `flight` in which order requests are made.

HTTP cannot take a request back: one that got no answer may still have an effect, even after it was
repeated and later ones were made. The repeated request has the same idempotency key, so a receiver
that drops known keys is not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition, Traffic
from deltaforge_dagster.sinks.connections import Use
from deltaforge_dagster.sinks.http.client import ClientSettings, HttpClient
from deltaforge_dagster.sinks.http.requests import HttpRequests, RequestForm
from deltaforge_dagster.sinks.http.sink import Flight


class HttpSink:
    """Makes requests to the URLs of messages.

    Args:
        sink_id: Name of the sink in messages.
        form: What requests look like.
        settings: How they are made; `connections` is how many may be under way at once.

    Attributes:
        traffic: Counts of repeated requests.
    """

    exactly_once = False
    takes_parts = False

    def __init__(self, sink_id: str, form: RequestForm, settings: ClientSettings) -> None:
        self.traffic = Traffic()
        self._sink_id = sink_id
        self._form = form
        self._settings = settings
        self._client: HttpClient | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._use = Use(sink_id, self._drop)

    def open(self) -> None:
        """Read the files of `tls`; the first request connects. May be called again after `close`.

        Raises:
            SettingsError: A file cannot be read.
        """
        with self._use.held():
            self._opened()
            self._use.closed.clear()

    def reach(self, url: str) -> bool:
        """Connect to the server of a URL; return whether it has proved its identity.

        Sends no request. Call it after `open`.

        Raises:
            SinkUnavailable: It cannot be reached.
            SinkRejected: Its certificate is not trusted, or its address is not allowed.
            AuthFailed: It refused the client's certificate.
        """
        with self._use.held():
            self._use.raise_when_closed()
            return self._opened().reach(url)

    def position(self) -> SinkPosition | None:
        """Return None: the sink keeps no position, so the checkpoint applies."""
        return None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Make the requests of a batch and return its last ordinal.

        A request that fails for a transient reason is made three times in all, unless the server's
        answer has a `Retry-After`. After an error, `acknowledged` of the error says which messages
        were delivered. Of the later messages, an unknown prefix of those of each key may have been.

        Raises:
            SinkUnavailable: Connection lost, timeout, a status that is not final, closed.
            AuthFailed: The server refused the credentials.
            SinkRejected: It answers with a redirect, its certificate is not trusted, or its address
                is not allowed.
            Undeliverable: A message cannot be a request, or the server refuses it. All messages
                before its change were delivered.
        """
        with self._use.held():
            self._use.raise_when_closed()
            Flight(
                f"sink {self._sink_id}",
                HttpRequests(batch, self._form),
                self._opened(),
                self._use,
                most=self._settings.connections,
                run=self._run,
                traffic=self.traffic,
            ).send(guard)
            return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """Close the connections; a `send` that is running in another thread fails."""
        self._use.end(self._interrupt)

    def _opened(self) -> HttpClient:
        if self._client is None:
            self._client = HttpClient(self._sink_id, self._settings)
        return self._client

    def _run(self, work: Callable[[], None]) -> None:
        if self._settings.connections == 1:
            work()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._settings.connections, self._sink_id)
        self._threads.submit(work)

    def _interrupt(self) -> None:
        if (client := self._client) is not None:
            client.interrupt()

    def _drop(self) -> None:
        client, self._client = self._client, None
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        if client is not None:
            client.close()
