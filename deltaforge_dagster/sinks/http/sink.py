"""The HTTP sink: each message, or a batch of them, is a request.

Delivery is at least once. A request counts as delivered when a response with a status of 2xx has
arrived; a receiver can drop an `idempotency-key` that it has seen. `requests` says what a request
looks like and what a response means.

HTTP cannot take a request back: one that got no answer may still have an effect, even after it was
repeated and later ones were made. The repeated request has the same idempotency key, so a receiver
that drops known keys is not affected.

A `Flight` starts the requests in the order of the batch, several at once if their keys differ. A
request that shares a key with one under way waits for it, and so do all requests behind it. A
request with a message that has no key waits for all before it, and all behind it wait for it. So
whatever fails, the messages of a key that have arrived are exactly those before the first that has
not.

After a failure, no request behind it starts. Requests that are under way end, earlier ones that can
be repeated are repeated, and the failure of the first request in the batch is raised: everything
before it is acknowledged.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, cast

import numpy as np

from deltaforge_dagster.errors import (
    DeltaforgeError,
    LeaseLost,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition, Traffic
from deltaforge_dagster.sinks.connections import TimedOut, Use
from deltaforge_dagster.sinks.http.client import ClientSettings, HttpClient
from deltaforge_dagster.sinks.http.requests import (
    HttpRequest,
    HttpRequests,
    Refusal,
    RequestForm,
    origin_of,
)

_WAITS = (0.1, 0.2)
"""Seconds between the attempts of a request; there is one more attempt than waits."""

_Outcome = tuple[HttpRequest, Refusal | BaseException | None]


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
        with self._use.exclusive():
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
        with self._use.exclusive():
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
        with self._use.exclusive():
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


class RequestMaker(Protocol):
    """Makes requests (`client.HttpClient`)."""

    def attempt(self, request: HttpRequest) -> Refusal | None:
        """Make a request.

        Return None once its messages are acknowledged, or why they never can be.
        """
        ...

    def interrupt(self) -> None:
        """End every request that is under way, and each that begins before the next `begin`."""
        ...

    def begin(self) -> None:
        """Allow requests again."""
        ...


class Flight:
    """Sends the requests of one batch.

    Args:
        where: Name of the sink in messages.
        requests: The requests.
        client: Makes them.
        use: The sink; once it is closed, nothing starts.
        most: How many requests may be under way at once.
        run: Runs a function: in another thread, or at once if only one request may be under way.
        traffic: Counts repetitions.
    """

    def __init__(
        self,
        where: str,
        requests: HttpRequests,
        client: RequestMaker,
        use: Use,
        *,
        most: int,
        run: Callable[[Callable[[], None]], object],
        traffic: Traffic,
    ) -> None:
        self._where = where
        self._requests = requests
        self._client = client
        self._use = use
        self._max_in_flight = most
        self._run = run
        self._traffic = traffic
        self._unstarted: Iterator[HttpRequest] = iter(requests)
        self._next: HttpRequest | None = None
        self._next_row = 0
        self._to_repeat: list[tuple[int, HttpRequest]] = []
        self._in_flight: dict[int, HttpRequest] = {}
        self._busy = np.zeros(requests.key_count, np.bool_)
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._failure: tuple[int, DeltaforgeError] | None = None

    def send(self, guard: SendGuard) -> None:
        """Send everything.

        Raises:
            DeltaforgeError: Why the rest could not be sent; `acknowledged` says what was.
        """
        self._client.begin()
        try:
            self._send(guard)
        except BaseException as error:
            self._abandon()
            if isinstance(error, DeltaforgeError) and not isinstance(error, LeaseLost):
                error.acknowledged = self._requests.ordinal(self._first_open()) - 1
            raise

    def _send(self, guard: SendGuard) -> None:
        while True:
            self._start(guard)
            if self._in_flight:
                self._wait()
            elif self._to_repeat and self._peek() is not None:
                self._use.closed.wait(max(0.0, self._to_repeat[0][1].not_before - time.monotonic()))
                self._use.raise_when_closed()
            else:
                break
        if self._failure is not None:
            raise self._failure[1]

    def _start(self, guard: SendGuard) -> None:
        """Start every request that may start now."""
        while len(self._in_flight) < self._max_in_flight:
            request = self._peek()
            if request is None or request.not_before > time.monotonic() or self._blocked(request):
                return
            self._use.raise_when_closed()
            guard()
            if self._to_repeat and self._to_repeat[0][1] is request:
                heapq.heappop(self._to_repeat)
            else:
                self._next, self._next_row = None, request.stop
            self._in_flight[request.start] = request
            if request.keys is not None:
                self._busy[request.keys] = True
            self._run(lambda request=request: self._attempt(request))  # type: ignore[misc]

    def _peek(self) -> HttpRequest | None:
        """Return the request that comes next, None if nothing more may start."""
        if self._to_repeat:
            start, request = self._to_repeat[0]
            return request if self._failure is None or start < self._failure[0] else None
        if self._failure is not None:
            return None
        if self._next is None:
            try:
                self._next = next(self._unstarted, None)
            except Undeliverable as error:
                self._failed(self._next_row, error)
        return self._next

    def _blocked(self, request: HttpRequest) -> bool:
        """Return whether a request must wait for one that is under way."""
        if not self._in_flight:
            return False
        if request.keys is None or any(flying.keys is None for flying in self._in_flight.values()):
            return True
        return bool(self._busy[request.keys].any())

    def _attempt(self, request: HttpRequest) -> None:
        outcome: Refusal | BaseException | None
        try:
            outcome = self._client.attempt(request)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for it
            outcome = error
        self._outcomes.put((request, outcome))

    def _wait(self) -> None:
        """Wait until a request has ended, or another one may be repeated."""
        timeout = None
        if self._to_repeat and len(self._in_flight) < self._max_in_flight:
            wait = self._to_repeat[0][1].not_before - time.monotonic()
            timeout = wait if wait > 0 else None  # one whose time has come waits for a key
        try:
            request, outcome = self._outcomes.get(timeout=timeout)
        except queue.Empty:
            return
        self._record_end(request, acknowledged=outcome is None)
        if outcome is None:
            return
        self._use.raise_when_closed()
        if isinstance(outcome, Refusal):
            self._refused(request, outcome)
        else:
            self._interrupted(request, outcome)

    def _record_end(self, request: HttpRequest, *, acknowledged: bool) -> None:
        """Record that a request is no longer under way; unless acknowledged, it is open again."""
        del self._in_flight[request.start]
        if request.keys is not None:
            self._busy[request.keys] = False
        if not acknowledged:
            heapq.heappush(self._to_repeat, (request.start, request))

    def _refused(self, request: HttpRequest, refusal: Refusal) -> None:
        """Divide a batch that is refused; a single change is undeliverable."""
        halves = self._requests.halves(request)
        if halves:
            self._to_repeat = [pending for pending in self._to_repeat if pending[1] is not request]
            self._to_repeat += [(half.start, half) for half in halves]
            heapq.heapify(self._to_repeat)
        else:
            ordinal = self._requests.ordinal(request.start)
            text = (
                f"{self._where}: {origin_of(request.url)} refuses the message of ordinal {ordinal} "
                f"with {refusal}"
            )
            error = Undeliverable(text, ordinal, refusal.cause, refusal.detail)
            self._failed(request.start, error)

    def _interrupted(self, request: HttpRequest, error: BaseException) -> None:
        """Repeat a request soon if its failure may be transient; record the failure otherwise."""
        if not isinstance(error, DeltaforgeError):
            raise error
        if (
            isinstance(error, SinkUnavailable)
            and not isinstance(error, TimedOut)
            and error.retry_after is None
            and request.attempts < len(_WAITS)
        ):
            request.not_before = time.monotonic() + _WAITS[request.attempts]
            request.attempts += 1
            self._traffic.retries += 1
        else:
            self._failed(request.start, error)

    def _failed(self, row: int, error: DeltaforgeError) -> None:
        if self._failure is None or row < self._failure[0]:
            self._failure = row, error

    def _first_open(self) -> int:
        """Return the first row that is not acknowledged."""
        rows = [*self._in_flight, *(start for start, _ in self._to_repeat), self._next_row]
        if self._failure is not None:
            rows.append(self._failure[0])
        return min(rows)

    def _abandon(self) -> None:
        """End what is under way, so that nothing is sent after this."""
        if self._in_flight:
            self._client.interrupt()
        while self._in_flight:
            request, outcome = self._outcomes.get()
            self._record_end(request, acknowledged=outcome is None)
