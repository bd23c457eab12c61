"""Redis Streams: each message becomes one entry of the stream its row names.

An entry has the fields `event_id`, `idempotency_key`, `df-event` (the envelope), `df-key` (the
message key, else the event id), `df-headers` where there are any, and `df-replay` in a replay.
Streams are never trimmed. Delivery is at least once: consumers may drop an `idempotency_key` that
they have seen. Or it is exactly once: each block also sets a key of the server to the sink's
position, and does nothing at all when the key is no longer what this sender left there (redis.io,
"Transactions", section "Optimistic locking using check-and-set"). The key lies in the database of
the URI.

Messages leave in blocks (`resp`): transactions of at most 5,000 entries, the next one sent only
after the server has acknowledged the one before, and packed while the server works on that. So
after any error the server holds whole blocks from the batch's start, and nothing after a gap.

A block sent again must not be overtaken by its first try: bytes of a broken connection can still
lie unread in a paused server. So the socket is reset instead of closed, and the next connection
ends the old one on the server (`CLIENT KILL ID`) before it sends anything. Where a position is
kept, the next connection reads it then, and knows whether that block arrived.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import cast

import redis

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.sinks import resp
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sinks.redis_endpoint import Endpoint, TimedOut, refusal, translated
from deltaforge_dagster.sinks.redis_link import Identity, Link

_CONNECT_WAITS = (0.1, 0.2, 0.4, 0.8)
_BLOCK_WAITS = (0.1, 0.2)
"""Seconds between attempts; there is one attempt more than waits."""

_DRAIN_SECONDS = 1.0


class RedisSink:
    """Sends to the streams of one Redis server, standalone or found through Sentinel.

    Args:
        sink_id: Names the sink in messages.
        uri: See `redis_endpoint.Endpoint`.
        connect_timeout: Seconds for one try to connect.
        send_timeout: Seconds in which the server may neither take nor send a byte.
        batch_timeout: Seconds for one block, from its first byte to its acknowledgement.
        position_key: Key that holds the sink's position, for delivery exactly once.
        name: Of its connections on the server, one live sender's at a time: a new one ends
            those that an earlier run has left.

    Raises:
        SpecError: The URI is none.
    """

    def __init__(
        self,
        sink_id: str,
        uri: str,
        connect_timeout: float = 10.0,
        send_timeout: float = 5.0,
        batch_timeout: float = 30.0,
        *,
        position_key: str | None = None,
        name: str | None = None,
    ) -> None:
        self._sink_id = sink_id
        self._endpoint = Endpoint(sink_id, uri, connect_timeout, send_timeout)
        self._send_timeout = send_timeout
        self._batch_timeout = batch_timeout
        self._position_key = position_key
        self._name = name
        self._held: bytes | None = None  # what the key held when we read or set it last
        self._link: Link | None = None
        self._old: list[Identity] = []
        self._use = threading.RLock()  # held while connecting and sending
        self._closed = threading.Event()
        self._closed.set()

    @property
    def exactly_once(self) -> bool:
        """Whether there is a position key."""
        return self._position_key is not None

    def open(self) -> None:
        """Connect, and read the position where one is kept; tried five times.

        May be called again after `close`.

        Raises:
            SinkUnavailable: Not reachable, still loading, or a replica.
            AuthFailed: User or password refused.
            PermissionMissing: The user may not use transactions.
            SinkRejected: The server is a Redis Cluster, or has no such database.
        """
        with self._used():
            self._closed.clear()
            for wait in (*_CONNECT_WAITS, None):
                try:
                    self._held = self._connected(keeping=self.exactly_once).held
                    break
                except SinkUnavailable as error:
                    self._wait_or_raise(wait, error)

    def position(self) -> SinkPosition | None:
        """Return the position that `open` found, or that was stored since; None when there is none.

        Raises:
            SinkRejected: The key holds something else.
        """
        if self._held is None:
            return None
        try:
            return SinkPosition.from_json(self._held)
        except SinkRejected as error:
            raise SinkRejected(
                f"sink {self._sink_id}: key {self._position_key!r}: {error}; if nothing else needs "
                "it, delete it: the checkpoint counts then"
            ) from None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Append the batch's messages to their streams and return the last ordinal.

        A block that did not arrive for a reason that may pass is tried three times in all.

        Raises:
            SinkUnavailable: Connection lost, timeout, out of memory, read-only, loading, closed.
            AuthFailed: The server wants other credentials by now.
            PermissionMissing: The user may not run a command, or not write a stream.
            SinkRejected: A stream's name belongs to a key of another type, or the server refuses
                a message for another lasting reason.
            PositionMoved: The position key is not what this sender left there; what was sent
                since then has not arrived.
        """
        with self._used():
            keeping = None
            if batch.origin is not None and self._position_key is not None:
                keeping = resp.Keeping(
                    self._position_key, lambda row: batch.position_at(row).to_json()
                )
            blocks = resp.pack_blocks(batch.messages, batch.replay, keeping=keeping)
            block = next(blocks, None)
            while block is not None:
                block = self._deliver(block, blocks, batch, guard)
            return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """End the connection, also under a thread that is sending: its `send` then fails."""
        self._closed.set()
        if (link := self._link) is not None:
            link.interrupt()
        if self._use.acquire(timeout=1):  # else a thread is connecting, and will see `_closed`
            try:
                self._drop()
            finally:
                self._use.release()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._use:
            try:
                yield
            finally:
                if self._closed.is_set():
                    self._drop()

    def _deliver(
        self, block: resp.Block, blocks: Iterator[resp.Block], batch: SinkBatch, guard: SendGuard
    ) -> resp.Block | None:
        """Deliver one block, and return the next one, packed while the server worked."""
        following: list[resp.Block | None] = []
        sent = False
        for wait in (*_BLOCK_WAITS, None):
            try:
                link = self._connected(keeping=block.position is not None)
                if block.position is not None:
                    if sent and link.held == block.position:
                        break  # it had arrived, its acknowledgement had not
                    if link.held != self._held:
                        raise self._moved()
                self._take_over(link, batch, guard)
                guard()  # as late as can be: connecting may have taken long
                deadline = time.monotonic() + self._batch_timeout
                sent = True
                link.transmit(block, deadline)
                if not following:
                    following.append(next(blocks, None))
                verdict = link.receive(deadline)
                if verdict.error is None and verdict.executed:
                    break
                if verdict.error is None:
                    raise self._moved()
                raise self._refused(verdict, block, batch)
            except SinkUnavailable as error:
                self._wait_or_raise(wait, error)
        if block.position is not None:
            self._held = block.position
        return following[0] if following else next(blocks, None)

    def _take_over(self, link: Link, batch: SinkBatch, guard: SendGuard) -> None:
        """Before the first live block of a connection, end those of earlier runs; replays do not."""
        if self._name is not None and batch.replay is None and not link.alone:
            guard()  # a run that was overtaken must not end its successor's connection
            with self._giving_up(link.address):
                link.end_others(self._name)

    def _moved(self) -> PositionMoved:
        return PositionMoved(
            f"sink {self._sink_id}: key {self._position_key!r} is not what this run left there: "
            "another sender is at work, or the server has lost data"
        )

    def _wait_or_raise(self, wait: float | None, error: SinkUnavailable) -> None:
        if wait is None or isinstance(error, TimedOut) or self._closed.wait(wait):
            raise error

    def _refused(
        self, verdict: resp.Verdict, block: resp.Block, batch: SinkBatch
    ) -> DeltaforgeError:
        stream = None
        if verdict.row == block.rows:
            stream = self._position_key
        elif verdict.row is not None:
            stream = batch.messages.column("destination")[block.start + verdict.row].as_py()
        return refusal(self._sink_id, verdict.error or "EXECABORT", stream)

    def _connected(self, *, keeping: bool) -> Link:
        """Return a link that is ready for a block, which keeps the position or does not.

        Makes a new link when there is none.
        """
        self._raise_when_closed()
        if self._link is not None and not self._link.clean:
            self._drop()
        if (link := self._link) is None:
            with self._giving_up("redis sentinel"):
                connection = self._endpoint.connection()
            link = self._link = Link(self._sink_id, connection, self._send_timeout)
            with self._giving_up(link.address):
                link.connect()
                self._end_old_connections(link)
        with self._giving_up(link.address):
            link.watch(self._position_key if keeping else None)
        self._raise_when_closed()  # `close` may have come before there was a socket to end
        return link

    @contextlib.contextmanager
    def _giving_up(self, where: str) -> Iterator[None]:
        """Translate what redis-py raises, and give the connection up after any error."""
        try:
            yield
        except redis.RedisError as error:
            self._drop()
            raise translated(self._sink_id, where, error) from error
        except DeltaforgeError:
            self._drop()
            raise

    def _raise_when_closed(self) -> None:
        if self._closed.is_set():
            raise SinkUnavailable(f"sink {self._sink_id}: closed")

    def _end_old_connections(self, link: Link) -> None:
        """Make sure that nothing sent on a broken connection runs after what comes next."""
        for old in self._old:
            known = old.server and link.identity.server
            if known and old.server != link.identity.server:
                continue  # that server process is gone, with everything it had not read
            if not (known and link.kill(old.client_id)):
                self._closed.wait(_DRAIN_SECONDS)  # not permitted: let it read what it has
        self._old.clear()

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            if link.sending:
                self._old.append(link.identity)
            link.close()
