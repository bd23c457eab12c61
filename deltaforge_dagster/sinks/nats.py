"""NATS: each message goes to the subject its row names, into a JetStream stream or to whoever listens.

A message has the envelope as its value and the headers `Nats-Msg-Id` (idempotency key and sink id, `|`
between them), `df-key` where there is a key, the event's headers, and `df-replay` in a replay, whose ids
also end in `|replay|<run>`.

**With a stream** delivery is at least once, and a stream drops what it has already, by `Nats-Msg-Id`, within its
`duplicate_window`. Messages leave in blocks (`nats_pack`), a next one before the one before is
acknowledged, but chained: none is stored unless the one before it is the stream's last. When somebody
else publishes into the stream between two of them, the chain breaks, which is no error: it begins
again with the first message that was refused, in smaller blocks for a while. A message that begins a chain after a
connection was made must find the stream as it is known (`Nats-Expected-Last-Sequence`), so that what an old
connection still delivers late and this one's cannot both be stored.

**Exactly once** the first message of each chain must find the sink's subjects as the sink left them
(`Nats-Expected-Last-Subject-Sequence`); with that nobody else can have been there. Each message is an
atomic step, and the header `df-position` says which position the sink has with it (`nats_stream`).

**Without a stream** messages are published as core NATS does it: nothing is stored, whoever listens gets them, and
the server's PONG says that it has read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from deltaforge_dagster.config.templates import Template
from deltaforge_dagster.errors import PositionMoved, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sinks.deadlines import TimedOut
from deltaforge_dagster.sinks.nats_endpoint import Address, Login, addresses
from deltaforge_dagster.sinks.nats_link import Link
from deltaforge_dagster.sinks.nats_rights import Rights, rights
from deltaforge_dagster.sinks.nats_session import Session
from deltaforge_dagster.sinks.nats_stream import Held
from deltaforge_dagster.sinks.nats_task import Pass, Task, Terms
from deltaforge_dagster.sinks.use import Use

_CONNECT_WAITS = (0.1, 0.2, 0.4, 0.8)
_BLOCK_WAITS = (0.1, 0.2)
"""Seconds between attempts; there is one attempt more than waits."""

_DRAIN_SECONDS = 1.0


def subject_pattern(template: Template) -> str:
    """Return the pattern that every subject of a template fits, `shop.>` for `shop.${source.table}`.

    What a variable becomes may have dots in it, so only the words before the first one are known.
    """
    literal, *rest = template.parts
    if isinstance(literal, str) and not rest:
        return literal
    known = literal.rpartition(".")[0] if isinstance(literal, str) else ""
    return f"{known}.>" if known else ">"


class NatsSink:
    """Sends to the subjects of one NATS system.

    Args:
        sink_id: Names the sink in messages, and ends every message id.
        url: See `nats_endpoint`.
        pattern: Every subject the sink sends to fits it.
        login: Who we are.
        stream: The JetStream stream that takes these subjects; None for core NATS.
        exactly_once: Whether the sink keeps its position; needs a stream.
        name: Of its connections on the server.
        connect_timeout: Seconds for one try to connect.
        send_timeout: Seconds in which the server may neither take nor send a byte.
        batch_timeout: Seconds for one block, from its first byte to its acknowledgement.

    Raises:
        SpecError: The URL is none.
    """

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
        connect_timeout: float = 10.0,
        send_timeout: float = 5.0,
        batch_timeout: float = 30.0,
    ) -> None:
        self._sink_id = sink_id
        self._addresses = addresses(sink_id, url)
        self._login = login or Login()
        self._terms = Terms(f"|{sink_id}", pattern, stream, exactly_once, batch_timeout)
        self._name = name
        self._connect_timeout = connect_timeout
        self._send_timeout = send_timeout
        self._link: Link | None = None
        self._session: Session | None = None
        self._held: Held | None = None  # what the stream held when we read or wrote it last
        self._passes: dict[str | None, Pass] = {None: Pass()}  # by the run id of a replay
        self._undrained = False
        self._use = Use(sink_id, self._drop)

    @property
    def exactly_once(self) -> bool:
        """Whether the sink keeps its position."""
        return self._terms.exactly_once

    @property
    def commits(self) -> bool:
        """Whether a batch is atomic, or a chain."""
        return self.exactly_once

    def open(self) -> None:
        """Connect, and look at the stream; tried five times. May be called again after `close`.

        Raises:
            SinkUnavailable: Not reachable.
            AuthFailed: Credentials or a certificate refused.
            PermissionMissing: The user may not ask about the stream.
            SinkRejected: No JetStream, no such stream, or one that does not take the subjects.
            SettingsError: The credentials file is none.
        """
        with self._used():
            self._use.closed.clear()
            self._held = None
            for wait in (*_CONNECT_WAITS, None):
                try:
                    self._connected()
                    break
                except SinkUnavailable as error:
                    self._wait_or_raise(wait, error)

    def rights(self) -> Rights | None:
        """Return to which subjects the user may publish, None when the server does not tell.

        Nothing is published. Call it after `open`.

        Raises:
            SinkUnavailable: The server does not answer.
        """
        with self._used():
            return rights(self._connected().link, self._terms.batch_timeout)

    def position(self) -> SinkPosition | None:
        """Return the position that the stream holds; None when it holds or keeps none.

        Raises:
            SinkUnavailable: The server does not answer.
            SinkRejected: Another publisher writes to the sink's subjects.
        """
        if not self.exactly_once:
            return None
        with self._used():
            self._held = None
            session = self._connected()
            session.read_held()
            self._held = session.held
            if session.held.problem is not None:
                raise SinkRejected(session.held.problem)
            return session.held.position

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Publish the batch's messages and return the last ordinal.

        A block that did not arrive for a reason that may pass is tried three times in all.

        Raises:
            SinkUnavailable: Connection lost, timeout, no room, no leader, closed.
            AuthFailed: The server wants other credentials by now.
            PermissionMissing: The user may not publish to a subject.
            Undeliverable: A message that NATS can never take: its subject, key, headers or size.
            SinkRejected: A subject that is not the stream's, or refused for another lasting reason.
            PositionMoved: The sink's subjects are not as this sender left them.
        """
        with self._used():
            if batch.replay not in self._passes:
                self._passes = {None: self._passes[None], batch.replay: Pass()}
            task = Task(batch, self._passes[batch.replay])
            task.passing.begin(batch)
            waits = iter(_BLOCK_WAITS)
            while not task.done:
                row = task.row
                try:
                    self._connected().deliver(task, guard)
                except SinkUnavailable as error:
                    if task.uncertain and batch.origin is not None and self.exactly_once:
                        raise  # what has arrived must be read
                    if task.row > row:
                        waits = iter(_BLOCK_WAITS)
                    self._wait_or_raise(next(waits, None), error)
            ordinal = cast("int", batch.messages.column("ordinal")[-1].as_py())
            task.passing.acknowledged = (batch.segment, ordinal)
            return ordinal

    def close(self) -> None:
        """End the connection, also under a thread that is sending: its `send` then fails."""
        self._use.end(self._interrupt)

    def _interrupt(self) -> None:
        if (link := self._link) is not None:
            link.interrupt()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._use.held():
            try:
                yield
            except BaseException:
                self._give_up_broken()
                raise

    def _connected(self) -> Session:
        """Return a session that can send; makes one when there is none.

        Raises:
            PositionMoved: What the stream holds is not what the session before this one left there.
        """
        self._use.raise_when_closed()
        if self._session is not None:
            with contextlib.suppress(SinkUnavailable):
                self._session.link.look()
            self._give_up_broken()
        if self._session is None:
            if self._undrained:  # nothing tells what the server has yet to read; see `_drop`
                self._use.closed.wait(_DRAIN_SECONDS)
                self._undrained = False
            self._link = link = self._connect()
            session = Session(link, self._terms)
            session.begin()
            if self.exactly_once:
                session.read_held()
                if self._held is not None and session.held.live != self._held.live:
                    raise PositionMoved(
                        f"{link.where}: stream {self._terms.stream!r} does not hold what this run "
                        "left there: another sender is at work, or the server has lost data"
                    )
            self._session = session
        self._use.raise_when_closed()  # `close` may have come before there was a socket to end
        return self._session

    def _connect(self) -> Link:
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

    def _link_to(self, address: Address) -> Link:
        return Link(self._sink_id, address, self._name, self._connect_timeout, self._send_timeout)

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
        if session is not None and self._held is not None:
            self._held = session.held
        if link is not None:
            # A stream refuses what comes late; without one only time keeps it from overtaking.
            self._undrained = link.sending and self._terms.stream is None
            link.close()
