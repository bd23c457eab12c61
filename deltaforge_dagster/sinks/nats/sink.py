"""The NATS sink: each message goes to its subject, into a JetStream stream or to subscribers only.

A message has the envelope as its payload and these headers: `Nats-Msg-Id` (idempotency key and sink
id, separated by `|`), `df-key` if there is a key, the event's headers, and `df-replay` in a replay,
whose message ids also end in `|replay|<run>`.

**With a stream**, delivery is at least once. Within its `duplicate_window`, the stream drops
messages that it already has, by `Nats-Msg-Id`. Messages are sent in blocks (`pack`), two of which
may be unacknowledged, and chained: a message is stored only if the message before it is the last
one in the stream. So the stream's answer to a message covers all messages before it, and in a chain
in which everything was stored only one in a hundred is answered. If somebody else publishes into
the stream between two messages, the chain breaks. That is not an error: a new chain begins with the
first refused message, in smaller blocks for a while. The first message of a chain is stored only if
the stream's last sequence is the one that the sink knows (`Nats-Expected-Last-Sequence`), so that
it cannot be stored in addition to bytes that an old connection delivers late. This condition is
dropped if chains break repeatedly without progress.

**Exactly once**: the first message of each chain is stored only if the last sequence on the sink's
subjects is the one that the sink left there (`Nats-Expected-Last-Subject-Sequence`), so nobody else
can have published to them. Each message is an atomic step, and its header `df-position` holds the
sink's position after it (`stream`).

**Without a stream**, messages are published with core NATS: nothing is stored, current subscribers
receive them, and the server's PONG acknowledges that it has read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from deltaforge_dagster.config.templates import Template
from deltaforge_dagster.errors import PositionMoved, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sinks.connections import DEFAULT_TIMEOUTS, SinkTimeouts, TimedOut, Use
from deltaforge_dagster.sinks.nats.link import Address, Login, NatsLink, addresses
from deltaforge_dagster.sinks.nats.publish import Publish, PublishAttempt, PublishLimits
from deltaforge_dagster.sinks.nats.session import Session
from deltaforge_dagster.sinks.nats.stream import Rights, StreamTail, rights

_CONNECT_WAITS = (0.1, 0.2, 0.4, 0.8)
_BLOCK_WAITS = (0.1, 0.2)
"""Seconds between attempts; there is one more attempt than waits."""

_DRAIN_SECONDS = 1.0  # time for the server to read what has arrived; see `_drop`


def subject_pattern(template: Template) -> str:
    """Return a pattern that matches all subjects of a template.

    It is `shop.>` for `shop.${source.table}`. The value of a variable may contain dots, so only the
    tokens before the first variable are fixed.
    """
    literal, *rest = template.parts
    if isinstance(literal, str) and not rest:
        return literal
    prefix = literal.rpartition(".")[0] if isinstance(literal, str) else ""
    return f"{prefix}.>" if prefix else ">"


class NatsSink:
    """Sends to the subjects of one NATS system.

    Args:
        sink_id: Name of the sink in messages, and suffix of every message id.
        url: See `link`.
        pattern: Matches every subject to which the sink sends.
        login: Credentials.
        stream: The JetStream stream that captures these subjects; None for core NATS.
        exactly_once: Whether the sink keeps its position; requires a stream.
        name: Name of the sink's connections on the server.
        timeouts: How long the sink waits.

    Raises:
        SpecError: The URL is invalid.
    """

    takes_parts = False
    """False: positions are in the messages, so larger batches save nothing."""

    def __init__(
        self,
        sink_id: str,
        url: str,
        pattern: str,
        login: Login | None = None,
        *,
        stream: str | None = None,
        exactly_once: bool = False,
        name: str = "deltaforge",
        timeouts: SinkTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._sink_id = sink_id
        self._addresses = addresses(sink_id, url)
        self._login = login or Login()
        self._limits = PublishLimits(f"|{sink_id}", pattern, stream, exactly_once, timeouts.batch)
        self._name = name
        self._timeouts = timeouts
        self._link: NatsLink | None = None
        self._session: Session | None = None
        self._tail: StreamTail | None = None  # when this sink last read or wrote the stream
        # By the run id of the replay; None for live delivery.
        self._attempts: dict[str | None, PublishAttempt] = {None: PublishAttempt()}
        self._undrained = False
        self._use = Use(sink_id, self._drop)

    @property
    def exactly_once(self) -> bool:
        """Whether the sink keeps its position."""
        return self._limits.exactly_once

    def open(self) -> None:
        """Connect and check the stream, in up to five attempts; may be called again after `close`.

        Raises:
            SinkUnavailable: No server can be reached.
            AuthFailed: Credentials or a certificate refused.
            PermissionMissing: The user may not query the stream.
            SinkRejected: JetStream is not enabled, or the stream does not exist, does not capture
                the subjects, or has an unsuitable configuration.
            SettingsError: The credentials file cannot be read or is invalid.
        """
        with self._used():
            self._use.closed.clear()
            self._tail = None
            for wait in (*_CONNECT_WAITS, None):
                try:
                    self._connected()
                    break
                except SinkUnavailable as error:
                    self._wait_or_raise(wait, error)

    def rights(self) -> Rights | None:
        """Return the subjects to which the user may publish, or None if the server does not tell.

        Nothing is published. Call it after `open`.

        Raises:
            SinkUnavailable: The server does not answer.
        """
        with self._used():
            return rights(self._connected().link, self._limits.batch_timeout)

    def position(self) -> SinkPosition | None:
        """Return the position stored in the stream; None if none is stored or the sink keeps none.

        Raises:
            SinkUnavailable: The server does not answer.
            SinkRejected: Another publisher writes to the sink's subjects, or the stored position is
                invalid.
        """
        if not self.exactly_once:
            return None
        with self._used():
            self._tail = None
            session = self._connected()
            session.read_tail()
            self._tail = session.tail
            if session.tail.problem is not None:
                raise SinkRejected(session.tail.problem)
            return session.tail.position

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Publish the batch's messages and return the last ordinal.

        A block that fails for a transient reason is attempted three times in all.

        Raises:
            SinkUnavailable: Connection lost, timeout, no room, no leader, closed.
            AuthFailed: The server no longer accepts the credentials.
            PermissionMissing: The user may not publish to a subject.
            Undeliverable: A message has a subject, key, headers or size that NATS can never accept.
            SinkRejected: The stream does not capture a subject, or the server refuses for another
                permanent reason.
            PositionMoved: The stream does not hold what this sender left on the sink's subjects.
        """
        with self._used():
            if batch.replay not in self._attempts:
                self._attempts = {None: self._attempts[None], batch.replay: PublishAttempt()}
            publish = Publish(batch, self._attempts[batch.replay])
            publish.attempt.begin(batch)
            waits = iter(_BLOCK_WAITS)
            while not publish.done:
                row = publish.row
                try:
                    self._connected().deliver(publish, guard)
                except SinkUnavailable as error:
                    if publish.uncertain and batch.origin is not None and self.exactly_once:
                        raise  # the position must be read to know what has arrived
                    if publish.row > row:
                        waits = iter(_BLOCK_WAITS)
                    self._wait_or_raise(next(waits, None), error)
            ordinal = cast("int", batch.messages.column("ordinal")[-1].as_py())
            publish.attempt.acknowledged = (batch.segment, ordinal)
            return ordinal

    def close(self) -> None:
        """Close the connection; a `send` that is running in another thread fails."""
        self._use.end(self._interrupt)

    def _interrupt(self) -> None:
        if (link := self._link) is not None:
            link.interrupt()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._use.exclusive():
            try:
                yield
            except BaseException:
                self._give_up_broken()
                raise

    def _connected(self) -> Session:
        """Return a session that can send; create one if there is none.

        Raises:
            PositionMoved: The stream does not hold what the previous session left there.
        """
        self._use.raise_when_closed()
        if self._session is not None:
            with contextlib.suppress(SinkUnavailable):
                self._session.link.poll()
            self._give_up_broken()
        if self._session is None:
            if self._undrained:  # the server may still have unread messages; see `_drop`
                self._use.closed.wait(_DRAIN_SECONDS)
                self._undrained = False
            self._link = link = self._connect()
            session = Session(link, self._limits)
            session.begin()
            if self.exactly_once:
                session.read_tail()
                if self._tail is not None and session.tail.live != self._tail.live:
                    raise PositionMoved(
                        f"{link.where}: stream {self._limits.stream!r} does not hold what this run "
                        "left there: another sender is at work, or the server has lost data"
                    )
            self._session = session
        # `close` may have been called before there was a socket to end.
        self._use.raise_when_closed()
        return self._session

    def _connect(self) -> NatsLink:
        failure: SinkUnavailable | None = None
        for address in self._addresses:
            link = self._link = self._link_to(address)
            try:
                link.connect(self._login)
            except SinkUnavailable as error:
                link.close()
                failure = failure or error
            except BaseException:
                link.close()
                raise
            else:
                return link
            self._use.raise_when_closed()
        assert failure is not None
        raise failure

    def _link_to(self, address: Address) -> NatsLink:
        return NatsLink(
            self._sink_id, address, self._name, self._timeouts.connect, self._timeouts.send
        )

    def _wait_or_raise(self, wait: float | None, error: SinkUnavailable) -> None:
        self._give_up_broken()
        if wait is None or isinstance(error, TimedOut) or self._use.closed.wait(wait):
            raise error

    def _give_up_broken(self) -> None:
        link = self._link
        if link is not None and (self._session is None or not link.usable or link.sending):
            self._drop()

    def _drop(self) -> None:
        link, self._link = self._link, None
        session, self._session = self._session, None
        if session is not None and self._tail is not None:
            self._tail = session.tail
        if link is not None:
            # A stream refuses late messages. Without a stream, only a pause keeps the order.
            self._undrained = link.sending and self._limits.stream is None
            link.close()
