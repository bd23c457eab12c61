"""One Redis server and the connection to it, made on demand and dropped after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import redis

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sinks.connections import Use
from deltaforge_dagster.sinks.redis.link import Identity, RedisLink, translated
from deltaforge_dagster.sinks.redis.resp import PackedCommands

_DRAIN_SECONDS = 1.0


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
