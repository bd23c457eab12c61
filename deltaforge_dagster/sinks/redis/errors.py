"""Translates the errors of Redis servers.

An error line begins with a code (redis.io, "Redis serialization protocol specification", "Simple
errors"), which decides whether it helps to wait and retry. Its text can repeat the command's
arguments, so messages include only the part before them.
"""

from __future__ import annotations

import re

import redis
from redis import exceptions

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.sinks.connections import TimedOut
from deltaforge_dagster.sinks.redis.link import Address

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
