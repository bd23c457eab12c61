"""The servers of a sink: a node has one connection, and a cluster finds the node for each stream.

A key belongs to one of 16,384 slots, and each slot to one node (redis.io, "Redis cluster
specification"). A transaction is limited to one slot. So the messages for the streams of each slot
are sent separately, in order within the slot, and a sink that delivers exactly once needs its
position and all its streams in the same slot. The part of a key in braces is its *hash tag*, which
alone decides the slot: `{shop}.orders` and `{shop}.customers` share one.

The connection of a node is made on demand and dropped after an error.
"""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import redis

from deltaforge_dagster.config.templates import Template
from deltaforge_dagster.errors import DeltaforgeError, SinkUnavailable
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.connections import Use
from deltaforge_dagster.sinks.redis.link import Address, Identity, Redirected, RedisLink, translated
from deltaforge_dagster.sinks.redis.resp import PackedCommands

_DRAIN_SECONDS = 1.0  # time for a node to read what has arrived

_SLOTS = 16_384  # of Redis Cluster: CRC16 of a key, modulo this, is its slot


class Cluster:
    """Maps slots to nodes: the map is read from the cluster and corrected by its redirections.

    Args:
        sink_id: Name of the sink in messages.
        seed: Node that the sink's URI names.
        make_node: Returns a `Node` for an address.
    """

    def __init__(self, sink_id: str, seed: Node, make_node: Callable[[Address], Node]) -> None:
        self._sink_id = sink_id
        self._seed = seed
        self._make_node = make_node
        self._nodes: dict[Address, Node] = {}
        self._slots: dict[int, Address] = {}
        self._asking_address: Address | None = None

    @property
    def nodes(self) -> list[Node]:
        """All known nodes."""
        return [*self._nodes.values(), self._seed]

    def node_of(self, slot: int) -> Node:
        """Return the node of a slot, according to the latest information.

        Raises:
            SinkUnavailable: No node answers, or none has the slot.
        """
        if not self._slots:
            self._load_map()
        if slot not in self._slots:
            raise SinkUnavailable(f"sink {self._sink_id}: no node of the cluster has slot {slot}")
        asked, self._asking_address = self._asking_address, None
        node = self._node(asked or self._slots[slot])
        node.asking = asked is not None
        return node

    def follow(self, redirected: Redirected) -> None:
        """Apply a redirection to the next block (ASK) or to the map (MOVED)."""
        if redirected.asking:
            self._asking_address = redirected.address
        else:
            self._slots[redirected.slot] = redirected.address

    def forget(self) -> None:
        """Discard the map, so that it is read from the cluster again before the next block."""
        self._slots.clear()
        self._asking_address = None

    def _node(self, address: Address) -> Node:
        if address not in self._nodes:
            self._nodes[address] = self._make_node(address)
        return self._nodes[address]

    def _load_map(self) -> None:
        """Read the map from the first node that answers; connected nodes are tried first."""
        for node in sorted(self.nodes, key=lambda node: node.link is None):
            try:
                link = node.connected()
                with node.giving_up(link.address):
                    ranges = link.slots()
            except SinkUnavailable as error:
                failure = error
            else:
                self._slots = {slot: address for slots, address in ranges for slot in slots}
                return
        raise failure


