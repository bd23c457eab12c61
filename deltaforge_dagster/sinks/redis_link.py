"""One connection to a Redis server, for blocks: made by redis-py, then used without it.

A block (`resp`) is too large to be packed and its answer to be parsed by redis-py, so their bytes go
through the connection's own socket. The link also watches the key of a sink's position, knows how
its server calls it, and can end other connections there.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import redis
from redis import exceptions

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.sinks.deadlines import timed, too_late
from deltaforge_dagster.sinks.redis_endpoint import Address
from deltaforge_dagster.sinks.redis_errors import address, refusal
from deltaforge_dagster.sinks.resp import Block
from deltaforge_dagster.sinks.resp_replies import Replies, Verdict

_PIECE = 1 << 18
"""Bytes handed to the socket at once: small enough that the timeout is about progress."""

_NOT_TEXT = b"(not a text)"
"""Stands for a position key that is no string: it is nobody's position, but it can be replaced."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Identity(NamedTuple):
    """A connection as its server knows it; ids start again when the server does."""

    server: str = ""
    client_id: int = 0


class Link:
    """One connection: redis-py makes and authenticates it, then blocks go through its socket.

    Attributes:
        address: How to call the server in messages.
        identity: Known once connected; the server's part is empty when it may not be asked.
        in_cluster: The server is a node of a Redis Cluster; known once connected.
        clean: Connected, and nothing sent that was not answered.
        sending: Connected, and a block was sent that was not answered.
        held: What the watched key holds, None for nothing.
        alone: Nobody else sends under its name.
    """

    def __init__(self, sink_id: str, connection: redis.Connection, send_timeout: float) -> None:
        self.identity = Identity()
        self.in_cluster = False
        self.clean = False
        self.sending = False
        self.held: bytes | None = None
        self.alone = False
        self._watched: str | None = None
        self._sink_id = sink_id
        self.address = address(connection)
        self._connection = connection
        self._send_timeout = send_timeout
        self._replies = Replies()

    def connect(self) -> None:
        """Connect and refuse a server that cannot take blocks.

        Raises:
            redis.RedisError: As redis-py has it.
        """
        self._connection.connect()
        answer = self._ask("HELLO", 2)  # names and values in turn
        hello = dict(zip(answer[::2], answer[1::2], strict=True))
        self.in_cluster = hello[b"mode"] == b"cluster"
        if hello[b"role"] != b"master" and not self.in_cluster:
            raise SinkUnavailable(
                f"sink {self._sink_id}: {self.address} is a replica, which takes no writes"
            )
        # While nothing is at stake: after a refused MULTI the commands behind it run one by one.
        self._ask("MULTI")
        self._ask("EXEC")
        self.identity = Identity(self._server_process(), hello[b"id"])
        self.clean = True

    def slots(self) -> list[tuple[range, Address]]:
        """Return which master of the cluster has which slots (`CLUSTER SLOTS`).

        Raises:
            redis.RedisError: As redis-py has it.
        """
        found = []
        for first, last, (host, port, *_), *_ in self._ask("CLUSTER", "SLOTS"):
            # A node that does not know its own name means the one that was asked.
            name = host.decode() if host else self._connection.host
            found.append((range(first, last + 1), (name, port)))
        return found

    def ask(self) -> None:
        """Let the next block be taken for a slot that is on its way to this node.

        Raises:
            redis.RedisError: As redis-py has it.
        """
        self._ask("ASKING")

    def kill(self, client_id: int) -> bool:
        """End another connection on the server; false when we are not permitted to."""
        try:
            self._ask("CLIENT", "KILL", "ID", client_id)
        except redis.ResponseError:
            return False
        return True

    def end_others(self, name: str) -> None:
        """Take `name`, and end the connections that have it: what they sent in part is dropped.

        A run that was stopped amid a block, and overtaken, would otherwise send the rest when it
        goes on. Where we are not permitted to, only the guard keeps it from sending more.
        """
        self.alone = True
        with contextlib.suppress(redis.ResponseError):
            for line in self._ask("CLIENT", "LIST").decode().splitlines():
                other = dict(word.partition("=")[::2] for word in line.split(" "))
                if other.get("name") == name and int(other["id"]) != self.identity.client_id:
                    self.kill(int(other["id"]))
            self._ask("CLIENT", "SETNAME", name)

    def watch(self, key: str | None) -> None:
        """Let the next block do nothing if `key` has changed by then, and read it into `held`.

        Does nothing when the key is watched already; None lets the block be executed regardless.

        Raises:
            redis.RedisError: As redis-py has it.
        """
        if key == self._watched:
            return
        if self._watched is not None:
            self._ask("UNWATCH")
        self._watched = key
        if key is None:
            return
        self._ask("WATCH", key)
        try:
            self.held = self._ask("GET", key)
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            self.held = _NOT_TEXT

    def transmit(self, block: Block, deadline: float) -> None:
        """Send a block; `deadline` is a monotonic time."""
        self._replies.expect(block.rows, keeping=block.position is not None)
        self.clean, self.sending = False, True
        with self._socket(deadline) as next_socket:
            sent = 0
            while sent < len(block.data):
                sent += next_socket().send(block.data[sent : sent + _PIECE])

    def receive(self, deadline: float) -> Verdict:
        """Wait for the answer to the block that was sent."""
        with self._socket(deadline) as next_socket:
            verdict = None
            while verdict is None:
                size = next_socket().recv_into(self._replies.space())
                if size == 0:
                    raise ConnectionResetError("the server closed it")
                verdict = self._replies.received(size)
        self.clean, self.sending = True, False
        self.held = verdict.held  # and watched again, if it was
        return verdict

    def rehearse(self, commands: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Have the server look at commands, each with its key, that are never executed.

        It looks whether the user may run them when they join a transaction. Only the connection's
        end takes them back, so it is of no use afterwards.

        Raises:
            PermissionMissing: The user may not run one of them.
            redis.RedisError: As redis-py has it.
        """
        self.clean = False
        self._ask("MULTI")
        for key, command in commands:
            try:
                self._ask(*command)
            except exceptions.NoPermissionError as error:
                raise refusal(self._sink_id, f"NOPERM {error}", key) from error

    def interrupt(self) -> None:
        """Make calls fail that wait for the server in another thread."""
        with contextlib.suppress(OSError):
            # Not the TLS socket's own method, which takes its state away from the other thread.
            socket.socket.shutdown(self._raw(), socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; what of a block has not left yet never will."""
        with contextlib.suppress(OSError):
            sock = self._raw()
            if self.sending:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                sock.close()
        self._connection.disconnect()

    def _ask(self, *command: str | int) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()

    def _server_process(self) -> str:
        """Return the random id of the server's process, empty when we may not ask."""
        try:
            info: bytes = self._ask("INFO", "server")
        except redis.ResponseError:
            return ""
        return info.partition(b"run_id:")[2].partition(b"\r")[0].decode()

    def _raw(self) -> socket.socket:
        # redis-py has no public way to the socket of a connection.
        sock: socket.socket | None = self._connection._sock  # noqa: SLF001
        if sock is None:
            raise ConnectionResetError("not connected")
        return sock

    @contextlib.contextmanager
    def _socket(self, deadline: float) -> Iterator[Callable[[], socket.socket]]:
        """Give a function that returns the socket with its next timeout; translate failures."""
        sock = self._raw()

        where = f"sink {self._sink_id}: {self.address}"
        try:
            yield partial(timed, sock, deadline, self._send_timeout)
        except TimeoutError as error:
            raise too_late(where, self._send_timeout) from error
        except OSError as error:
            if (said := self._last_words()) is not None:
                raise refusal(self._sink_id, said, None) from error
            raise SinkUnavailable(f"{where}: connection lost: {error}") from error
        except SinkUnavailable as error:
            raise SinkUnavailable(f"{where}: {error}") from error

    def _last_words(self) -> str | None:
        """Return the error that the server gave before it closed the connection, if it did."""
        with contextlib.suppress(OSError, SinkUnavailable):
            sock = self._raw()
            sock.settimeout(0)
            while (size := sock.recv_into(self._replies.space())) > 0:
                self._replies.received(size)
        return self._replies.so_far().error
