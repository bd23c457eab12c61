"""Translates the errors of NATS servers.

JetStream answers with an error code (nats-server, `errors.json`), the server itself with an `-ERR`
line (docs.nats.io, "Client Protocol"). Either one decides whether it helps to wait and retry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SinkRejected,
    SinkUnavailable,
)

WRONG_SEQUENCE = frozenset([10071, 10164])
"""The last sequence of the stream or the subject is not the one that the message expects."""
WRONG_MESSAGE = 10070
"""The stream's last message is not the one that the message expects."""
NOBODY_LISTENS = 503
"""A status, not a JetStream code: nobody listens to the subject."""
TOO_LARGE = 10054
NOT_THIS_STREAM = 10060
NO_STREAM = 10059
NO_MESSAGE = 10037
NOT_ENABLED = frozenset([10039, 10076])

_STORE_FAILED = 10077
_TRANSIENT = frozenset(
    [
        10002,  # the account's resources are used up
        10008,  # the cluster is choosing a leader
        10023,  # the server's resources are used up
        10028,  # its memory
        10047,  # its disk
        10074,  # a replica is missing
        10118,  # the stream is offline
        10163,  # a message before this one is still being stored
        10167,  # more is waiting to be stored than the server keeps
        10194,  # the stream is offline, with a reason
    ]
)

_QUOTED = re.compile(r"'(.*)'", re.DOTALL)
_PERMISSION = re.compile(r"(?i)permissions violation for (publish|subscription) to (\S+)")


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error of JetStream: its code, 0 if there is none, and its text."""

    code: int
    text: str

    @property
    def passes(self) -> bool:
        """Whether the error is transient, so that the same request may succeed later."""
        return self.code in _TRANSIENT or (self.code == _STORE_FAILED and not self.too_large)

    @property
    def too_large(self) -> bool:
        """Whether a message is larger than its stream accepts."""
        return self.code == TOO_LARGE or (self.code == _STORE_FAILED and "too large" in self.text)

    @property
    def sequence(self) -> int | None:
        """The actual sequence that an error of `WRONG_SEQUENCE` names, or None."""
        number = self.text.rpartition(" ")[2]
        return int(number) if self.code in WRONG_SEQUENCE and number.isdecimal() else None


def api_error(text: str) -> ApiError:
    """Parse an answer other than a success: JSON with an error, or a status."""
    if text.startswith("NATS/"):
        status = text.partition("\r")[0].split(" ")
        code = int(status[1]) if len(status) > 1 and status[1].isdecimal() else 0
        return ApiError(code, " ".join(status[1:]))
    try:
        error = orjson.loads(text)["error"]
        return ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(0, "an answer that is none")


def refusal(where: str, error: ApiError) -> DeltaforgeError:
    """Return the `DeltaforgeError` for a refusal that is not due to the message itself."""
    if error.passes:
        return SinkUnavailable(f"{where}: the server refused for now: {error.text}")
    if error.code in NOT_ENABLED:
        return SinkRejected(
            f"{where}: JetStream is not enabled, for the server or for this account; enable it, or "
            "leave out `stream` to publish without storing"
        )
    return SinkRejected(f"{where}: the server refused: {error.text} ({error.code})")


def server_error(where: str, line: str) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an `-ERR` line."""
    match = _QUOTED.search(line)
    text = (match[1] if match else line)[:200]
    lower = text.lower()
    if permission := _PERMISSION.search(text):
        action = "publish to" if permission[1].lower() == "publish" else "subscribe to"
        return PermissionMissing(
            f"{where}: the NATS user may not {action} {permission[2]}; the sink needs to publish "
            "to its subjects and to $JS.API.STREAM.INFO.<stream>, with exactly_once also to "
            "$JS.API.STREAM.MSG.GET.<stream>, and to subscribe to _INBOX.>"
        )
    if "auth" in lower or "credential" in lower:
        return AuthFailed(
            f"{where}: the server refused credentials_file, username, password or token: {text}"
        )
    if any(word in lower for word in ("payload", "control line", "protocol", "subject", "parser")):
        return SinkRejected(f"{where}: the server refused: {text}")
    return SinkUnavailable(f"{where}: the server ended the connection: {text}")
