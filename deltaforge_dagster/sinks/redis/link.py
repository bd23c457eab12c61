"""One connection to a Redis server for blocks: redis-py sets it up, its socket is used directly.

Blocks (`resp`) and their replies are too large for redis-py to pack and parse, so their bytes
bypass it. The link also watches the key of a sink's position, knows its own client id on the
server, and can end other connections there.
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
from deltaforge_dagster.sinks.connections import timed, too_late
from deltaforge_dagster.sinks.redis.link import Address, address, refusal
from deltaforge_dagster.sinks.redis.resp import PackedCommands, Replies, Verdict

_PIECE = 1 << 18
"""Bytes handed to the socket at once: small enough that the timeout measures progress."""

_NOT_TEXT = b"(not a text)"
"""Stands for a position key that is not a string.

It is not a position, but can be replaced by one.
"""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Identity(NamedTuple):
    """A connection as its server identifies it; client ids start again when the server restarts."""

    server: str = ""
    client_id: int = 0


class RedisLink:
    """One connection: redis-py connects and authenticates, then blocks are sent through its socket.

    Attributes:
        address: Name of the server in messages.
        identity: Known once connected; its server part is empty if the user may not run INFO.
        in_cluster: Whether the server is a node of a Redis Cluster; known once connected.
        queued: The block whose commands have been sent, but not the end, without which they have no
            effect; or None.
        executing: Whether the end of a block has been sent, at least in part, and the block was not
            answered.
        held: Value of the watched key, None if it does not exist.
        alone: Whether the other connections of the same name have been ended.
    """

    def __init__(self, sink_id: str, connection: redis.Connection, send_timeout: float) -> None:
        self.identity = Identity()
        self.in_cluster = False
        self._clean = False
        self.queued: PackedCommands | None = None
        self.executing = False
        self.held: bytes | None = None
        self.alone = False
        self._watched: str | None = None
        self._sink_id = sink_id
        self.address = address(connection)
        self._connection = connection
        self._send_timeout = send_timeout
        self._replies = Replies()

    def connect(self) -> None:
        """Connect, and check that the server can take blocks.

        Raises:
            SinkUnavailable: The server is a replica.
            redis.RedisError: As raised by redis-py.
        """
        self._connection.connect()
        answer = self._request("HELLO", 2)  # alternating names and values
        hello = dict(zip(answer[::2], answer[1::2], strict=True))
        self.in_cluster = hello[b"mode"] == b"cluster"
        if hello[b"role"] != b"master" and not self.in_cluster:
            raise SinkUnavailable(
                f"sink {self._sink_id}: {self.address} is a replica, which takes no writes"
            )
        # Try MULTI before any block: if it were refused in one, the block's commands would run
        # singly.
        self._request("MULTI")
        self._request("EXEC")
        self.identity = Identity(self._server_process(), hello[b"id"])
        self._clean = True

    def ready_for(self, block: PackedCommands | None) -> bool:
        """Whether it is connected, everything is answered, and at most this block is queued."""
        return self._clean and (self.queued is None or self.queued is block)

    def slots(self) -> list[tuple[range, Address]]:
        """Return the slot ranges and their masters in the cluster (`CLUSTER SLOTS`).

        Raises:
            redis.RedisError: As raised by redis-py.
        """
        ranges = []
        for first, last, (host, port, *_), *_ in self._request("CLUSTER", "SLOTS"):
            # An empty host means the node that was asked.
            name = host.decode() if host else self._connection.host
            ranges.append((range(first, last + 1), (name, port)))
        return ranges

    def ask(self) -> None:
        """Make the node accept the next block for a slot that is being migrated to it (`ASKING`).

        Raises:
            redis.RedisError: As raised by redis-py.
        """
        self._request("ASKING")

    def kill(self, client_id: int) -> bool:
        """End another connection on the server; return False if the server refuses."""
        try:
            self._request("CLIENT", "KILL", "ID", client_id)
        except redis.ResponseError:
            return False
        return True

    def end_others(self, name: str) -> None:
        """Give this connection `name` and end others that have it, dropping their partial blocks.

        Otherwise a run that was suspended within a block and has lost its lease would send the rest
        when it resumes. Without the permission to end connections, only the guard prevents that.
        """
        self.alone = True
        with contextlib.suppress(redis.ResponseError):
            for line in self._request("CLIENT", "LIST").decode().splitlines():
                other = dict(word.partition("=")[::2] for word in line.split(" "))
                if other.get("name") == name and int(other["id"]) != self.identity.client_id:
                    self.kill(int(other["id"]))
            self._request("CLIENT", "SETNAME", name)

    def watch(self, key: str | None) -> None:
        """Watch `key`, so that the next block has no effect if it changes, and read it into `held`.

        Does nothing if the key is already watched. With None, the next block is always executed.

        Raises:
            redis.RedisError: As raised by redis-py.
        """
        if key == self._watched:
            return
        if self._watched is not None:
            self._request("UNWATCH")
        self._watched = key
        if key is None:
            return
        self._request("WATCH", key)
        try:
            self.held = self._request("GET", key)
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            self.held = _NOT_TEXT

    def queue(self, block: PackedCommands, deadline: float) -> None:
        """Have the server queue a block, also while the one before executes.

        `deadline` is a monotonic time.
        """
        if not self.executing:
            self._expect(block)
        self._clean = False
        self._send(block.queued, deadline)
        self.queued = block
        self._clean = not self.executing

    def execute(self, deadline: float) -> None:
        """Have the server execute the block that it has queued."""
        assert self.queued is not None
        self._clean, self.executing = False, True
        self._send(self.queued.executed, deadline)
        self.queued = None

    def receive(self, deadline: float) -> Verdict:
        """Wait for the reply to the block that is being executed."""
        with self._socket(deadline) as next_socket:
            verdict = None
            while verdict is None:
                size = next_socket().recv_into(self._replies.space())
                if size == 0:
                    raise ConnectionResetError("the server closed it")
                verdict = self._replies.received(size, more=self.queued is not None)
        self._clean, self.executing = True, False
        self.held = verdict.held  # and watched again, if it was
        if self.queued is not None:
            self._expect(self.queued)
        return verdict

    def rehearse(self, commands: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Let the server check commands, given with their keys, without executing them.

        The server checks permissions when it queues a command in a transaction. The transaction
        ends only with the connection, which cannot be used for anything else afterwards.

        Raises:
            PermissionMissing: The user may not run one of the commands.
            redis.RedisError: As raised by redis-py.
        """
        self._clean = False
        self._request("MULTI")
        for key, command in commands:
            try:
                self._request(*command)
            except exceptions.NoPermissionError as error:
                raise refusal(self._sink_id, f"NOPERM {error}", key) from error

    def interrupt(self) -> None:
        """Make calls in another thread fail that are waiting for the server."""
        with contextlib.suppress(OSError):
            # Not the TLS socket's own method: it would discard the other thread's state.
            socket.socket.shutdown(self._raw_socket(), socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the part of a block that has not left yet never will."""
        with contextlib.suppress(OSError):
            sock = self._raw_socket()
            if self.executing:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                sock.close()
        self._connection.disconnect()

    def _expect(self, block: PackedCommands) -> None:
        self._replies.expect(block.rows, keeping=block.position is not None)

    def _send(self, data: memoryview | bytes, deadline: float) -> None:
        with self._socket(deadline) as next_socket:
            sent = 0
            while sent < len(data):
                sent += next_socket().send(data[sent : sent + _PIECE])

    def _request(self, *command: str | int) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()

    def _server_process(self) -> str:
        """Return the random id of the server's process, or "" if the user may not run INFO."""
        try:
            info: bytes = self._request("INFO", "server")
        except redis.ResponseError:
            return ""
        return info.partition(b"run_id:")[2].partition(b"\r")[0].decode()

    def _raw_socket(self) -> socket.socket:
        # redis-py has no public access to the socket of a connection.
        sock: socket.socket | None = self._connection._sock  # noqa: SLF001
        if sock is None:
            raise ConnectionResetError("not connected")
        return sock

    @contextlib.contextmanager
    def _socket(self, deadline: float) -> Iterator[Callable[[], socket.socket]]:
        """Yield a function that returns the socket with its next timeout; translate failures."""
        sock = self._raw_socket()

        where = f"sink {self._sink_id}: {self.address}"
        try:
            yield partial(timed, sock, deadline, self._send_timeout)
        except TimeoutError as error:
            raise too_late(where, self._send_timeout) from error
        except OSError as error:
            if (line := self._last_words()) is not None:
                raise refusal(self._sink_id, line, None) from error
            raise SinkUnavailable(f"{where}: connection lost: {error}") from error
        except SinkUnavailable as error:
            raise SinkUnavailable(f"{where}: {error}") from error

    def _last_words(self) -> str | None:
        """Return the error that the server sent before it closed the connection, or None."""
        with contextlib.suppress(OSError, SinkUnavailable):
            sock = self._raw_socket()
            sock.settimeout(0)
            while (size := sock.recv_into(self._replies.space())) > 0:
                self._replies.received(size)
        return self._replies.so_far().error
