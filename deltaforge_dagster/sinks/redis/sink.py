"""The Redis sink: each message becomes one entry of its destination stream.

An entry has the fields `event_id`, `idempotency_key`, `df-event` (the envelope; the name is
configurable), `df-key` (the message key, or else the event id), `df-headers` if there are any, and
`df-replay` in a replay. Streams are never trimmed.

Delivery is at least once; consumers can drop an `idempotency_key` that they have seen. Or it is
exactly once: each block also sets a key of the server to the sink's position, and has no effect if
the key has changed since this sender last read or set it (redis.io, "Transactions", section
"Optimistic locking using check-and-set"). The key is in the database that the URI selects.

Messages are sent in blocks (`resp`), transactions of at most 5,000 entries. While the server
executes a block, the next one is packed and queued there, but executed only after that one is
acknowledged. So the server need not wait for this side, and after any error it holds whole blocks
from the start of the batch, without gaps.

A repeated block must not be followed by its first attempt: bytes of a broken connection may still
be unread in a paused server. So the socket is reset instead of closed, and the next connection ends
the old one on the server (`CLIENT KILL ID`) before it sends anything. If the sink keeps a position,
the next connection then reads it and thus knows whether the block arrived.

In a Redis Cluster the messages of a batch are sent to one slot after the other, each in this way:
the guarantees for a batch apply to the streams of each slot (`cluster`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sinks.connections import DEFAULT_TIMEOUTS, SinkTimeouts, TimedOut, Use
from deltaforge_dagster.sinks.redis import resp
from deltaforge_dagster.sinks.redis.cluster import Cluster, Node, by_slot, slot_of
from deltaforge_dagster.sinks.redis.link import Address, Endpoint, Redirected, TooLarge, refusal
from deltaforge_dagster.sinks.redis.resp import Verdict

_CONNECT_WAITS = (0.1, 0.2, 0.4, 0.8)
_BLOCK_WAITS = (0.1, 0.2)
"""Seconds between attempts; there is one more attempt than waits."""

_AHEAD_BYTES = 1 << 19
"""Size of a block up to which it is queued while the one before executes.

A larger one could have a message that is too large for the server, which would close the
connection, so that the answer to the block before would be lost. No server refuses messages of less
than 1 MiB (the least `proto-max-bulk-len`).
"""

_MOST_REDIRECTIONS = 16
"""Redirections of one block that are followed without a wait."""


@dataclass(slots=True)
class _Delivery:
    """The delivery of one block to the node of a slot, and the next block of the batch."""

    block: resp.PackedCommands
    blocks: Iterator[resp.PackedCommands]
    batch: SinkBatch
    slot: int | None
    sent: bool = False
    redirections: int = 0
    _packed: bool = False
    _next: resp.PackedCommands | None = None

    @property
    def ordinal(self) -> int:
        """The block's first ordinal; a message too large for others is alone in its block."""
        return cast("int", self.batch.messages.column("ordinal")[self.block.start].as_py())

    def next_block(self) -> resp.PackedCommands | None:
        """Return the next block of the batch, packed at the first call, or None after the last."""
        if not self._packed:
            self._next = next(self.blocks, None)
            self._packed = True
        return self._next


