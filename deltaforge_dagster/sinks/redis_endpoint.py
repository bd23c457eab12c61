"""Where a Redis server is, and what its refusals mean.

Error lines begin with a code (redis.io, "Redis serialization protocol specification", "Simple
errors"); the code decides whether waiting helps. Their text can repeat arguments, so only the part
before those goes into messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SinkRejected,
    SinkUnavailable,
    SpecError,
)

_FOR_NOW = frozenset(
    [
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "EXECABORT",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
        "UNBLOCKED",
    ]
)
"""Codes of a server that may take the same commands later."""

_SENTINEL = re.compile(
    r"^redis(s?)\+sentinel://(?:([^@/]*)@)?([^/?#@]+)/([^/?#]+)(?:/(\d+))?(\?.*)?$"
)
_SENTINEL_PORT = 26379


class TimedOut(SinkUnavailable):
    """The server did not answer in time: waiting was tried, the sink does not try it again."""

    kind = "timeout"


class Endpoint:
    """Makes connections to the server that a URI names.

    The URI is one of redis-py's `from_url` (`redis://`, `rediss://` with TLS, `unix://`, and their
    options), or `redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/database]`,
    where Sentinel is asked for the master of `service` each time; user and password are the
    server's. `rediss+sentinel://` means TLS to the server.

    Raises:
        SpecError: The URI is none of these.
    """

    def __init__(self, sink_id: str, uri: str, connect_timeout: float, send_timeout: float) -> None:
        limits = {
            "socket_connect_timeout": connect_timeout,
            "socket_timeout": send_timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        self._master: Callable[[], tuple[str, int]] | None = None
        try:
            if match := _SENTINEL.match(uri):
                tls, user, hosts, service, database, query = match.groups("")
                uri = f"redis{tls}://{user}{'@' if user else ''}sentinel/{database}{query}"
                addresses = [_host_and_port(host) for host in hosts.split(",")]
                sentinel = Sentinel(addresses, sentinel_kwargs=limits)
                self._master = lambda: sentinel.discover_master(unquote(service))
            options = parse_url(uri)
            self._class = options.pop("connection_class", redis.Connection)
            # RESP2 is what `resp` speaks.
            self._options = {**options, **limits, "protocol": 2}
            self._class(**self._options)
        except (ValueError, TypeError, redis.RedisError):
            # Not chained: the foreign message can repeat a password with a "/" or "@" in it.
            raise SpecError(
                f"sink {sink_id}: uri is not a Redis URI: expected redis://, rediss://, unix:// or "
                "redis+sentinel://, known options, and user and password percent-encoded"
            ) from None

    def connection(self) -> redis.Connection:
        """Return a connection that is not connected yet.

        Raises:
            redis.ConnectionError: No Sentinel answers, or none knows a master.
        """
        if self._master is not None:
            self._options["host"], self._options["port"] = self._master()
        connection: redis.Connection = self._class(**self._options)
        return connection


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if parts.hostname is None:
        raise ValueError
    return parts.hostname, parts.port or _SENTINEL_PORT


def address(connection: redis.Connection) -> str:
    """Return how to call the server in messages: no user, no password."""
    path = getattr(connection, "path", None)
    return f"redis at {path or f'{connection.host}:{connection.port}'}"


def translated(sink_id: str, where: str, error: redis.RedisError) -> DeltaforgeError:
    """Return our error for one that redis-py raised while it connected to `where`."""
    text = f"{where}: {_harmless(str(error))}"
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return _auth_failed(sink_id, text)
    if isinstance(error, redis.exceptions.NoPermissionError):
        return _permission_missing(sink_id, text, None)
    if isinstance(error, redis.TimeoutError):
        return TimedOut(f"sink {sink_id}: {text}")
    if isinstance(error, redis.ConnectionError):
        return SinkUnavailable(f"sink {sink_id}: {text}")
    return refusal(sink_id, str(error), None)


def refusal(sink_id: str, line: str, stream: str | None) -> DeltaforgeError:
    """Return our error for an error line of the server.

    Args:
        sink_id: Names the sink in the message.
        line: The line without its `-`.
        stream: Name of the stream that the refused command writes, when it is known.
    """
    code, text = line.partition(" ")[0], _harmless(line)
    if code in {"NOAUTH", "WRONGPASS"} or "invalid username-password" in line:
        return _auth_failed(sink_id, text)
    if code == "NOPERM":
        return _permission_missing(sink_id, text, stream)
    where = f"sink {sink_id}: " + (f"stream {stream!r}: " if stream is not None else "")
    if code == "WRONGTYPE":
        return SinkRejected(
            f"{where}there is a key of this name that is not a stream; rename or delete it, or "
            "send to another stream"
        )
    if code in _FOR_NOW or "max number of clients" in line:
        return SinkUnavailable(f"{where}the server refused for now: {text}")
    return SinkRejected(f"{where}the server refused: {text}")


def _auth_failed(sink_id: str, text: str) -> AuthFailed:
    return AuthFailed(f"sink {sink_id}: the server refused user or password of its uri: {text}")


def _permission_missing(sink_id: str, text: str, stream: str | None) -> PermissionMissing:
    command = re.search(r"'([^']+)' command", text)
    grant = f"+{command[1]}" if command else f"~{stream or '<stream>'}"
    return PermissionMissing(
        f"sink {sink_id}: the Redis user lacks a permission: {text}; grant it with "
        f"ACL SETUSER <user> {grant} (the sink needs +multi +exec +xadd and ~<each stream>, with "
        "exactly_once also +watch +unwatch +get +set and ~deltaforge:position:*)"
    )


def _harmless(text: str) -> str:
    return text.partition(", with args")[0][:200]
