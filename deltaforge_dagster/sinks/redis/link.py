"""One connection to a Redis server for blocks: redis-py sets it up, its socket is used directly.

Blocks (`resp`) and their replies are too large for redis-py to pack and parse, so their bytes
bypass it. The link also watches the key of a sink's position, knows its own client id on the
server, and can end other connections there. `Endpoint` finds the server that a URI names.

Errors: an error line begins with a code (redis.io, "Redis serialization protocol specification",
"Simple errors"), which decides whether it helps to wait and retry. Its text can repeat the
command's arguments, so messages include only the part before them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
    SpecError,
)
from deltaforge_dagster.folders import unreadable_file
from deltaforge_dagster.sinks.connections import TimedOut, timed, too_late
from deltaforge_dagster.sinks.redis.resp import PackedCommands, Replies, Verdict

_MANY = re.compile(
    r"^redis(?P<tls>s?)\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^/?#@]+)"
    r"(?:/(?P<path>[^?#]*))?(?P<query>\?.*)?$"
)
_SERVICE = re.compile(r"([^/]+)(?:/(\d+))?")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORTS = {"sentinel": 26379, "cluster": 6379}

Address = tuple[str, int]
"""Host and port."""

_TRANSIENT = frozenset(
    [
        "BUSY",
        "CLUSTERDOWN",
        "EXECABORT",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
        "UNBLOCKED",
    ]
)
"""Codes of transient errors: the server may accept the same commands later."""

_TRANSIENT_CLASSES = (
    redis.ConnectionError,
    exceptions.ClusterDownError,
    exceptions.ExecAbortError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)
"""The same errors as redis-py's classes, whose text lacks the code."""

_TOO_LARGE = ("invalid bulk length", "Elements are too large")
"""Errors for a string above `proto-max-bulk-len` (512 MB), after which the server hangs up, and for
an entry above 1 GB.
"""

_PIECE = 1 << 18
"""Bytes handed to the socket at once: small enough that the timeout measures progress."""

_NOT_TEXT = b"(not a text)"
"""Stands for a position key that is not a string.

It is not a position, but can be replaced by one.
"""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER, 0 s: the kernel drops bytes not sent yet


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
        stored: Value of the watched key, None if it does not exist.
        alone: Whether the other connections of the same name have been ended.
    """

    def __init__(self, sink_id: str, connection: redis.Connection, send_timeout: float) -> None:
        self.identity = Identity()
        self.in_cluster = False
        self._clean = False
        self.queued: PackedCommands | None = None
        self.executing = False
        self.stored: bytes | None = None
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
        """Watch `key`, so that the next block has no effect if it changes; read it into `stored`.

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
            self.stored = self._request("GET", key)
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            self.stored = _NOT_TEXT

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
        self.stored = verdict.stored  # and watched again, if it was
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