class Node:
    """One server.

    Args:
        sink_id: Name of the sink in messages.
        connect: Returns a connection that is not connected yet.
        send_timeout: Seconds after which a server that neither takes nor sends a byte is given up.
        use: The `Use` of the sink to which the node belongs.

    Attributes:
        link: The connection, or None.
        asking: Whether the next block is for a slot that is being migrated to this cluster node.
    """

    def __init__(
        self,
        sink_id: str,
        connect: Callable[[], redis.Connection],
        send_timeout: float,
        use: Use,
    ) -> None:
        self.link: RedisLink | None = None
        self.asking = False
        self._sink_id = sink_id
        self._connect = connect
        self._send_timeout = send_timeout
        self._use = use
        self._old_connections: list[Identity] = []

    def connected(
        self, watched: str | None = None, block: PackedCommands | None = None
    ) -> RedisLink:
        """Return a link that is ready for a block; connect if there is none.

        Args:
            watched: Key that must not change until the block is executed; None for none.
            block: The block, which the server may have queued already; anything else that it has
                queued is given up.
        """
        self._use.raise_when_closed()
        if self.link is not None and not self.link.ready_for(block):
            self.drop()
        if (link := self.link) is None:
            with self.giving_up("redis sentinel"):
                connection = self._connect()
            link = self.link = RedisLink(self._sink_id, connection, self._send_timeout)
            with self.giving_up(link.address):
                link.connect()
                self._end_old_connections(link)
        with self.giving_up(link.address):
            link.watch(watched)
            if self.asking:
                link.ask()
                self.asking = False
        # `close` may have been called before there was a socket to end.
        self._use.raise_when_closed()
        return link

    @contextlib.contextmanager
    def giving_up(self, where: str) -> Iterator[None]:
        """Translate errors of redis-py, and drop the connection after any error."""
        try:
            yield
        except redis.RedisError as error:
            self.drop()
            raise translated(self._sink_id, where, error) from error
        except DeltaforgeError:
            self.drop()
            raise

    @property
    def alone(self) -> bool:
        """Whether the other connections of the same name have been ended."""
        return self.link is not None and self.link.alone

    def end_others(self, name: str) -> None:
        """Give the connection `name` and end the others that have it."""
        assert self.link is not None
        with self.giving_up(self.link.address):
            self.link.end_others(name)

    def interrupt(self) -> None:
        """Make calls in another thread fail that are waiting for the server."""
        if (link := self.link) is not None:
            link.interrupt()

    def drop(self) -> None:
        """Close the connection.

        If the server may still execute a block of it, the next connection ends it there first.
        """
        link, self.link = self.link, None
        if link is not None:
            if link.executing:
                self._old_connections.append(link.identity)
            link.close()

    def _end_old_connections(self, link: RedisLink) -> None:
        """Make sure that nothing sent on a broken connection runs after the blocks that follow."""
        for old in self._old_connections:
            both_known = old.server and link.identity.server
            if both_known and old.server != link.identity.server:
                continue  # that server process is gone, with everything that it had not read
            if not (both_known and link.kill(old.client_id)):
                self._use.closed.wait(_DRAIN_SECONDS)  # not permitted: let it read what has arrived
        self._old_connections.clear()


def _hashed(key: str) -> str:
    """Return the part of a key that decides its slot: its hash tag, or else the whole key."""
    _, brace, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return tag if brace and closed and tag else key


def slot_of(key: str) -> int:
    """Return the slot of a key: the CRC16 (XMODEM variant) of its hashed part, modulo 16,384."""
    return binascii.crc_hqx(_hashed(key).encode(), 0) % _SLOTS


def common_tag(stream: Template) -> str | None:
    """Return a hash tag of the slot that all streams of a template share, None if they may not."""
    first = stream.parts[0]
    if not isinstance(first, str):
        return None
    tag = _hashed(first)
    if stream.variables and tag == first:
        return None  # a variable is part of the hashed text
    return None if "}" in tag else tag


def by_slot(batch: SinkBatch) -> list[tuple[int, SinkBatch]]:
    """Split a batch by slot; the messages of each slot stay in order."""
    streams = batch.messages.column("destination").dictionary_encode()
    names = cast("list[str]", streams.dictionary.to_pylist())
    slots = np.array([slot_of(name) for name in names])
    of_rows = slots[streams.indices.to_numpy()]
    present = np.unique(of_rows)
    if len(present) == 1:
        return [(int(present[0]), batch)]
    order = np.argsort(of_rows, kind="stable")
    parts = np.split(order, np.searchsorted(of_rows[order], present[1:]))
    return [
        (int(slot), replace(batch, messages=batch.messages.take(rows)))
        for slot, rows in zip(present, parts, strict=True)
    ]