class RedisSink:
    """Sends to streams of one Redis server, standalone or found through Sentinel, or of a cluster.

    Args:
        sink_id: Name of the sink in messages.
        uri: See `endpoint.Endpoint`.
        timeouts: How long the sink waits. A block that was queued while the one before was executed
            has its time from the acknowledgement of that one.
        position_key: Key that holds the sink's position, for exactly-once delivery.
        position_seconds: Time after which the key expires, counted from the last block; None to
            keep it forever.
        hash_tag: Hash tag shared by all streams (`cluster.common_tag`); on a cluster it is
            appended to the position key, which is then in the same slot.
        event_field: Name of the field with the envelope.
        name: Name of the sink's connections on the server. Only one live sender uses it at a time:
            a new one ends the connections that an earlier run has left.

    Raises:
        SpecError: The URI is invalid.
    """

    def __init__(
        self,
        sink_id: str,
        uri: str,
        timeouts: SinkTimeouts = DEFAULT_TIMEOUTS,
        *,
        position_key: str | None = None,
        position_seconds: int | None = None,
        hash_tag: str | None = None,
        event_field: resp.EventField = "df-event",
        name: str | None = None,
    ) -> None:
        self._sink_id = sink_id
        self._endpoint = Endpoint(sink_id, uri, timeouts.connect, timeouts.send)
        self._timeouts = timeouts
        self._position_key = position_key
        self._position_seconds = position_seconds
        self._hash_tag = hash_tag
        self._event_field = event_field
        self._name = name
        self._stored: bytes | None = None  # the key's value when this sink last read or set it
        self._use = Use(sink_id, self._drop)
        self._server = self._node(None)
        self._cluster: Cluster | None = None

    takes_parts = False
    """False: each block is a transaction anyway, so larger batches save no commits."""

    @property
    def exactly_once(self) -> bool:
        """Whether there is a position key."""
        return self._position_key is not None

    def open(self) -> None:
        """Connect, and read the position if the sink keeps one; make up to five attempts.

        May be called again after `close`.

        Raises:
            SinkUnavailable: The server cannot be reached, is still loading, or is a replica.
            AuthFailed: User or password refused.
            PermissionMissing: The user may not use transactions.
            SinkRejected: The server has no such database; or it is a cluster, delivery is exactly
                once, and the streams do not share a slot.
        """
        with self._use.exclusive():
            self._use.closed.clear()
            for wait in (*_CONNECT_WAITS, None):
                try:
                    in_cluster = self._server.connected().in_cluster
                    self._cluster = self._as_cluster() if in_cluster else None
                    key = self._key()
                    slot = slot_of(key) if key is not None and in_cluster else None
                    self._stored = self._node_of(slot).connected(key).stored
                    break
                except SinkUnavailable as error:
                    self._wait_or_raise(wait, error)

    def rehearse(self, streams: Iterable[str]) -> None:
        """Check, without writing, that the server would accept entries for these streams.

        Call it after `open`.

        Raises:
            PermissionMissing: The user may not write one of the streams, or the sink's position.
            SinkUnavailable: The server cannot be reached, is out of memory or read-only.
        """
        with self._use.exclusive():
            writes = [(stream, ["XADD", stream, "*", self._event_field, ""]) for stream in streams]
            if (position := self._key()) is not None:
                writes += [(position, ["SET", position, ""]), (position, ["UNWATCH"])]
            of_nodes: dict[Node, list[tuple[str, list[str]]]] = {}
            for key, command in writes:
                node = self._node_of(None if self._cluster is None else slot_of(key))
                of_nodes.setdefault(node, []).append((key, command))
            for node, commands in of_nodes.items():
                link = node.connected()
                with node.giving_up(link.address):
                    link.rehearse(commands)

    def position(self) -> SinkPosition | None:
        """Return the position that `open` read or `send` stored since, or None if there is none.

        Raises:
            SinkRejected: The key holds something else.
        """
        if self._stored is None:
            return None
        try:
            return SinkPosition.from_json(self._stored)
        except SinkRejected as error:
            raise SinkRejected(
                f"sink {self._sink_id}: key {self._key()!r}: {error}; if nothing else needs "
                "it, delete it: the checkpoint counts then"
            ) from None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Append the batch's messages to their streams and return the last ordinal.

        A block that fails for a transient reason is attempted three times in all.

        Raises:
            SinkUnavailable: Connection lost, timeout, out of memory, read-only, loading, closed.
            AuthFailed: The server no longer accepts the credentials.
            PermissionMissing: The user may not run a command or write a stream.
            SinkRejected: A stream's name belongs to a key of another type, or the server refuses
                a message for another permanent reason.
            Undeliverable: A message is larger than the server accepts; or delivery is exactly once
                on a cluster, and the message's stream is in another slot than the position. All
                messages before its change have arrived.
            PositionMoved: The position key has changed since this sender last read or set it; the
                block sent since then has not arrived.
        """
        with self._use.exclusive():
            if self._cluster is None:
                self._send_to(None, batch, guard)
            else:
                self._send_to_slots(batch, guard)
            return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """Close the connections; a `send` that is running in another thread fails."""
        self._use.end(self._interrupt)

    def _interrupt(self) -> None:
        for node in self._nodes():
            node.interrupt()

    def _node(self, address: Address | None) -> Node:
        return Node(
            self._sink_id,
            lambda: self._endpoint.connection(address),
            self._timeouts.send,
            self._use,
        )

    def _nodes(self) -> list[Node]:
        return [self._server] if self._cluster is None else self._cluster.nodes

    def _as_cluster(self) -> Cluster:
        """Return the server's cluster, which is created once in the sink's lifetime."""
        if self._position_key is not None and self._hash_tag is None:
            raise SinkRejected(
                f"sink {self._sink_id}: exactly_once needs all streams in one slot of a Redis "
                "Cluster, together with the position; put the same literal text in braces into "
                "each name, such as stream: '{shop}.${source.table}'"
            )
        if self._cluster is None:
            return Cluster(self._sink_id, self._server, self._node)
        self._cluster.forget()
        return self._cluster

    def _key(self) -> str | None:
        if self._position_key is None or self._cluster is None:
            return self._position_key
        return f"{self._position_key}:{{{self._hash_tag}}}"

    def _node_of(self, slot: int | None) -> Node:
        if self._cluster is None or slot is None:
            return self._server
        return self._cluster.node_of(slot)

    def _send_to_slots(self, batch: SinkBatch, guard: SendGuard) -> None:
        """Send to one slot after another; all messages before an undeliverable change are sent."""
        parts = by_slot(batch)
        failure = self._other_slot_error(parts) if batch.origin is not None else None
        for slot, part in parts:
            rows = part.messages
            if failure is not None:
                before = np.searchsorted(rows.column("ordinal").to_numpy(), failure.ordinal)
                rows = rows.slice(0, int(before))
            try:
                if rows.num_rows:
                    self._send_to(slot, replace(part, messages=rows), guard)
            except Undeliverable as error:
                failure = error
        if failure is not None:
            raise failure

    def _other_slot_error(self, parts: list[tuple[int, SinkBatch]]) -> Undeliverable | None:
        """Return the error for the first message outside the position's slot, or None."""
        if (key := self._key()) is None:
            return None
        firsts = [
            (cast("int", part.messages.column("ordinal")[0].as_py()), part)
            for slot, part in parts
            if slot != slot_of(key)
        ]
        if not firsts:
            return None
        ordinal, part = min(firsts, key=lambda first: first[0])
        stream = part.messages.column("destination")[0].as_py()
        return Undeliverable(
            f"sink {self._sink_id}: stream {stream!r} is not in the slot of the sink's position, "
            f"which exactly_once needs on a Redis Cluster: its name lacks {{{self._hash_tag}}}",
            ordinal,
            "routing",
        )

    def _send_to(self, slot: int | None, batch: SinkBatch, guard: SendGuard) -> None:
        key = self._key() if batch.origin is not None else None
        keeping = None
        if key is not None:
            keeping = resp.PositionKey(
                key, lambda row: batch.position_at(row).to_json(), self._position_seconds
            )
        blocks = resp.pack_blocks(
            batch.messages, batch.replay, keeping=keeping, event_field=self._event_field
        )
        block = next(blocks, None)
        while block is not None:
            block = self._deliver(_Delivery(block, blocks, batch, slot), guard)

    def _deliver(self, delivery: _Delivery, guard: SendGuard) -> resp.PackedCommands | None:
        """Deliver one block and return the next one, which is packed while the server works."""
        waits = iter(_BLOCK_WAITS)
        while True:
            try:
                self._attempt(delivery, guard)
            except TooLarge as error:
                raise Undeliverable(str(error), delivery.ordinal, "too_large") from error
            except SinkUnavailable as error:
                if not self._follow_redirection(delivery, error):
                    self._wait_or_raise(next(waits, None), error)
            else:
                return delivery.next_block()

    def _attempt(self, delivery: _Delivery, guard: SendGuard) -> None:
        block = delivery.block
        keeping = block.position is not None
        node = self._node_of(delivery.slot)
        link = node.connected(self._key() if keeping else None, block)
        # If the position is there, only the acknowledgement was lost.
        arrived = delivery.sent and link.stored == block.position
        if not (keeping and arrived):
            if keeping and link.stored != self._stored:
                raise self._position_moved()
            self._take_over(node, delivery.batch, guard)
            deadline = time.monotonic() + self._timeouts.batch
            if link.queued is None:
                link.queue(block, deadline)
            guard()  # as late as possible: connecting and sending may have taken long
            delivery.sent = True
            link.execute(deadline)
            following = delivery.next_block()
            if following is not None and len(following.queued) <= _AHEAD_BYTES:
                link.queue(following, deadline)
            verdict = link.receive(deadline)
            if verdict.error is not None:
                raise self._refused(verdict, delivery)
            if not verdict.executed:
                raise self._position_moved()
        if keeping:
            self._stored = block.position

    def _follow_redirection(self, delivery: _Delivery, error: SinkUnavailable) -> bool:
        """Update the cluster's slot map from the error; return whether to retry without a wait."""
        if self._cluster is None:
            return False
        if not isinstance(error, Redirected):
            self._cluster.forget()
            return False
        delivery.redirections += 1
        # WATCH does not follow a slot that is being migrated.
        if error.asking and delivery.block.position is not None:
            return False
        self._cluster.follow(error)
        return delivery.redirections <= _MOST_REDIRECTIONS

    def _take_over(self, node: Node, batch: SinkBatch, guard: SendGuard) -> None:
        """End the connections of earlier runs before a connection's first live block."""
        if self._name is not None and batch.replay is None and not node.alone:
            guard()  # a run that has lost its lease must not end its successor's connection
            node.end_others(self._name)

    def _position_moved(self) -> PositionMoved:
        return PositionMoved(
            f"sink {self._sink_id}: key {self._key()!r} is not what this run left there: "
            "another sender is at work, or the server has lost data"
        )

    def _wait_or_raise(self, wait: float | None, error: SinkUnavailable) -> None:
        if wait is None or isinstance(error, TimedOut) or self._use.closed.wait(wait):
            raise error

    def _refused(self, verdict: Verdict, delivery: _Delivery) -> DeltaforgeError:
        stream = None
        if verdict.row == delivery.block.rows:
            stream = self._key()
        elif verdict.row is not None:
            row = delivery.block.start + verdict.row
            stream = delivery.batch.messages.column("destination")[row].as_py()
        return refusal(self._sink_id, verdict.error or "EXECABORT", stream)

    def _drop(self) -> None:
        for node in self._nodes():
            node.drop()