class Endpoint:
    """Makes connections to the server that a URI names.

    The URI has a form that redis-py's `from_url` accepts (`redis://`, `rediss://` with TLS,
    `unix://`, and their options), or names several hosts, `host[:port][,host[:port]...]`:

    - `redis+sentinel://[user:password@]hosts/service[/database]`: Sentinels, which are asked for
      the master of `service` for each connection; user and password are those of the master;
    - `redis+cluster://[user:password@]hosts`: nodes of a Redis Cluster, some of which may be down.
      A single node can also be given as `redis://`.

    `rediss+` instead of `redis+` means TLS to the servers.

    Raises:
        SpecError: The URI is none of these.
    """

    def __init__(self, sink_id: str, uri: str, connect_timeout: float, send_timeout: float) -> None:
        limits = {
            "socket_connect_timeout": connect_timeout,
            "socket_timeout": send_timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        self._sink_id = sink_id
        self._next: Callable[[], Address] | None = None
        try:
            if match := _MANY.match(uri):
                uri = self._single_server_uri(match, limits)
            options = parse_url(uri)
            self._class = options.pop("connection_class", redis.Connection)
            # `resp` implements RESP2.
            self._options = {**options, **limits, "protocol": 2}
            self._class(**self._options)
        except (ValueError, TypeError, redis.RedisError):
            # Not chained: the original message can repeat a password that contains "/" or "@".
            raise SpecError(
                f"sink {sink_id}: uri is not a Redis URI: expected redis://, rediss://, unix://, "
                "redis+sentinel:// or redis+cluster://, known options, and user and password "
                "percent-encoded"
            ) from None

    def _single_server_uri(self, match: re.Match[str], limits: dict[str, object]) -> str:
        """Store how to choose among a URI's hosts; return an equivalent URI of a single server."""
        kind, path, user = match["kind"], match["path"] or "", match["user"]
        addresses = [_address(host, _PORTS[kind]) for host in match["hosts"].split(",")]
        database = ""
        if kind == "sentinel":
            if (parts := _SERVICE.fullmatch(path)) is None:
                raise ValueError
            service, database = unquote(parts[1]), parts[2] or ""
            sentinel = Sentinel(addresses, sentinel_kwargs=limits)
            self._next = partial(_master, sentinel, service)
        elif path not in {"", "0"}:
            raise ValueError
        else:
            self._next = itertools.cycle(addresses).__next__
        login = f"{user}@" if user else ""
        return f"redis{match['tls']}://{login}{kind}/{database}{match['query'] or ''}"

    def connection(self, address: Address | None = None) -> redis.Connection:
        """Return a connection that is not connected yet.

        Args:
            address: Another server of the same cluster; None for the server that the URI names
                (each time the next one if it names several nodes).

        Raises:
            redis.ConnectionError: No Sentinel answers, or none knows a master.
            SettingsError: A file that the URI names cannot be read.
        """
        options = self._options
        unreadable = unreadable_file({name: options.get(name) for name in _FILES})
        if unreadable is not None:
            raise SettingsError(f"sink {self._sink_id}: {unreadable}")
        if address is None and self._next is not None:
            address = self._next()
        if address is not None:
            options = {**options, "host": address[0], "port": address[1]}
        connection: redis.Connection = self._class(**options)
        return connection


def _master(sentinel: Sentinel, service: str) -> Address:
    """Ask the Sentinels for the address of a master; no connection to them stays open."""
    try:
        master: Address = sentinel.discover_master(service)
    finally:
        for client in sentinel.sentinels:
            client.close()
    return master


def _address(text: str, port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if parts.hostname is None:
        raise ValueError
    return parts.hostname, parts.port or port


class TooLarge(SinkRejected):
    """A message is larger than the server accepts."""


class Redirected(SinkUnavailable):
    """Another node of the cluster has the slot of a stream.

    Attributes:
        slot: Number of the slot.
        address: Address of that node.
        asking: Whether only the next block must go there, because the slot is still being migrated.
    """

    def __init__(self, message: str, slot: int, address: Address, *, asking: bool) -> None:
        super().__init__(message)
        self.slot = slot
        self.address = address
        self.asking = asking


def address(connection: redis.Connection) -> str:
    """Return the server's name for messages, without user and password."""
    path = getattr(connection, "path", None)
    return f"redis at {path or f'{connection.host}:{connection.port}'}"


def translated(sink_id: str, where: str, error: redis.RedisError) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an error that redis-py raised in talking to `where`."""
    text = f"{where}: {_without_arguments(str(error))}"
    if isinstance(error, redis.AuthenticationError | exceptions.AuthorizationError):
        return _auth_failed(sink_id, text)
    if isinstance(error, exceptions.NoPermissionError):
        return _permission_missing(sink_id, text, None)
    if isinstance(error, redis.TimeoutError):
        return TimedOut(f"sink {sink_id}: {text}")
    if isinstance(error, exceptions.AskError):
        code = "MOVED" if isinstance(error, exceptions.MovedError) else "ASK"
        return refusal(sink_id, f"{code} {error}", None)
    if isinstance(error, _TRANSIENT_CLASSES):
        return SinkUnavailable(f"sink {sink_id}: {text}")
    return refusal(sink_id, str(error), None)


def refusal(sink_id: str, line: str, stream: str | None) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an error line of the server.

    Args:
        sink_id: Name of the sink in the message.
        line: The line without its leading `-`.
        stream: Name of the stream that the refused command writes, or None if unknown.
    """
    code, text = line.partition(" ")[0], _without_arguments(line)
    where = f"sink {sink_id}: " + (f"stream {stream!r}: " if stream is not None else "")
    if code in {"NOAUTH", "WRONGPASS"} or "invalid username-password" in line:
        return _auth_failed(sink_id, text)
    if code == "NOPERM":
        return _permission_missing(sink_id, text, stream)
    if code in {"MOVED", "ASK"}:
        return _redirected(where, line)
    if code == "WRONGTYPE":
        return SinkRejected(
            f"{where}there is a key of this name that is not a stream; rename or delete it, or "
            "send to another stream"
        )
    if code in _TRANSIENT or "max number of clients" in line:
        return SinkUnavailable(f"{where}the server refused for now: {text}")
    kind = TooLarge if any(words in line for words in _TOO_LARGE) else SinkRejected
    return kind(f"{where}the server refused: {text}")


def _redirected(where: str, line: str) -> Redirected:
    code, slot, target = line.split(" ")[:3]
    host, _, port = target.rpartition(":")
    message = f"{where}another node of the cluster has it: {_without_arguments(line)}"
    return Redirected(message, int(slot), (host, int(port)), asking=code == "ASK")


def _auth_failed(sink_id: str, text: str) -> AuthFailed:
    return AuthFailed(f"sink {sink_id}: the server refused user or password of its uri: {text}")


def _permission_missing(sink_id: str, text: str, stream: str | None) -> PermissionMissing:
    command = re.search(r"'([^']+)' command", text)
    grant = f"+{command[1]}" if command else f"~{stream or '<stream>'}"
    return PermissionMissing(
        f"sink {sink_id}: the Redis user lacks a permission: {text}; grant it with "
        f"ACL SETUSER <user> {grant} (the sink needs +multi +exec +xadd and ~<each stream>, with "
        "exactly_once also +watch +unwatch +get +set and ~deltaforge:position:*, on a cluster "
        "+cluster|slots and +asking)"
    )


def _without_arguments(text: str) -> str:
    return text.partition(", with args")[0][:200]
